"""Seconds and bytes of a new version, for every encoding and transport. See benchmarks/README.md.

    python benchmarks/sync.py --json docs/results/sync.json
    python benchmarks/sync.py --only 50m --only fan-out
    python benchmarks/sync.py --tiny                        # to see that it runs

Models of 1, 50 and 500 million weights take real steps at learning rate 1e-6 through the `Learner` that training uses.
The last one is published, cast to bfloat16, to a receiver in a process of its own. `fan-out` publishes to 1, 2, 4 and 8
receivers, and asks the kernel how many bytes left the sender.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from egress import tcp_sent_bytes
from gpu_model import Shape, random_model, word_tokenizer
from gpu_record import Ceilings, Part, options, parts_table, read, run, spread
from learner import Bench, make_group
from sync_ray import RayTaker, Store
from sync_receivers import ProcessTaker
from torch import Tensor

from headrace.config import LearnerSection
from headrace.learner.learner import Learner
from headrace.learner.ranks import Intake
from headrace.measured import PublishTimes
from headrace.policy.policy import Policy
from headrace.publish.collective import CollectiveSender
from headrace.publish.disk import DiskSender
from headrace.publish.encoding import Encoder
from headrace.publish.publisher import Publisher
from headrace.roles import SendingEnd

DTYPE = torch.bfloat16
ADAPTER_RANK = 16
TOKENS, LENGTH = 256, 64  # of a step: its gradient touches every weight, whatever the number
SIZES = {
    "1m": Shape(hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, head_size=32, vocab=2000),
    "50m": Shape(hidden=512, intermediate=1536, layers=12, heads=8, kv_heads=4, head_size=64, vocab=24000),
    "500m": Shape(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_size=128, vocab=58000),
}
TINY = replace(SIZES["1m"], vocab=600, layers=1)
TRANSPORTS = ("disk", "collective", "object_store")
ENCODINGS = ("full", "delta", "adapter")
FAN_OUT = (1, 2, 4, 8)

TIMEOUT_S = 300.0

Weights = dict[str, Tensor]


def cast(tensors: Weights) -> Iterator[tuple[str, Tensor]]:
    """As they travel, one at a time: a learner casts while it gathers."""
    return ((name, tensor.to(DTYPE)) for name, tensor in tensors.items())


def publish_once(publisher: Publisher, subscribers: list[Any], version: int, tensors: Weights) -> PublishTimes:
    """What it took, with the slowest receiver's part of `transfer` and, as `apply`, its writing into live weights."""
    ticket = publisher.stage(version, cast(tensors))
    with ThreadPoolExecutor(len(subscribers) + 1) as pool:
        ends = [*(subscriber.stage for subscriber in subscribers), publisher.send]
        list(pool.map(lambda end: end(ticket, TIMEOUT_S), ends))
    fetch_s, apply_s = map(max, zip(*(subscriber.commit(version) for subscriber in subscribers), strict=True))
    publisher.commit(version)
    seconds, num_bytes = publisher.times["transfer"]
    return {**publisher.times, "transfer": (seconds + fetch_s, num_bytes), "apply": (apply_s, num_bytes)}


def copy_s(num_bytes: int) -> float:
    """Seconds of one copy in memory, best of 3: a lower limit for moving weights here."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    return min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=3))


def save_and_load_s(weights: Weights) -> float:
    """Seconds for `torch.save` of all weights, `torch.load`, and a copy into place."""
    live = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    with tempfile.TemporaryFile() as file:
        started = time.perf_counter()
        torch.save(dict(weights), file)
        file.seek(0)
        for name, tensor in torch.load(file).items():
            live[name].copy_(tensor)
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model before and after a step, in float32, and what the delta of each step took.

    Example:
        Trained(before={...}, after={...}, delta_shares=[0.043, 0.031, 0.024], changed_shares=[0.042, 0.03, 0.022])
    """

    before: Weights
    after: Weights
    delta_shares: list[float]  # bytes of each step's delta, of those of all weights
    changed_shares: list[float]  # elements

    @property
    def full_bytes(self) -> int:
        """Of all weights, as they travel."""
        return DTYPE.itemsize * sum(tensor.numel() for tensor in self.after.values())


@lru_cache(maxsize=1)  # the largest fill the memory
def trained(shape: Shape, steps: int) -> Trained:
    """Real steps on answers of random tokens."""
    device = torch.device("cpu")
    policy = Policy(random_model(shape, device), word_tokenizer(shape.vocab, ends=False))
    section = LearnerSection(lr=1e-6, micro_batch_tokens=TOKENS)
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=LENGTH, total_steps=steps)
    bench = Bench(shape, LENGTH, TOKENS, device, Ceilings(0, 0, 0, None), 1)
    named, encoder = dict(policy.model.named_parameters()), Encoder("delta")
    full = encoder.encode(0, cast(named)).manifest.num_bytes
    encoder.committed(0)
    shares, changed, before = [], [], {}
    for step in range(1, steps + 1):
        if step == steps:
            before = {name: tensor.detach().clone() for name, tensor in named.items()}
        intake = Intake(section)
        for items in [*intake.add(make_group(bench, step)), *intake.rest()]:
            learner.accumulate(items)
        assert not learner.finish().skipped
        manifest = encoder.encode(step, cast(named)).manifest
        encoder.committed(step)
        shares.append(manifest.num_bytes / full)
        changed.append(DTYPE.itemsize * sum(spec.num_changed for spec in manifest.tensors) / full)
    after = {name: tensor.detach() for name, tensor in named.items()}
    return Trained(before=before, after=after, delta_shares=shares, changed_shares=changed)


def with_adapter(weights: Weights, seed: int) -> Weights:
    """The two matrices of an adapter beside every matrix of the layers."""
    generator = torch.Generator().manual_seed(seed)
    found = dict(weights)
    for name, tensor in weights.items():
        if tensor.ndim == 2 and ".layers." in name:
            outputs, inputs = tensor.shape
            found[f"{name}.lora_A"] = torch.randn(ADAPTER_RANK, inputs, generator=generator)
            found[f"{name}.lora_B"] = torch.randn(outputs, ADAPTER_RANK, generator=generator)
    return found


class Stores:
    """The object store, started when first needed: one at a time, on one node or on several."""

    def __init__(self) -> None:
        self._open: Store | None = None

    def get(self, num_others: int, room_bytes: int) -> Store:
        """One with so many other nodes."""
        if self._open is None or self._open.num_others != num_others:
            self.close()
            self._open = Store(num_others, room_bytes)
        return self._open

    def close(self) -> None:
        """Stop it."""
        if self._open is not None:
            self._open.close()
            self._open = None


STORES = Stores()


@contextmanager
def ends(transport: str, shapes: Any, receivers: int, *, spread_out: bool) -> Iterator[tuple[Any, ...]]:
    """A sender here, receivers elsewhere, their nodes, and what the sender has sent so far."""
    with ExitStack() as stack:
        if transport == "object_store":
            made = STORES.get(max(FAN_OUT), 500 << 20) if spread_out else STORES.get(0, 4 << 30)
            nodes = made.others[:receivers] if spread_out else [made.here] * receivers
            takers: list[Any] = [stack.enter_context(RayTaker(node, shapes)) for node in nodes]
            yield made.sender(), takers, nodes, made.sent_bytes
            return
        room = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        end: SendingEnd = DiskSender(room) if transport == "disk" else CollectiveSender()
        takers = [stack.enter_context(ProcessTaker(transport, shapes)) for _ in range(receivers)]
        yield end, takers, [""] * receivers, tcp_sent_bytes


def publish(
    model: Callable[[], Trained], transport: str, encoding: str, repeats: int, receivers: int | None = None
) -> dict[str, Any]:
    """The step's weights, again and again: every other publication goes back to those before it."""
    found = model()
    versions = [found.before, found.after]
    if encoding == "adapter":
        versions = [with_adapter(weights, seed) for seed, weights in enumerate(versions)]
    shapes = {name: tuple(tensor.shape) for name, tensor in versions[0].items()}
    if encoding == "adapter":  # the receiver has all weights, and gets those of the adapter
        versions = [{name: w for name, w in weights.items() if "lora_" in name} for weights in versions]
    measured: list[PublishTimes] = []
    sent: list[int] = []
    fan_out = receivers is not None
    with ends(transport, shapes, receivers or 1, spread_out=fan_out) as (end, takers, nodes, sent_bytes):
        publisher = Publisher(Encoder(encoding), end)
        publisher.expect(nodes)
        publish_once(publisher, takers, 0, versions[0])  # connects everybody, and is the base
        for version in range(1, 2 * repeats):
            before = sent_bytes()
            times = publish_once(publisher, takers, version, versions[version % 2])
            if version % 2:
                measured.append(times)
                sent.append(sent_bytes() - before)
        _check(takers, versions[-1])
    _, moved = measured[-1]["transfer"]
    return {
        "full_bytes": found.full_bytes,
        "bytes": moved,
        "of_full": moved / found.full_bytes,
        "sender_sent_bytes": spread(sent),
        "total_s": spread([sum(seconds for seconds, _ in times.values()) for times in measured]),
        "times": [_flat(times) for times in measured],
    }


def _flat(times: PublishTimes) -> dict[str, float]:
    seconds = {f"{operation}_s": taken for operation, (taken, _) in times.items()}
    return seconds | {f"{operation}_bytes": num_bytes for operation, (_, num_bytes) in times.items()}


def _check(takers: list[Any], weights: Weights) -> None:
    """All receivers hold the weights that were sent."""
    expected = sum(int(w.to(DTYPE).view(torch.int16).sum(dtype=torch.int64)) for w in weights.values())
    assert all(taker.bit_sum() == expected for taker in takers), "a receiver holds other weights than were sent"


def plain(model: Callable[[], Trained], repeats: int) -> dict[str, Any]:
    """What it is compared with, and what the steps changed."""
    found = model()
    weights = dict(cast(found.after))
    return {
        "num_params": sum(tensor.numel() for tensor in found.after.values()),
        "full_bytes": found.full_bytes,
        "copy_s": copy_s(found.full_bytes),
        "total_s": spread([save_and_load_s(weights) for _ in range(repeats)]),
        "delta_shares": found.delta_shares,
        "changed_shares": found.changed_shares,
    }


# ---- the command


def parts(arguments: argparse.Namespace, ceilings: Ceilings) -> dict[str, Part]:
    found: dict[str, Part] = {}
    sizes, repeats = dict.fromkeys(SIZES, TINY) if arguments.tiny else SIZES, arguments.repeats
    for size, shape in sizes.items():
        model = partial(trained, shape, arguments.steps)
        found[f"{size}/plain"] = partial(plain, model, repeats)
        for transport in TRANSPORTS:
            for encoding in ENCODINGS:
                found[f"{size}/{transport}/{encoding}"] = partial(publish, model, transport, encoding, repeats)
    model = partial(trained, sizes["50m"], arguments.steps)
    for transport in TRANSPORTS:
        for count in FAN_OUT:
            found[f"fan-out/{transport}/{count}"] = partial(publish, model, transport, "full", repeats, count)
    return found


def summary(results: dict[str, Any]) -> str:
    header = ["part", "MB", "of full", "s (median, range)", "/ save + load", "/ one copy", "sender sent, MB"]
    return parts_table(results, header, partial(_cells, results))


def _cells(results: dict[str, Any], found: dict[str, Any]) -> list[str]:
    peers = [one for name, one in results["parts"].items() if name.endswith("/plain") and "error" not in one]
    peer = next((one for one in peers if one["full_bytes"] == found["full_bytes"]), None)
    total = found["total_s"]
    seconds = f"{total['median']:.3f} ({total['low']:.3f} to {total['high']:.3f})"
    ratios = ["", ""]
    if peer is not None:
        ratios = [f"{total['median'] / peer['total_s']['median']:.2f}", f"{total['median'] / peer['copy_s']:.1f}"]
    if "delta_shares" in found:
        return [f"{found['full_bytes'] / 1e6:,.1f}", "", seconds, *ratios, ""]
    sent = found["sender_sent_bytes"]["median"]
    return [f"{found['bytes'] / 1e6:,.2f}", f"{found['of_full']:.2%}", seconds, *ratios, f"{sent / 1e6:,.1f}"]


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="of training, of which the last one is published")
    parser.set_defaults(device="cpu")
    try:
        return run("sync", read(parser, given), parts, summary)
    finally:
        STORES.close()


if __name__ == "__main__":
    main()

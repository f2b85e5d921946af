"""What publishing costs on this machine: so many weights, real AdamW steps, every encoding by every transport.

Sender and receivers are threads of one process here, so cores and memory are shared; the bytes go the way they would.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.publish.encoding import Encoder, Encoding, cast
from headrace.publish.publisher import Publisher, Subscriber, with_receivers
from headrace.types import PublishTimes, Ticket

LEARNING_RATE = 1e-6
STEPS = 3  # before the one that is measured: an optimizer's first step moves every weight, as no later one does
ADAPTER_RANK = 16
TIMEOUT_S = 300.0

Weights = Mapping[str, Tensor]
Ends = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """One publication.

    Example:
        SyncCost(encoding="delta", transport="disk", full_bytes=100_000_000, times=PublishTimes(...))
    """

    encoding: str
    transport: str
    full_bytes: int  # all weights in the precision of rollout
    times: PublishTimes


class Taker(Protocol):
    """A subscriber, or one that speaks for a subscriber elsewhere."""

    times: PublishTimes

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch and check."""
        ...

    def commit(self, version: int) -> None:
        """Make it live."""
        ...


def publish_once(
    publisher: Publisher, takers: Sequence[Taker], version: int, tensors: Weights, timeout_s: float = TIMEOUT_S
) -> PublishTimes:
    """A whole publication: staged, sent and fetched at the same time, committed by all."""
    ticket = publisher.stage(version, tensors.items())
    with ThreadPoolExecutor(len(takers) + 1) as pool:
        jobs = [pool.submit(taker.stage, ticket, timeout_s) for taker in takers]
        jobs.append(pool.submit(publisher.send, ticket, timeout_s))
        for job in jobs:
            job.result()
    for taker in takers:
        taker.commit(version)
    publisher.commit(version)
    return with_receivers(publisher.times, (taker.times for taker in takers))


def two_versions(num_params: int, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Float32 weights before and after a step of AdamW, some steps into a run, with their adapter."""
    generator = torch.Generator().manual_seed(seed)
    width = 256 if num_params < 5e6 else 1024 if num_params < 2e8 else 2048
    tensors: dict[str, Tensor] = {}
    for layer in range(max(1, num_params // width**2)):
        tensors[f"{layer}.weight"] = torch.randn(width, width, generator=generator) * 0.02
        tensors[f"{layer}.lora_A.weight"] = torch.randn(ADAPTER_RANK, width, generator=generator) * 0.02
        tensors[f"{layer}.lora_B.weight"] = torch.zeros(width, ADAPTER_RANK)
    optimizer = torch.optim.AdamW(tensors.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    before: dict[str, Tensor] = {}
    for step in range(STEPS + 1):
        if step == STEPS:
            before = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: tensor.detach() for name, tensor in tensors.items()}


def measure(
    transport: str, encoding: str, versions: Sequence[Weights], ends: tuple[Ends, Ends], receivers: int = 1
) -> SyncCost:
    """The cost of the last of some versions, in bfloat16; those before it connect everybody and are the base."""
    dtype = torch.bfloat16
    chosen = [
        {name: tensor for name, tensor in version.items() if encoding == Encoding.ADAPTER or "lora_" not in name}
        for version in versions
    ]
    with closing(ends[0]()) as end:
        takers = [Subscriber(ends[1](), dict(cast(chosen[0].items(), dtype))) for _ in range(receivers)]
        end.expect([""] * receivers)
        publisher = Publisher(Encoder(encoding), end, dtype)
        for version, tensors in enumerate(chosen, 1):
            times = publish_once(publisher, takers, version, tensors)
        for taker in takers:
            taker.close()
    full_bytes = sum(dtype.itemsize * tensor.numel() for name, tensor in versions[0].items() if "lora_" not in name)
    return SyncCost(encoding=encoding, transport=transport, full_bytes=full_bytes, times=times)


@contextmanager
def local_transports(directory: Path | None = None) -> Iterator[dict[str, tuple[Ends, Ends]]]:
    """The transports that need nothing installed: how to make either end."""
    with tempfile.TemporaryDirectory(dir=directory) as room:
        yield {
            "disk": (lambda: DiskSender(Path(room)), DiskReceiver),
            "collective": (CollectiveSender, CollectiveReceiver),
        }


def copy_s(num_bytes: int) -> float:
    """Seconds to copy so many bytes from memory to memory, at best: the limit for moving weights on this machine."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    return min(_seconds(lambda: target.copy_(source)) for _ in range(3))


def save_and_load_s(weights: Weights, directory: Path | None = None) -> float:
    """Seconds that the plain way takes: `torch.save` of all weights, `torch.load`, and a copy into place."""
    live = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def plain(file: Path) -> None:
        torch.save(dict(weights), file)
        for name, tensor in torch.load(file).items():
            live[name].copy_(tensor)

    with tempfile.TemporaryDirectory(dir=directory) as room:
        return _seconds(lambda: plain(Path(room) / "weights.pt"))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started

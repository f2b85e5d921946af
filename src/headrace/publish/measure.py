"""What publishing costs on this machine: real AdamW steps, every encoding and transport.

Sender and receivers are threads of one process, so they share cores and memory.
"""

import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.measured import PublishTimes
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.publish.encoding import Encoder, EncodingKind, cast
from headrace.publish.publisher import Publisher, Subscriber, with_receivers

LEARNING_RATE = 1e-6
STEPS = 3  # before the measured one: AdamW's first steps move more weights than later ones
ADAPTER_RANK = 16
TIMEOUT_S = 300.0

Weights = Mapping[str, Tensor]
Ends = Callable[[], Any]


def publish_once(publisher: Publisher, subscribers: list[Subscriber], version: int, tensors: Weights) -> PublishTimes:
    ticket = publisher.stage(version, tensors.items())
    with ThreadPoolExecutor(len(subscribers) + 1) as pool:
        ends = [*(subscriber.stage for subscriber in subscribers), publisher.send]
        list(pool.map(lambda end: end(ticket, TIMEOUT_S), ends))
    for subscriber in subscribers:
        subscriber.commit(version)
    publisher.commit(version)
    return with_receivers(publisher.times, [subscriber.times for subscriber in subscribers])


def two_versions(num_params: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Float32 weights before and after one step of AdamW, with a LoRA adapter."""
    generator = torch.Generator().manual_seed(0)
    width = 256 if num_params < 5e6 else 1024 if num_params < 2e8 else 2048
    tensors: dict[str, Tensor] = {}
    for layer in range(max(1, num_params // width**2)):
        tensors[f"{layer}.weight"] = torch.randn(width, width, generator=generator) * 0.02
        tensors[f"{layer}.lora_A.weight"] = torch.randn(ADAPTER_RANK, width, generator=generator) * 0.02
        tensors[f"{layer}.lora_B.weight"] = torch.zeros(width, ADAPTER_RANK)
    optimizer = torch.optim.AdamW(tensors.values(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for _ in range(STEPS + 1):
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()
    return before, {name: tensor.detach() for name, tensor in tensors.items()}


def measure(encoding: str, versions: Sequence[Weights], ends: tuple[Ends, Ends], receivers: int) -> PublishTimes:
    """Publish `versions` in bfloat16; the times of the last. The first connects the receivers."""
    everything = encoding == EncodingKind.ADAPTER
    chosen = [{name: v[name] for name in v if everything or "lora_" not in name} for v in versions]
    end, dtype = ends[0](), torch.bfloat16
    subscribers = [Subscriber(ends[1](), dict(cast(chosen[0].items(), dtype))) for _ in range(receivers)]
    end.expect([""] * receivers)
    publisher = Publisher(Encoder(encoding), end, dtype)
    for version, tensors in enumerate(chosen, 1):
        times = publish_once(publisher, subscribers, version, tensors)
    return times


@contextmanager
def local_transports() -> Iterator[dict[str, tuple[Ends, Ends]]]:
    """By name, the constructors of both ends of the transports that need no extra library."""
    with tempfile.TemporaryDirectory() as room:
        disk = (lambda: DiskSender(Path(room)), DiskReceiver)
        yield {"disk": disk, "collective": (CollectiveSender, CollectiveReceiver)}


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

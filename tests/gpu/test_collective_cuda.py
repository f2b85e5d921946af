"""New weights from GPU to GPU by NCCL. On a machine with one, NCCL 2.30 and later takes several ranks for it if
NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.errors import PublishError
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.encoding import Encoder, Named
from headrace.publish.publisher import Publisher, Subscriber
from headrace.types import Ticket

NUM_RECEIVERS = 2
SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or (torch.cuda.device_count() <= NUM_RECEIVERS and not SHARED),
        reason="needs several CUDA devices, or an NCCL that shares one",
    ),
]
SIZES = (3_000_001, 17, 999_999)
FIRST_S, SHORT_S = 120.0, 20.0


def device_of(number: int) -> str:
    return f"cuda:{number % torch.cuda.device_count()}"


def weights(version: int) -> list[Named]:
    """Every tenth element differs from the version before."""
    found = []
    for number, size in enumerate(SIZES):
        tensor = torch.arange(size, dtype=torch.float32).remainder(251).to(torch.bfloat16)
        for changed in range(version + 1):
            tensor[changed::10] = float(changed * 7 + number)
        found.append((f"w{number}", tensor))
    return found


def on_device(version: int) -> list[Named]:
    return [(name, tensor.to(device_of(0))) for name, tensor in weights(version)]


def as_bytes(named: Iterable[Named]) -> dict[str, bytes]:
    return {name: tensor.cpu().view(torch.int16).numpy().tobytes() for name, tensor in named}


def receiver(pipe: Any, number: int) -> None:
    """In a process of its own: fetch, commit, tell what came."""
    device = device_of(number)
    torch.cuda.set_device(device)
    held = {name: torch.zeros_like(tensor, device=device) for name, tensor in weights(0)}
    subscriber = Subscriber(CollectiveReceiver(device=device), held)
    while True:
        ticket, timeout_s = pipe.recv()
        try:
            subscriber.stage(ticket, timeout_s)
            subscriber.commit(ticket.version)
            pipe.send(as_bytes(held.items()))
        except PublishError as error:
            pipe.send(str(error))


class Receivers:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = [], []
        for number in range(NUM_RECEIVERS):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=receiver, args=(there, number + 1), daemon=True))
            self.processes[-1].start()
            self.pipes.append(here)

    def get(self, publisher: Publisher, ticket: Ticket, timeout_s: float) -> list[Any]:
        with ThreadPoolExecutor(1) as sending:
            sent = sending.submit(publisher.send, ticket, timeout_s)
            for pipe in self.pipes:
                pipe.send((ticket, timeout_s))
            found = [pipe.recv() if pipe.poll(timeout_s + 60) else "nothing" for pipe in self.pipes]
            with contextlib.suppress(PublishError):  # whoever gets nothing says so
                sent.result()
        return found


@pytest.fixture
def receivers() -> Iterator[Receivers]:
    made = Receivers()
    yield made
    for process in made.processes:
        process.kill()


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_the_same_bytes_arrive_and_a_death_is_an_error_not_a_hang(receivers: Receivers, encoding: str) -> None:
    torch.cuda.set_device(0)
    sender = CollectiveSender(device=device_of(0))
    publisher = Publisher(Encoder(encoding), sender)
    publisher.expect(["here"] * NUM_RECEIVERS)
    for version in range(3):
        ticket = publisher.stage(version, on_device(version))
        assert receivers.get(publisher, ticket, FIRST_S) == [as_bytes(on_device(version))] * NUM_RECEIVERS
        publisher.commit(version)

    receivers.processes.pop().kill()
    receivers.pipes.pop()
    ticket = publisher.stage(3, on_device(3))
    (found,) = receivers.get(publisher, ticket, SHORT_S)
    if "did not arrive" in found:
        publisher.abandon(3)
    else:  # the dead one was the last of the chain, and what the other passed on to it was too little to be missed
        assert found == as_bytes(on_device(3))
        publisher.commit(3)

    publisher.expect(["here"] * (NUM_RECEIVERS - 1))
    ticket = publisher.stage(4, on_device(4))
    assert receivers.get(publisher, ticket, FIRST_S) == [as_bytes(on_device(4))]

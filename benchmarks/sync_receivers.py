"""Receivers in processes of their own: children of the benchmark, or Ray workers (`sync_ray.py`)."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from headrace.publish.collective import CollectiveReceiver
from headrace.publish.disk import DiskReceiver
from headrace.publish.publisher import Subscriber
from headrace.roles import ReceivingEnd
from headrace.types import Ticket

Shapes = Mapping[str, tuple[int, ...]]
ENDS: dict[str, Callable[[], ReceivingEnd]] = {"disk": DiskReceiver, "collective": CollectiveReceiver}


class Receiver:
    """Weights of an engine, and the subscriber that writes to them."""

    def __init__(self, end: ReceivingEnd, shapes: Shapes) -> None:
        torch.set_num_threads(1)
        self._live = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        self._subscriber = Subscriber(end, self._live)

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch and check."""
        self._subscriber.stage(ticket, timeout_s)

    def commit(self, version: int) -> tuple[float, float]:
        """Make it live; returns the seconds of fetching it, and of this."""
        started = time.perf_counter()
        self._subscriber.commit(version)
        return self._subscriber.fetch_s, time.perf_counter() - started

    def bit_sum(self) -> int:
        """Of all weights: equal weights have equal sums."""
        return sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) for tensor in self._live.values())


class ProcessTaker:
    """Speaks for a receiver in a child process."""

    def __init__(self, transport: str, shapes: Shapes) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, transport, shapes), daemon=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._process.start()
        there.close()

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch and check, there."""
        self._ask("stage", ticket, timeout_s)

    def commit(self, version: int) -> tuple[float, float]:
        """Make it live, there."""
        fetch_s, apply_s = self._ask("commit", version)
        return fetch_s, apply_s

    def bit_sum(self) -> int:
        """Of its weights."""
        return int(self._ask("bit_sum"))

    def _ask(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, transport: str, shapes: Shapes) -> None:
    receiver = Receiver(ENDS[transport](), shapes)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(receiver, method)(*args))
        except Exception as error:
            pipe.send(error)

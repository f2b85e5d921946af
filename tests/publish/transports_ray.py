"""The object store in the contract's frame: other processes are Ray workers."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from transports import PATIENCE_S

from headrace.publish.object_store_ray import ObjectStoreReceiver, ObjectStoreSender
from headrace.publish.transport import Ticket


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own, without a page, which finds what these tests import."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=300 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def _die() -> None:
    os._exit(1)


@ray.remote(num_cpus=0, max_concurrency=2)
class _Worker:
    def __init__(self) -> None:
        self._said: queue.Queue[Any] = queue.Queue()

    def work(self, work: Callable[..., None], *args: Any) -> None:
        work(self._said.put, ObjectStoreFrame(), *args)

    def hear(self) -> Any:
        return self._said.get()


class _Elsewhere:
    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self._worker = _Worker.remote()  # type: ignore[attr-defined]
        self._worker.work.remote(work, *args)

    def hear(self) -> Any:
        return ray.get(self._worker.hear.remote(), timeout=PATIENCE_S)

    def kill(self) -> None:
        ray.kill(self._worker)


class ObjectStoreFrame:
    def __init__(self) -> None:
        self._workers: list[_Elsewhere] = []

    def sender(self) -> ObjectStoreSender:
        return ObjectStoreSender()

    def receiver(self) -> ObjectStoreReceiver:
        return ObjectStoreReceiver()

    def elsewhere(self, work: Callable[..., None], *args: Any) -> _Elsewhere:
        self._workers.append(_Elsewhere(work, *args))
        return self._workers[-1]

    def tear(self, ticket: Ticket) -> None:
        ticket.where[""][-1] = _die.remote()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

"""The object store in the contract's frame: other processes are Ray workers."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ray
from egress import tcp_sent_bytes
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transports import PATIENCE_S

from headrace.publish.object_store_ray import ObjectStoreReceiver, ObjectStoreSender
from headrace.types import Ticket


@contextmanager
def local_ray() -> Iterator[None]:
    """Three nodes on this machine, whose workers find what these tests import."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    node = {"num_cpus": 1, "object_store_memory": 200 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(2):
            cluster.add_node(wait=False, num_cpus=1, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})
        ObjectStoreFrame.daemons = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def _die() -> None:
    os._exit(1)


@ray.remote(num_cpus=0)
def _fetched_bytes(ticket: Ticket) -> int:
    return sum(map(len, ObjectStoreReceiver().fetch(ticket, PATIENCE_S).buckets))


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
    daemons: ClassVar[list[int]] = []  # the process of each node

    def __init__(self) -> None:
        self._workers: list[_Elsewhere] = []

    def sender(self) -> ObjectStoreSender:
        return ObjectStoreSender()

    def receiver(self) -> ObjectStoreReceiver:
        return ObjectStoreReceiver()

    def elsewhere(self, work: Callable[..., None], *args: Any) -> _Elsewhere:
        self._workers.append(_Elsewhere(work, *args))
        return self._workers[-1]

    def fetched_by_others(self, end: ObjectStoreSender, version: int) -> list[int]:
        """Bytes that a receiver on each of the other nodes fetches, all at the same time."""
        here = ray.get_runtime_context().get_node_id()
        nodes = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
        end.expect(nodes)
        ticket = end.ticket(version)
        there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        return ray.get([_fetched_bytes.options(scheduling_strategy=at).remote(ticket) for at in there])  # type: ignore[no-any-return]

    def sent_bytes_by_node(self) -> list[int]:
        return list(map(tcp_sent_bytes, self.daemons))

    def tear(self, ticket: Ticket) -> None:
        ticket.where[""][-1] = _die.remote()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

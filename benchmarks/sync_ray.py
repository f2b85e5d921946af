"""The object store for `sync.py`: a Ray of several nodes on this machine, receivers spread over them."""

from __future__ import annotations

import logging
import os
import sys
from typing import Self

import ray
from egress import tcp_sent_bytes
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from sync_receivers import Receiver, Shapes

from headrace.publish.object_store_ray import ObjectStoreReceiver, ObjectStoreSender
from headrace.types import Ticket


class RayTaker:
    """Speaks for a receiver in a Ray worker on some node."""

    def __init__(self, node: str, shapes: Shapes) -> None:
        there = ray.remote(Receiver).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        self._worker = there.remote(ObjectStoreReceiver(), shapes)

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch and check, there."""
        ray.get(self._worker.stage.remote(ticket, timeout_s))

    def commit(self, version: int) -> tuple[float, float]:
        """Make it live, there."""
        fetch_s, apply_s = ray.get(self._worker.commit.remote(version))
        return fetch_s, apply_s

    def bit_sum(self) -> int:
        """Of its weights."""
        return int(ray.get(self._worker.bit_sum.remote()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        ray.kill(self._worker)


class Store:
    """A cluster on this machine, which the sender's node and `num_others` make; each has room for so many bytes."""

    def __init__(self, num_others: int, room_bytes: int) -> None:
        self.num_others = num_others
        node = {"num_cpus": 1, "object_store_memory": max(room_bytes, 100 << 20)}
        self._cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        for _ in range(num_others):
            self._cluster.add_node(wait=False, **node)
        self._cluster.wait_for_nodes(timeout=300)
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        ray.init(
            address=self._cluster.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": environment},
        )
        self.here = ray.get_runtime_context().get_node_id()
        self.others = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != self.here]

    def sender(self) -> ObjectStoreSender:
        """On the first node."""
        return ObjectStoreSender()

    def sent_bytes(self) -> int:
        """By the first node, to others."""
        return tcp_sent_bytes(self._cluster.head_node.all_processes["raylet"][0].process.pid)

    def close(self) -> None:
        """Stop it."""
        ray.shutdown()
        self._cluster.shutdown()

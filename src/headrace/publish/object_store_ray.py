"""Transport through Ray's object store: one copy per node, read in place (zero-copy).

Between nodes the buckets travel in a chain. A task on each node takes a bucket from the node before
and keeps a copy for the next node, so every node sends each byte at most once. (Without the chain,
all nodes would fetch from the sender's.)
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.errors import PublishError
from headrace.publish.encoding import Manifest, Payload, verify
from headrace.roles import SendingEnd
from headrace.types import Ticket

_SOURCE = ""  # key of the copies on the sender's own node


@ray.remote(num_cpus=0, max_retries=0)
def _pass_on(bucket: np.ndarray) -> np.ndarray:
    return bucket


class ObjectStoreSender(SendingEnd):
    """Puts buckets into the store of its node and starts the chain to the others."""

    def __init__(self) -> None:
        self._nodes: list[str] = []
        self._staged: dict[int, tuple[Manifest, list[Any]]] = {}

    def expect(self, nodes: Sequence[str]) -> None:
        """The chain visits each node once; the sender's own node is not in it."""
        here = ray.get_runtime_context().get_node_id()
        self._nodes = [node for node in dict.fromkeys(nodes) if node not in (here, _SOURCE)]

    def stage(self, payload: Payload) -> None:
        refs = [ray.put(bucket.cpu().numpy()) for bucket in payload.buckets]
        self._staged[payload.manifest.version] = payload.manifest, refs

    def ticket(self, version: int) -> Ticket:
        """References for every node. The transfer between nodes starts now."""
        manifest, refs = self._staged[version]
        where = {_SOURCE: refs}
        for node in self._nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            refs = [_pass_on.options(scheduling_strategy=there).remote(ref) for ref in refs]
            where[node] = refs
        return Ticket(manifest, where)

    def forget(self, version: int) -> None:
        """The store frees the memory when the last receiver has dropped it."""
        self._staged.pop(version, None)


class ObjectStoreReceiver:
    """Reads from the store of its node."""

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        """The payload is a view of the store's memory, and pins it while it is alive."""
        here = ray.get_runtime_context().get_node_id()
        try:
            arrays = ray.get(ticket.where.get(here, ticket.where[_SOURCE]), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise PublishError(f"version {ticket.version} did not arrive within {timeout_s:g} s: {error}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays are read-only, and nobody writes to them
            return verify(Payload(ticket.manifest, tuple(map(torch.from_numpy, arrays))))

"""Through Ray's object store: a node holds one copy, which all receivers there read in place.

Between nodes the buckets go in a chain. A task on each node takes a bucket from the node before and keeps its own copy
for the node after, so the sender's node sends every byte once. (Left alone, nodes that ask at the same time would all
ask the sender's.)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.errors import PublishError
from headrace.publish.payload import Manifest, Payload, verify
from headrace.types import Ticket

_SOURCE = ""  # the copies that the sender put down itself


@ray.remote(num_cpus=0, max_retries=0)
def _pass_on(bucket: np.ndarray) -> np.ndarray:
    return bucket


class ObjectStoreSender:
    """Puts buckets into the store of its node, and lays the chain to the others."""

    def __init__(self) -> None:
        self._nodes: list[str] = []
        self._staged: dict[int, tuple[Manifest, list[Any]]] = {}

    def expect(self, nodes: Sequence[str]) -> None:
        """Each node once; its own needs no chain."""
        here = ray.get_runtime_context().get_node_id()
        self._nodes = [node for node in dict.fromkeys(nodes) if node not in (here, _SOURCE)]

    def stage(self, payload: Payload) -> None:
        """Into the store of this node."""
        refs = [ray.put(bucket.cpu().numpy()) for bucket in payload.buckets]
        self._staged[payload.manifest.version] = payload.manifest, refs

    def ticket(self, version: int) -> Ticket:
        """References for every node; the buckets set out at once."""
        manifest, refs = self._staged[version]
        where = {_SOURCE: refs}
        for node in self._nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            refs = [_pass_on.options(scheduling_strategy=there).remote(ref) for ref in refs]
            where[node] = refs
        return Ticket(manifest, where)

    def send(self, ticket: Ticket, timeout_s: float) -> None:
        """Ray does it."""

    def forget(self, version: int) -> None:
        """The store frees it when the last receiver has let go."""
        self._staged.pop(version, None)

    def close(self) -> None:
        """Forget all."""
        self._staged.clear()


class ObjectStoreReceiver:
    """Reads from the store of its node."""

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        """The buckets stay where they are: a payload is a view of the store, and holds it while it is alive."""
        here = ray.get_runtime_context().get_node_id()
        try:
            arrays = ray.get(ticket.where.get(here, ticket.where[_SOURCE]), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise PublishError(f"version {ticket.version} is not to be had within {timeout_s:g} s: {error}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather write to them; nobody does
            payload = Payload(ticket.manifest, tuple(map(torch.from_numpy, arrays)))
        verify(payload)
        return payload

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def local_store(num_bytes: int) -> Iterator[tuple[type[ObjectStoreSender], type[ObjectStoreReceiver]]]:
    """Both ends, in the Ray that this process is connected to, or in one of its own with room for so many bytes."""
    own = not ray.is_initialized()
    if own:
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=max(num_bytes, 100 << 20),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield ObjectStoreSender, ObjectStoreReceiver
    finally:
        if own:
            ray.shutdown()

"""Transport by torch.distributed, in its own process group: gloo between CPUs, NCCL between GPUs.

Sender and receivers form a chain (a pipelined broadcast). Each passes a chunk on while the next one
arrives, so the sender sends every byte once, however many receivers there are, and the last has it
only a few chunks later than the first. (In gloo's own broadcast, a tree, the sender sends a copy
for every doubling of the receivers.)

The members of a chain meet at a rendezvous, which every ticket names. A broken chain is not
repaired: the sender opens another rendezvous (`expect`) for whoever is still there.
"""

import os
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from headrace.errors import PublishError
from headrace.network import own_address
from headrace.publish.encoding import Payload, new_bucket, verify
from headrace.types import Ticket

CHUNK_BYTES = 4 << 20
_WINDOW = 4  # chunks under way at a time, to each neighbour
_ARRIVED = "arrived"
_LOOK_S = 0.002


class Meeting(NamedTuple):
    """The rendezvous of a sender and its receivers, at a TCP store."""

    host: str
    port: int
    number: int
    num_receivers: int


class _Chain:
    """A member of the chain: the sender has index 0, receivers count in the order they arrive."""

    def __init__(self, meeting: Meeting, store: Any, index: int | None, device: torch.device, timeout_s: float) -> None:
        self.meeting = meeting
        timeout = timedelta(seconds=timeout_s)
        rendezvous = PrefixStore(f"meeting-{meeting.number}", store)
        rendezvous.set_timeout(timeout)
        self.index: int = rendezvous.add(_ARRIVED, 1) if index is None else index
        deadline = time.monotonic() + timeout_s
        # a group would wait without end for a receiver that died on the way
        while index == 0 and (arrived := rendezvous.add(_ARRIVED, 0)) < meeting.num_receivers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{arrived} of {meeting.num_receivers} receivers came")
            time.sleep(_LOOK_S)
        if self.index > meeting.num_receivers:
            raise PublishError(f"a receiver too many came to the meeting: {meeting.num_receivers} were expected")
        size = meeting.num_receivers + 1
        self._device = device
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a group is made
            before = {name: os.environ[name]} if name in os.environ else {}
            os.environ[name] = "0"  # else NCCL's watchdog ends a process whose operation timed out
            try:
                self._group: Any = distributed.ProcessGroupNCCL(rendezvous, self.index, size, options)
            finally:
                del os.environ[name]
                os.environ.update(before)
        else:
            options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            here = own_address(meeting.host)
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=here)]
            self._group = distributed.ProcessGroupGloo(rendezvous, self.index, size, options)

    def carry(self, buckets: Sequence[Tensor], deadline: float) -> None:
        """Receive every chunk, except at the head, and pass it on, except at the end."""
        chunks = [chunk for bucket in buckets for chunk in bucket.split(CHUNK_BYTES)]
        coming, going = deque[Any](), deque[Any]()

        def wait_for(work: Any) -> None:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

        expected = enumerate(chunks if self.index else ())
        try:
            for number, chunk in enumerate(chunks):
                for ahead, room in islice(expected, _WINDOW + 1 - len(coming)):
                    coming.append(self._group.recv([room], self.index - 1, ahead))
                if coming:
                    wait_for(coming.popleft())
                if self.index < self.meeting.num_receivers:
                    going.append(self._group.send([chunk.to(self._device)], self.index + 1, number))
                if len(going) > _WINDOW:
                    wait_for(going.popleft())
            for work in going:
                wait_for(work)
        except RuntimeError:
            if self._device.type == "cuda":
                self._group.abort()
            raise


class CollectiveSender:
    """The head of the chain."""

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self._host, self._device = own_address(), torch.device(device)
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._numbers = count(1)
        self._staged: dict[int, Payload] = {}
        self.expect(())

    def expect(self, nodes: Sequence[str]) -> None:
        self._chain: _Chain | None = None
        self._meeting = Meeting(self._host, self._store.port, next(self._numbers), len(nodes))

    def stage(self, payload: Payload) -> None:
        self._staged[payload.manifest.version] = payload

    def ticket(self, version: int) -> Ticket:
        return Ticket(self._staged[version].manifest, self._meeting)

    def send(self, ticket: Ticket, timeout_s: float) -> None:
        """Pass every chunk to the first receiver. After a failure the next ticket has a new one."""
        if ticket.where != self._meeting:
            raise PublishError(f"version {ticket.version}: the ticket is void, since other receivers are expected now")
        if not self._meeting.num_receivers:
            return
        deadline = time.monotonic() + timeout_s
        try:
            if self._chain is None:
                self._chain = _Chain(self._meeting, self._store, 0, self._device, timeout_s)
            self._chain.carry(self._staged[ticket.version].buckets, deadline)
        except RuntimeError as error:  # all that torch.distributed raises
            self.expect([""] * self._meeting.num_receivers)
            told = f"a receiver is gone, or did not come within {timeout_s:g} s"
            raise PublishError(f"version {ticket.version} was not sent: {told}") from error

    def forget(self, version: int) -> None:
        self._staged.pop(version, None)


class CollectiveReceiver:
    """A link of the chain. Payloads arrive on `device`."""

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._chain: _Chain | None = None

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        """Receive every chunk and pass it on, damaged or not: each receiver verifies for itself."""
        buckets = tuple(new_bucket(n, self._device) for n in ticket.manifest.sizes)
        deadline = time.monotonic() + timeout_s
        try:
            if self._chain is None or self._chain.meeting != ticket.where:
                self._chain, meeting, timeout = None, ticket.where, timedelta(seconds=timeout_s)
                store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
                self._chain = _Chain(meeting, store, None, self._device, timeout_s)
            self._chain.carry(buckets, deadline)
        except RuntimeError as error:
            self._chain = None
            told = f"did not arrive in {timeout_s:g} s: the sender or a receiver is gone or slow"
            raise PublishError(f"version {ticket.version} {told}") from error
        return verify(Payload(ticket.manifest, buckets))

"""Publishing as a transaction: stage, fetch and verify, commit.

    publisher.expect(nodes)             who receives it
    publisher.stage(8, tensors)         gather, encode; returns a ticket for the receivers
    subscriber.stage(ticket)            fetch and verify while the engine samples on with version 7; at the same time
    publisher.send(ticket)              the sender's part of the transfer
    subscriber.commit(8)                between two engine steps
    publisher.commit(8)                 the next delta starts from here

If a step fails, `abandon` at both ends leaves everybody on version 7. A receiver that joins late
stages and commits the tickets of `Publisher.catch_up`, one after the other.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from headrace.errors import PublishError
from headrace.measured import PublishTimes
from headrace.publish.encoding import Encoder, Manifest, Named, decoded
from headrace.roles import ReceivingEnd, SendingEnd
from headrace.types import Ticket

MAX_DELTAS = 32  # kept since the last base


class Publisher:
    """The learner's side of publishing."""

    def __init__(self, encoder: Encoder, end: SendingEnd) -> None:
        self._encoder, self._end = encoder, end
        self.send = end.send
        self._kept: list[Manifest] = []  # a base and the deltas since, for receivers that join late
        self._old: set[int] = set()  # versions that late receivers still fetch
        self._staged: Ticket | None = None
        self._nodes: list[str] | None = None  # of the receivers that are connected now
        self.times: PublishTimes = {}  # of the version staged last

    def expect(self, nodes: Sequence[str]) -> None:
        """Unchanged `nodes` stay connected."""
        if self._nodes != list(nodes):
            self._nodes = list(nodes)
            self._end.expect(nodes)

    def stage(self, version: int, tensors: Named) -> Ticket:
        """Gather (by iterating `tensors`), encode. Replaces an uncommitted version."""
        if self._staged is not None:
            self.abandon(self._staged.version)
        gathered_s, gathered_bytes = 0.0, 0

        def gathered() -> Iterator[tuple[str, Tensor]]:
            nonlocal gathered_s, gathered_bytes
            began = time.perf_counter()
            for name, tensor in tensors:
                gathered_s += time.perf_counter() - began
                gathered_bytes += tensor.nbytes
                yield name, tensor
                began = time.perf_counter()
            gathered_s += time.perf_counter() - began

        started = time.perf_counter()
        payload = self._encoder.encode(version, gathered())
        encoded = time.perf_counter()
        self._end.stage(payload)
        self._staged = self._end.ticket(version)
        self.times = {
            "gather": (gathered_s, gathered_bytes),
            "encode": (encoded - started - gathered_s, payload.manifest.num_bytes),
            "transfer": (time.perf_counter() - encoded, payload.manifest.num_bytes),
        }
        return self._staged

    def commit(self, version: int, wanted: Sequence[int] = ()) -> None:
        """Forgets what no receiver needs any more; late ones still fetch the `wanted` versions."""
        ticket, self._staged = self._staged, None
        if ticket is None or ticket.version != version:
            raise PublishError(f"version {version} is not the one that is staged")
        self._encoder.committed(version)
        before, new = self._kept, ticket.manifest
        self._kept = [new] if new.base is None else [*before, new]
        base, *deltas = self._kept
        if base.base is not None or len(deltas) > MAX_DELTAS or 2 * sum(d.num_bytes for d in deltas) > base.num_bytes:
            self._kept = []  # sending base and deltas would cost more than a new base
        self._old |= {m.version for m in (*before, new) if m not in self._kept}
        for old in self._old.difference(wanted):
            self._end.forget(old)
        self._old.intersection_update(wanted)

    def abandon(self, version: int) -> None:
        if self._staged is not None and self._staged.version == version:
            self._staged = self._nodes = None  # connect anew: one of the receivers failed
            self._end.forget(version)

    def catch_up(self) -> list[Ticket]:
        """Tickets for new receivers, which `expect` named: a base and the deltas since."""
        if self._nodes is not None:
            self._end.expect(self._nodes)  # new receivers are not connected yet
            self._nodes = None
        if not self._kept and self._encoder.kind == "delta" and self._encoder.version is not None:
            base = self._encoder.rebase()
            self._end.stage(base)
            self._kept = [base.manifest]
        return [self._end.ticket(manifest.version) for manifest in self._kept]


class Subscriber:
    """A rollout worker's side of publishing. `live` are the engine's weights."""

    def __init__(self, end: ReceivingEnd, live: Mapping[str, Tensor]) -> None:
        self._end, self._live = end, live
        self.version: int | None = None  # nothing was committed here yet
        self._staged: tuple[Manifest, list[Callable[[], object]]] | None = None  # and its writes
        self.fetch_s = 0.0  # of the version staged last

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch a version, verify and decode it; the engine keeps the old one."""
        self._staged = None
        started = time.perf_counter()
        payload = self._end.fetch(ticket, timeout_s)
        self._staged = payload.manifest, list(decoded(payload, self._live, self.version))
        self.fetch_s = time.perf_counter() - started

    def commit(self, version: int) -> None:
        """Write the staged version into the live weights. Call it only between two engine steps."""
        if self._staged is None or self._staged[0].version != version:
            raise PublishError(f"version {version} is not the one that is staged")
        (_, writes), self._staged = self._staged, None
        for write in writes:
            write()
        self.version = version

    def abandon(self, version: int) -> None:
        if self._staged is not None and self._staged[0].version == version:
            self._staged = None

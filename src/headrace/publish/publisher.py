"""Publishing as a transaction: stage, fetch and verify, commit, for every receiver or for none.

    publisher.expect(nodes)             who is to get it
    publisher.stage(8, tensors)         gather, cast, encode; a ticket for the receivers
    subscriber.stage(ticket)            each fetches and checks, and goes on with version 7; publisher.send beside it
    subscriber.commit(8)                when all have it: between two engine steps
    publisher.commit(8)                 the next delta starts from here

If one of them fails, `abandon` at both ends leaves everybody on version 7. A receiver that comes late stages and
commits the tickets of `Publisher.catch_up`, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.errors import PublishError
from headrace.publish.encoding import Encoder, Encoding, Named, Update, cast
from headrace.roles import ReceivingEnd, SendingEnd
from headrace.types import PublishTimes, Ticket

OPERATIONS = ("gather", "cast", "encode", "transfer", "apply")
MAX_DELTAS = 32  # between a base and the newest version


def with_receivers(sender: PublishTimes, receivers: Iterable[PublishTimes]) -> PublishTimes:
    """The sender's times and those of the slowest receiver: sending goes on while they fetch."""
    receivers = list(receivers)
    return replace(
        sender,
        transfer_s=sender.transfer_s + max((r.transfer_s for r in receivers), default=0.0),
        apply_s=max((r.apply_s for r in receivers), default=0.0),
        apply_bytes=max((r.apply_bytes for r in receivers), default=0),
    )


class Publisher:
    """The learner's side."""

    def __init__(self, encoder: Encoder, end: SendingEnd, dtype: torch.dtype) -> None:
        self._encoder, self._end, self._dtype = encoder, end, dtype
        self._kept: list[int] = []  # a base and the deltas since: what a late receiver is given
        self._chain_bytes = self._base_bytes = 0  # of the deltas, and of the base
        self._staged: Ticket | None = None
        self._nodes: list[str] | None = None  # of the receivers that are together with this end
        self.times = PublishTimes()  # of the version staged last

    def expect(self, nodes: Sequence[str]) -> None:
        """Who gets the next version: the node of every receiver, one entry each. Those that are together stay so."""
        if self._nodes != list(nodes):
            self._nodes = list(nodes)
            self._end.expect(nodes)

    def stage(self, version: int, tensors: Named) -> Ticket:
        """Gather (whatever the iterable does), cast, encode, and make ready. Replaces one that was not committed."""
        if self._staged is not None:
            self.abandon(self._staged.version)
        gathered = _Timed(tensors)
        wanted = ((name, tensor) for name, tensor in gathered if self._encoder.takes(name))
        converted = _Timed(cast(wanted, self._dtype))
        started = time.perf_counter()
        payload = self._encoder.encode(version, converted)
        encoded = time.perf_counter()
        self._end.stage(payload)
        self._staged = self._end.ticket(version)
        self.times = PublishTimes(
            gather_s=gathered.seconds,
            cast_s=converted.seconds - gathered.seconds,
            encode_s=encoded - started - converted.seconds,
            transfer_s=time.perf_counter() - encoded,
            gather_bytes=gathered.num_bytes,
            cast_bytes=converted.num_bytes,
            encode_bytes=payload.manifest.num_bytes,
            transfer_bytes=payload.manifest.num_bytes,
        )
        return self._staged

    def send(self, ticket: Ticket, timeout_s: float) -> None:
        """The sender's part, while receivers fetch."""
        self._end.send(ticket, timeout_s)

    def commit(self, version: int) -> None:
        """All receivers hold it."""
        ticket, self._staged = self._staged, None
        if ticket is None or ticket.version != version:
            raise PublishError(f"version {version} is not the one that is staged")
        self._encoder.committed(version)
        if ticket.manifest.base is None:
            self._keep_only(ticket)
        elif self._kept:
            self._kept.append(version)
            self._chain_bytes += ticket.manifest.num_bytes
            if len(self._kept) - 1 > MAX_DELTAS or 2 * self._chain_bytes > self._base_bytes:
                self._keep_only(None)  # a base and all these would be more than a new base
        else:
            self._end.forget(version)

    def abandon(self, version: int) -> None:
        """Somebody did not get it: it never was."""
        if self._staged is not None and self._staged.version == version:
            self._staged = self._nodes = None  # whoever failed, the others wait for it no more
            self._end.forget(version)

    def catch_up(self) -> list[Ticket]:
        """For receivers that hold nothing, and are expected: a base and the deltas since. The caller sends them."""
        if self._nodes is not None:
            self._end.expect(self._nodes)  # newcomers are not together with anybody, even if others were on their nodes
            self._nodes = None
        if not self._kept and self._encoder.kind is Encoding.DELTA and self._encoder.version is not None:
            base = self._encoder.rebase()
            self._end.stage(base)
            self._keep_only(self._end.ticket(base.manifest.version))
        return [self._end.ticket(version) for version in self._kept]

    def close(self) -> None:
        """Give everything back."""
        self._end.close()

    def _keep_only(self, base: Ticket | None) -> None:
        for version in self._kept:
            if base is None or version != base.version:
                self._end.forget(version)
        self._kept = [] if base is None else [base.version]
        self._chain_bytes, self._base_bytes = 0, 0 if base is None else base.manifest.num_bytes


class Subscriber:
    """A rollout worker's side: `live` are the weights that its engine computes with."""

    def __init__(self, end: ReceivingEnd, live: Mapping[str, Tensor], version: int | None = None) -> None:
        self._end, self._live = end, live
        self.version = version  # None: none was published to it
        self._staged: Update | None = None
        self.times = PublishTimes()  # of the version staged last

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch a version and check that it fits; the engine goes on with the old one."""
        self._staged = None
        started = time.perf_counter()
        payload = self._end.fetch(ticket, timeout_s)
        self._staged = Update(payload, self._live, self.version)
        seconds = time.perf_counter() - started
        self.times = PublishTimes(transfer_s=seconds, transfer_bytes=payload.manifest.num_bytes)

    def commit(self, version: int) -> None:
        """Write it into the live weights. Call it between two engine steps."""
        if self._staged is None or self._staged.version != version:
            raise PublishError(f"version {version} is not the one that is staged")
        update, self._staged = self._staged, None
        started = time.perf_counter()
        update.write()
        self.version = version
        self.times = replace(self.times, apply_s=time.perf_counter() - started, apply_bytes=update.num_bytes)

    def abandon(self, version: int) -> None:
        """Somebody else did not get it: stay with the old one."""
        if self._staged is not None and self._staged.version == version:
            self._staged = None

    def restart(self) -> None:
        """Whatever comes next is taken, in full: the learner began again, from a version before this one."""
        self.version, self._staged = None, None

    def close(self) -> None:
        """Give everything back."""
        self._end.close()


class _Timed:
    """Passes tensors through, and measures what it took to get them."""

    def __init__(self, tensors: Named) -> None:
        self._tensors = tensors
        self.seconds, self.num_bytes = 0.0, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        tensors = iter(self._tensors)
        while True:
            started = time.perf_counter()
            found = next(tensors, None)
            self.seconds += time.perf_counter() - started
            if found is None:
                return
            self.num_bytes += found[1].numel() * found[1].element_size()
            yield found

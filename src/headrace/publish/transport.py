"""What every transport does: a sending end stages payloads and hands out tickets, a receiving end fetches by ticket.

A ticket is small: it travels by whatever calls the receivers. With one, a receiver gets the payload whole and verified,
or a `PublishError`; every wait has an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.publish.payload import Payload
from headrace.types import Ticket


class SendingEnd(Protocol):
    """The learner's side of a transport."""

    def expect(self, nodes: Sequence[str]) -> None:
        """Who fetches from now on: the node of every receiver, one entry each. Tickets from before are void."""
        ...

    def stage(self, payload: Payload) -> None:
        """Make a payload ready to be fetched. It stays so until `forget`."""
        ...

    def ticket(self, version: int) -> Ticket:
        """For a staged version and the receivers expected now."""
        ...

    def send(self, ticket: Ticket, timeout_s: float) -> None:
        """Do the sender's part while receivers fetch. Where they help themselves there is none."""
        ...

    def forget(self, version: int) -> None:
        """Nobody will fetch the version any more."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class ReceivingEnd(Protocol):
    """A rollout worker's side of a transport."""

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        """The payload, whole and verified."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...

"""Protocols, one for each role that has two or more implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.types import Row


class PromptSource(Protocol):
    """Raw prompt records: a file, a data set or a generator. Position `i` always gives the same record.

    A record has `prompt` (text) or `messages` (a chat), whatever else the reward needs, and may have an `id`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Mapping[str, Any]: ...


class Sink(Protocol):
    """Where ledger rows are exported to, besides the ledger itself."""

    def write(self, row: Row) -> None:
        """Export one row."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


class Device(Protocol):
    """Runs one piece of device work at a time, off the event loop."""

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work(*args)`."""
        ...

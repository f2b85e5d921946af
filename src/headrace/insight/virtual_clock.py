"""An asyncio event loop whose time jumps: where another would wait for the next timer, this one is there at once.

So code that waits, like the buffer, runs unchanged, and hours of it pass in seconds. What happens depends on the order
of timers alone, never on how quick this machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.errors import StalledError

Result = TypeVar("Result")


class _Jump(selectors.SelectSelector):
    """Waits for no file: the time it would have waited has passed when it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("the simulation stands still: everybody waits, and nothing is left that could happen")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at second 0. Nothing outside it can wake it, so no threads, processes or sockets."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Seconds that have passed in the simulation."""
        return self._jump.now_s

    def jump(self, to_s: float) -> bool:
        """Go on to a later moment, if nothing else is to happen before; whether it did.

        What has one event after another to deal with is spared the way through the event loop between them.
        """
        timers = self._scheduled  # type: ignore[attr-defined]
        if self._ready or (timers and timers[0].when() <= to_s):  # type: ignore[attr-defined]
            return False
        self._jump.now_s = max(self._jump.now_s, to_s)
        return True


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, without waiting. Call it where no event loop runs, or in a thread of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

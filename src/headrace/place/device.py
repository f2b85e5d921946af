"""The device thread: engine steps and learner passes take turns on one accelerator (or one CPU).

They share it anyway. Taking turns keeps two thread pools from fighting over the same cores, makes "between two decode
steps" a place in a queue, and costs nothing, since neither would finish earlier beside the other.

On a CPU all heavy work belongs here, loading included: each thread that computes gets OpenMP threads of its own, and
as soon as there are more of them than cores, OpenMP puts them to sleep after every operation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DeviceThread:
    """First come, first served. Not an executor of the library's: the interpreter would not end before its threads."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._between: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """The result of `work(*args)`, run in the device thread."""
        return await asyncio.wrap_future(self.submit(work, *args))

    def call(self, work: Callable[..., Result], *args: Any) -> Result:
        """The same, for a caller that can block."""
        return self.submit(work, *args).result()

    def submit(self, work: Callable[..., Result], *args: Any, **named: Any) -> Future[Result]:
        """Queue work. In the device thread itself it is done at once: it is that thread's turn already."""
        future: Future[Result] = Future()
        if threading.current_thread() is self._thread:
            _do(future, work, args, named)
        else:
            self._queue.put((future, work, args, named))
        return future

    def do_between(self, work: Callable[[], None]) -> None:
        """Call `work` after each piece of work, too."""
        self._between = work

    def close(self, *, wait: bool = True) -> None:
        """Wait for the work under way, unless it hangs."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            _do(*item)
            del item  # while waiting for more, hold on to nothing
            self._between()


def _do(future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work(*args, **named))
    except BaseException as error:
        future.set_exception(error)

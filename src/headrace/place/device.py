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


class DeviceThread:
    """First come, first served. Not an executor of the library's: the interpreter would not end before its threads."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """The result of `work(*args)`, run in the device thread."""
        return await asyncio.wrap_future(self._submit(work, args))

    def call(self, work: Callable[..., Result], *args: Any) -> Result:
        """The same, for whoever can wait: while the run is being built, before there is an event loop to keep going."""
        return self._submit(work, args).result()

    def close(self, *, wait: bool = True) -> None:
        """Wait for the work under way, unless it hangs."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _submit(self, work: Callable[..., Result], args: tuple[Any, ...]) -> Future[Result]:
        future: Future[Result] = Future()
        self._queue.put((future, work, args))
        return future

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work, args = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)
            del item, future, work, args  # while waiting for more, hold on to nothing

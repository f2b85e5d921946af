"""The device thread: engine steps and learner passes take turns on one accelerator (or one CPU).

Side by side they would share it, and neither would finish earlier. Taking turns keeps two thread
pools from competing for the same cores, and makes "between two decode steps" a place in a queue.

On a CPU all heavy work belongs here, loading included: each thread that computes gets OpenMP
threads of its own, and with more of them than cores, OpenMP lets them sleep after every operation.
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
    """Runs work in the order it is queued. A daemon thread: Python waits for those of an executor."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._between: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.wrap_future(self.submit(work, *args))

    def call(self, work: Callable[..., Result], *args: Any) -> Result:
        return self.submit(work, *args).result()

    def submit(self, work: Callable[..., Result], *args: Any, **named: Any) -> Future[Result]:
        """Queue work. Called in the device thread itself, it is done at once."""
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
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            _do(*item)
            del item  # keep no tensors alive while waiting
            self._between()


async def run_beside(work: Callable[..., Result], *args: Any) -> Result:
    """The result of `work(*args)`, in a thread of its own beside the device thread."""
    thread = DeviceThread()
    try:
        return await thread.run(work, *args)
    finally:
        thread.close(wait=False)


def _do(future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work(*args, **named))
    except BaseException as error:
        future.set_exception(error)

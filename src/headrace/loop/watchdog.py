"""Ends a run in which nothing moves any more, with a message instead of silence.

A kernel, a lock or a file system that never answers holds up its stage, and all others wait for that one. The watchdog
looks at what has been done. When that has not changed for long, it says which stage is at work, writes down where every
thread stands, and cancels the run. What hangs is left where it is: the books are as after a kill, and a restart goes on
from there. Only what holds up the event loop itself (a filter, say) cannot be ended from here; the user is told.
"""

from __future__ import annotations

import asyncio
import faulthandler
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import HungError
from headrace.ledger.clock import StageClock

STACKS = "stacks.txt"
ROUNDS = 20  # looks within the time that counts as hung
MOST_S = 5.0  # between two looks

Result = TypeVar("Result")


class Watchdog:
    """Watches the task that starts it. `progress` says what has been done: equal answers mean that nothing was."""

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], object],
        clock: StageClock,
        run_dir: Path,
        on_note: Callable[[str], None],
    ) -> None:
        self.hung = ""  # what is wrong, once nothing moves
        self._limit_s, self._progress, self._clock, self._run_dir = limit_s, progress, clock, run_dir
        self._on_note = on_note
        self._pause_s = min(limit_s / ROUNDS, MOST_S)
        self._watching: asyncio.Task[None] | None = None
        self._looked_s = time.monotonic()
        self._over = threading.Event()

    def start(self) -> None:
        """Watch from here on; a limit of 0 watches nothing."""
        task = asyncio.current_task()
        assert task is not None
        if self._limit_s:
            self._looked_s = time.monotonic()
            self._watching = asyncio.create_task(self._watch(task))
            mind = partial(self._mind_the_events, asyncio.get_running_loop())
            threading.Thread(target=mind, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()
        if self._watching is not None:
            self._watching.cancel()

    def check(self) -> None:
        """Raise HungError if it was this watchdog that ended the run."""
        if self.hung:
            raise HungError(self.hung) from None

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        """Count quiet looks, not seconds: while the machine sleeps or this thread is busy, nothing could have moved."""
        quiet_s, before = 0.0, self._progress()
        while quiet_s < self._limit_s:
            await asyncio.sleep(self._pause_s)
            self._looked_s = time.monotonic()
            now = self._progress()
            quiet_s, before = (quiet_s + self._pause_s if now == before else 0.0), now
        self.hung = (
            f"nothing has moved for {self._limit_s:g} s (recovery.hang_s + reward.timeout_s): {self._at_work()}. Where "
            f"all threads stand is in {self._run_dir / STACKS}. Nothing is lost: `headrace resume {self._run_dir}` "
            "goes on with the run"
        )
        with suppress(OSError):
            write_stacks(self._run_dir / STACKS, asyncio.get_running_loop())
        task.cancel()

    def _mind_the_events(self, events: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: say so, once, when the event loop has not come to look for too long."""
        while not self._over.wait(self._pause_s):
            if time.monotonic() - self._looked_s > self._limit_s:
                with suppress(OSError):
                    write_stacks(self._run_dir / STACKS, events)
                self._on_note(
                    f"something has held up the whole run for {self._limit_s:g} s (recovery.hang_s) and cannot be "
                    f"ended from here; {self._run_dir / STACKS} says what. If it does not return, kill the process: "
                    f"`headrace resume {self._run_dir}` goes on with the run"
                )
                return

    def _at_work(self) -> str:
        spans = sorted(self._clock.running(), key=lambda span: span.start_s)
        first = {span.stage: span for span in reversed(spans)}  # of each stage the one that began first
        if not first:
            return "no stage is at work, all wait for each other"
        return ", ".join(f"{stage} has been at work for {s.end_s - s.start_s:.0f} s" for stage, s in first.items())


def write_stacks(path: Path, events: asyncio.AbstractEventLoop) -> None:
    """Where all threads of this process stand, and what its coroutines wait for."""
    with path.open("w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        for task in asyncio.all_tasks(events):
            file.write(f"\n{task.get_name()} waits (most recent call last):\n")
            coroutine: Any = task.get_coro()
            while (frame := getattr(coroutine, "cr_frame", None)) is not None:
                file.write(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
                coroutine = coroutine.cr_await


def beside(work: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:
    """The result of `work(*args)`, run in a thread that nobody has to wait for should it hang."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=work.__name__, daemon=True).start()
    return asyncio.wrap_future(future)

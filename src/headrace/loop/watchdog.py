"""Ends a run in which nothing makes progress any more, with a message instead of silence.

If a kernel, a lock or a file system never answers, its stage hangs, and all others wait for it. The
watchdog looks at `progress` again and again. When that has not changed for long, it names the busy
stage, writes all stack traces to a file, and cancels the run. The hanging thread is left alone: the
ledger is as after a kill, and the run can be resumed. Code that blocks the event loop itself (a
filter, say) cannot be cancelled; then the user is told.
"""

import asyncio
import faulthandler
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import HungError
from headrace.ledger.files import STACKS
from headrace.measured import StageClock
from headrace.roles import R

ROUNDS = 20  # looks at `progress` within the limit
MOST_S = 5.0  # between two looks
NOBODY = "no stage is at work, all wait for each other"


@dataclass(eq=False)
class Watchdog:
    """Watches the task that starts it. While `progress()` stays the same, nothing was done."""

    limit_s: float
    progress: Callable[[], object]
    clock: StageClock
    run_dir: Path
    on_note: Callable[[str], None]
    hung: str = ""  # what is wrong, once nothing has moved for `limit_s`
    _pause_s: float = 0.0  # between two looks
    _watching: asyncio.Task[None] | None = None
    _looked_s: float = field(default_factory=time.monotonic)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Watch from here on; a limit of 0 watches nothing."""
        task = asyncio.current_task()
        assert task is not None
        if self.limit_s:
            self._pause_s, self._looked_s = min(self.limit_s / ROUNDS, MOST_S), time.monotonic()
            self._watching = asyncio.create_task(self._watch(task))
            watch = partial(self._watch_event_loop, asyncio.get_running_loop())
            threading.Thread(target=watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        if self._watching is not None:
            self._watching.cancel()

    def check(self) -> None:
        """Raise HungError if it was this watchdog that ended the run."""
        if self.hung:
            raise HungError(self.hung) from None

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        """Count looks, not seconds: a machine that slept or a busy event loop is not a hang."""
        quiet_s, before = 0.0, self.progress()
        while quiet_s < self.limit_s:
            await asyncio.sleep(self._pause_s)
            self._looked_s = time.monotonic()
            now = self.progress()
            quiet_s, before = (quiet_s + self._pause_s if now == before else 0.0), now
        # of each stage the span that began first
        spans = sorted(self.clock.running(), key=lambda span: span.start_s)
        first = {span.stage: span.end_s - span.start_s for span in reversed(spans)}
        busy = ", ".join(f"{stage} has been at work for {s:.0f} s" for stage, s in first.items())
        told = f"nothing has moved for {self.limit_s:g} s (recovery.hang_s + reward.timeout_s)"
        stacks = f"The stacks of all threads are in {self.run_dir / STACKS}"
        helps = f"Nothing is lost: `headrace resume {self.run_dir}` goes on with the run"
        self.hung = f"{told}: {busy or NOBODY}. {stacks}. {helps}"
        write_stacks(self.run_dir / STACKS, asyncio.get_running_loop())
        task.cancel()

    def _watch_event_loop(self, events: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: tell the user, once, that the event loop is blocked."""
        while not self._over.wait(self._pause_s):
            if time.monotonic() - self._looked_s > self.limit_s:
                write_stacks(self.run_dir / STACKS, events)
                told = f"something has held up the whole run for {self.limit_s:g} s (recovery.hang_s)"
                stacks = f"cannot be ended from here; {self.run_dir / STACKS} says what"
                helps = f"kill the process: `headrace resume {self.run_dir}` goes on with the run"
                self.on_note(f"{told} and {stacks}. If it does not return, {helps}")
                return


def write_stacks(path: Path, events: asyncio.AbstractEventLoop) -> None:
    """Write the stacks of all threads of this process, and of its waiting coroutines, if there is room."""
    with suppress(OSError), path.open("w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        for task in asyncio.all_tasks(events):
            file.write(f"\n{task.get_name()} waits (most recent call last):\n")
            coroutine: Any = task.get_coro()
            while (frame := getattr(coroutine, "cr_frame", None)) is not None:
                code = frame.f_code
                file.write(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
                coroutine = coroutine.cr_await


def beside(work: Callable[..., R], *args: Any) -> asyncio.Future[R]:
    """Run `work(*args)` in a daemon thread: if it hangs, the process can still end."""
    future: Future[R] = Future()
    threading.Thread(target=settle, args=(future, work, *args), name=work.__name__, daemon=True).start()
    return asyncio.wrap_future(future)


def settle(future: Future[R], work: Callable[..., R], *args: Any, **named: Any) -> None:
    """Do the work, unless `future` is cancelled, and give it the result or the error."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work(*args, **named))
        except BaseException as error:
            future.set_exception(error)


def background(work: Coroutine[Any, Any, R], *kept: set[asyncio.Task[Any]]) -> asyncio.Task[R]:
    """Start `work`. Until it is done, its task is in `kept` sets: asyncio's references are weak."""
    task = asyncio.create_task(work)
    for tasks in kept:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task

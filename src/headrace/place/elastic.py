"""The number of rollout workers changes while a run goes on, to what the run's directory asks for.

A new worker joins once it holds the published version. A worker that is not wanted any more
finishes its answers first. Both happen between two publications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import LearnerLostError, WorkerLostError
from headrace.ledger.files import wanted_workers
from headrace.loop.publishing import WeightPublisher
from headrace.roles import Sampler, Worker
from headrace.rollout.pool import RolloutPool

LOOK_S = 1.0  # between two reads of the wanted number
MOST_FAILURES = 3  # of new workers in a row


class Elastic:
    """Keeps `pool` at the wanted number of workers, which is `num_workers` until another is asked for."""

    def __init__(
        self,
        run_dir: Path,
        num_workers: int,
        pool: RolloutPool,
        on_note: Callable[[str], None],
        *,
        spawn: Callable[[], Worker[Sampler]],
        publisher: Callable[[], WeightPublisher],
    ) -> None:
        self.wanted = wanted_workers(run_dir, num_workers)
        self._run_dir, self._num_workers, self._pool, self._on_note = run_dir, num_workers, pool, on_note
        self._spawn, self._publisher = spawn, publisher
        self._failures = 0
        self._events: asyncio.AbstractEventLoop | None = None
        self._joining: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, *, watch: bool) -> None:
        """Call it on the run's event loop. With `watch`, follow the wanted number."""
        self._events = asyncio.get_running_loop()
        if watch:
            self._fit()
            self._in_background(self._watch())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def lost_one(self) -> None:
        """Replace a worker that the pool has lost."""
        self._failures = 0
        self._fit()

    def give_up(self, worker: Worker[Sampler], why: str) -> None:
        """A worker failed to take a version. Called in the device thread."""
        self._in_loop(lambda worker: self._pool.lose(worker, why), worker)

    async def _watch(self) -> None:
        while True:
            wanted = wanted_workers(self._run_dir, self._num_workers)
            if wanted != self.wanted:
                self._on_note(f"{self.wanted} -> {wanted} rollout workers are asked for")
                self.wanted, self._failures = wanted, 0
                self._fit()
            await asyncio.sleep(LOOK_S)

    def _fit(self) -> None:
        """Start or dismiss workers until the wanted number is reached."""
        staying = self._pool.staying
        for _ in range(self.wanted - len(staying) - len(self._joining)):
            task = self._in_background(self._add())
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)
        for worker in staying[self.wanted :]:
            self._in_background(self._dismiss(worker, self._pool.retire(worker)))

    async def _dismiss(self, worker: Worker[Sampler], done: asyncio.Event) -> None:
        """End a worker when its answers are finished (`done`)."""
        await done.wait()
        leave = partial(self._in_loop, self._leave)
        await asyncio.to_thread(self._publisher().remove_receiver, worker, leave)

    def _leave(self, worker: Worker[Sampler]) -> None:
        if worker in self._pool.workers:
            self._pool.dismiss(worker)
            self._on_note(f"{worker.name} has finished its answers and is gone")
            self._fit()

    async def _add(self) -> None:
        """Start a new worker. It joins the pool once it holds the published version."""
        task = asyncio.current_task()
        assert task is not None
        join = partial(self._in_loop, self._pool.join)
        while self._failures < MOST_FAILURES:
            worker = self._spawn()
            try:
                await worker.ready()
                await asyncio.to_thread(self._publisher().add_receiver, worker, join)
            except LearnerLostError as error:  # the loop may not notice: without answers, no step begins
                worker.kill()
                self._pool.fail(error)
                return
            except Exception as error:  # of any kind: the other workers go on
                self._failures += 1
                self._on_note(f"{worker.name} could not join: {error}")
                worker.kill()
                continue
            self._failures = 0
            self._joining.discard(task)
            self._on_note(f"{worker.name} takes part")
            self._fit()  # fewer may be wanted by now
            return
        if not self._pool.staying:
            told = f"no rollout worker is left, and {MOST_FAILURES} new ones could not join"
            self._pool.fail(WorkerLostError(told))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _in_loop(self, act: Callable[[Worker[Sampler]], object], worker: Worker[Sampler]) -> None:
        """Call `act(worker)` on the event loop and wait for it. Called in a thread."""

        async def call() -> None:
            act(worker)

        assert self._events is not None
        asyncio.run_coroutine_threadsafe(call(), self._events).result()

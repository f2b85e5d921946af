"""Rollout workers that come and go while a run goes on: as many as the run's directory asks for.

A new worker takes part once it holds the published version; one that is not wanted any more finishes its answers first.
Both happen between two publications.
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

LOOK_S = 1.0  # between two looks at how many workers are wanted
MOST_FAILURES = 3  # of new workers in a row: another would fail as well


class Elastic:
    """Keeps `pool` at the wanted number of workers, which begins with `num_workers`."""

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
        """Begin, on the event loop of the run; to `watch` is for workers that can come and go."""
        self._events = asyncio.get_running_loop()
        if watch:
            self._fit()
            self._in_background(self._watch())

    def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()

    def lost_one(self) -> None:
        """A worker is gone: replace it."""
        self._failures = 0
        self._fit()

    def give_up(self, worker: Worker[Sampler], why: str) -> None:
        """From the device thread: a worker did not take part in a publication."""

        async def lose(worker: Worker[Sampler]) -> None:
            self._pool.lose(worker, why)

        self._in_loop(lose, worker)

    async def _watch(self) -> None:
        while True:
            wanted = wanted_workers(self._run_dir, self._num_workers)
            if wanted != self.wanted:
                self._on_note(f"{self.wanted} -> {wanted} rollout workers are asked for")
                self.wanted, self._failures = wanted, 0
                self._fit()
            await asyncio.sleep(LOOK_S)

    def _fit(self) -> None:
        """Start or dismiss workers until there are as many as wanted."""
        staying = self._pool.staying
        for _ in range(self.wanted - len(staying) - len(self._joining)):
            task = self._in_background(self._add())
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)
        for worker in staying[self.wanted :]:
            self._in_background(self._dismiss(worker, self._pool.retire(worker)))

    async def _dismiss(self, worker: Worker[Sampler], done: asyncio.Event) -> None:
        """Let a worker finish what it owes, then end it."""
        await done.wait()
        await asyncio.to_thread(self._publisher().remove_receiver, worker, partial(self._in_loop, self._leave))

    async def _leave(self, worker: Worker[Sampler]) -> None:
        if worker in self._pool.workers:
            self._pool.dismiss(worker)
            self._on_note(f"{worker.name} has finished its answers and is gone")
            self._fit()

    async def _add(self) -> None:
        """A new worker: it takes part once it holds the published version."""
        task = asyncio.current_task()
        assert task is not None
        while self._failures < MOST_FAILURES:
            worker = self._spawn()
            try:
                await worker.ready()
                await asyncio.to_thread(self._publisher().add_receiver, worker, partial(self._in_loop, self._join))
            except LearnerLostError as error:  # nobody else may ask it for long: without answers, no step begins
                worker.kill()
                self._pool.fail(error)
                return
            except Exception as error:  # whatever it is, the others go on
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
            self._pool.fail(WorkerLostError(f"no rollout worker is left, and {MOST_FAILURES} new ones could not join"))

    async def _join(self, worker: Worker[Sampler]) -> None:
        self._pool.join(worker)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _in_loop(self, act: Callable[[Worker[Sampler]], Coroutine[Any, Any, None]], worker: Worker[Sampler]) -> None:
        """From a thread: act on the event loop and wait."""
        assert self._events is not None
        asyncio.run_coroutine_threadsafe(act(worker), self._events).result()

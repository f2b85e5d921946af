"""The number of rollout workers changes while a run goes on, to what the run's directory asks for.

A new worker joins once it holds the published version. The answers of a worker that is not wanted
any more go on elsewhere, with the tokens that they have. Both happen between two publications.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.errors import LearnerLostError, PublishError, WorkerLostError
from headrace.ledger.files import wanted_workers
from headrace.loop.publishing import WeightPublisher
from headrace.loop.watchdog import background, beside
from headrace.roles import Sampler, Worker
from headrace.rollout.pool import RolloutPool

LOOK_S = 1.0  # between two reads of the wanted number
MOST_FAILURES = 3  # of new workers in a row


@dataclass(eq=False)
class Elastic:
    """Keeps `pool` at the wanted number of workers: `rollout.workers`, or what is asked for."""

    run_dir: Path
    config: Config
    pool: RolloutPool
    on_note: Callable[[str], None]
    spawn: Callable[[], Worker[Sampler]]
    publisher: Callable[[], WeightPublisher]
    _failures: int = field(default=0, init=False)
    _joining: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _late: set[str] = field(default_factory=set, init=False)  # names that the user was told

    def __post_init__(self) -> None:
        self.wanted = wanted_workers(self.run_dir, self.config.rollout.workers)
        self._events = asyncio.get_running_loop()  # the run's

    def start(self) -> None:
        """Follow the wanted number."""
        self._fit()
        background(self._watch(), self._tasks)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def lost_one(self) -> None:
        self._failures = 0
        self._fit()

    def give_up(self, worker: Worker[Sampler], why: str) -> None:
        """A worker failed to take a version. Called in a thread."""
        self._in_loop(self.pool.lose, worker, why)

    def bring(self, worker: Worker[Sampler], *begun: Any) -> None:
        """A worker is late: it takes versions at its own pace. Called in a thread."""
        self._in_loop(background, self._follow(worker, *begun), self._tasks)

    async def _follow(self, worker: Worker[Sampler], *begun: Any) -> None:
        if worker.name not in self._late:
            self._late.add(worker.name)
            self.on_note(f"{worker.name} takes new weights later than others, and samples on with older ones meanwhile")
        try:
            await beside(self.publisher().follow, worker, *begun)
        except (WorkerLostError, PublishError) as error:
            self.pool.lose(worker, str(error))
        except LearnerLostError as error:
            self.pool.fail(error)

    async def _watch(self) -> None:
        while True:
            wanted = wanted_workers(self.run_dir, self.config.rollout.workers)
            if wanted != self.wanted:
                self.on_note(f"{self.wanted} -> {wanted} rollout workers are asked for")
                self.wanted, self._failures = wanted, 0
                self._fit()
            await asyncio.sleep(LOOK_S)

    def _fit(self) -> None:
        for _ in range(self.wanted - len(self.pool.staying) - len(self._joining)):
            background(self._add(), self._tasks, self._joining)
        leave = partial(self._in_loop, self._leave)
        for worker in self.pool.staying[self.wanted :]:
            self.pool.retire(worker)
            background(asyncio.to_thread(self.publisher().remove_receiver, worker, leave), self._tasks)

    async def _leave(self, worker: Worker[Sampler]) -> None:
        if worker in self.pool.workers and await self.pool.leave(worker):
            self.on_note(f"{worker.name} is gone; its answers go on elsewhere")
            self._fit()

    async def _add(self) -> None:
        """Start a new worker. It joins the pool once it holds the published version."""
        join = partial(self._in_loop, self.pool.join)
        while self._failures < MOST_FAILURES:
            worker = self.spawn()
            try:
                await worker.ready()
                await asyncio.to_thread(self.publisher().add_receiver, worker, join)
            except LearnerLostError as error:  # the loop may not notice: no answers, no step
                worker.kill()
                self.pool.fail(error)
                return
            except Exception as error:  # of any kind: the other workers go on
                self._failures += 1
                self.on_note(f"{worker.name} could not join: {error}")
                worker.kill()
                continue
            self._failures = 0
            self._joining -= {asyncio.current_task()}
            self.on_note(f"{worker.name} takes part")
            self._fit()  # fewer may be wanted by now
            return
        if not self.pool.staying:
            told = f"no rollout worker is left, and {MOST_FAILURES} new ones could not join"
            self.pool.fail(WorkerLostError(told))

    def _in_loop(self, act: Callable[..., object], *args: Any) -> None:
        """Call `act(*args)` on the event loop, and wait until it is done. Called in a thread."""

        async def call() -> None:
            done = act(*args)
            if isinstance(done, Coroutine):
                await done

        asyncio.run_coroutine_threadsafe(call(), self._events).result()

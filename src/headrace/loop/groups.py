"""Groups on their way: from a prompt, through one episode for each answer, to the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace

from headrace.config import Config
from headrace.episode.episode import episode
from headrace.loop.ending import Ending, State
from headrace.loop.rows import RowMaker
from headrace.loop.stages import Stages
from headrace.types import Attempt, Completion, DropReason, Group, Outcome, Prompt, Sampling, Score, Trajectory


@dataclass(frozen=True, slots=True)
class Again:
    """A group that a restart starts again: from nothing, or from what its answers had sampled, by index.

    Example:
        Again(Attempt(serial=40, number=2, ...), so_far={0: Trajectory(...), 3: Trajectory(...)})
    """

    attempt: Attempt
    so_far: Mapping[int, Trajectory] | None = None  # None: the books do not know of the attempt yet


class Groups:
    """The groups in flight."""

    def __init__(self, config: Config, stages: Stages, rows: RowMaker, ending: Ending) -> None:
        self._stages, self._rows, self._ending = stages, rows, ending
        self._samplings = [sampling_of(config)] * config.rollout.samples
        self._running: dict[int, list[asyncio.Future[Trajectory]]] = {}  # serial -> its answers
        self._scoring: set[asyncio.Task[Score]] = set()

    def start(
        self, serial: int, prompt: Prompt, attempt: int = 1, so_far: Mapping[int, Trajectory] | None = None
    ) -> Coroutine[None, None, None]:
        """Queue a group's answers; what is returned carries the group on to the buffer.

        Queued here, not in the task: the engine sees a whole wave before its first step.
        """
        stages = self._stages
        version = stages.buffer.start(serial, attempt)
        started = Attempt(serial=serial, number=attempt, prompt_id=prompt.id, wave=stages.buffer.wave, version=version)
        if so_far is None:
            stages.ledger.started(len(self._samplings), started)
        futures = stages.pool.start(serial, prompt, self._samplings, attempt=attempt, so_far=so_far)
        begun = [t.oldest_version for t in (so_far or {}).values() if t.spans]
        if begun:
            stages.buffer.begin(serial, min(begun))
        self._running[serial] = futures
        return self._carry(started, prompt, futures)

    async def _carry(self, started: Attempt, prompt: Prompt, futures: list[asyncio.Future[Trajectory]]) -> None:
        """Carry one prompt to the buffer: each answer is scored as soon as it is complete."""
        serial, of = started.serial, (started.serial, started.number)
        outcomes = await asyncio.gather(*(self._finish(prompt, future) for future in futures))
        del self._running[serial]
        failed = [(o.trajectory, str(o.failure)) for o in outcomes if o.failure is not None]
        scored = tuple(o.trajectory for o in outcomes if o.failure is None)
        cut_short = any(o.failure is DropReason.RUN_ENDED for o in outcomes)  # a restart makes the group whole
        if cut_short or len(scored) < min(2, len(futures)):
            reason = DropReason.RUN_ENDED if self._ending.orderly else DropReason.INCOMPLETE
            failed += [(trajectory, str(reason)) for trajectory in scored]
            scored = ()
        self._stages.books.drop_in_flight(failed, of=of)
        if scored:
            group = Group(
                serial=serial, prompt=prompt, version=started.version, trajectories=scored, attempt=started.number
            )
            waits = await self._stages.buffer.put(group)
        else:
            waits = False
            await self._stages.buffer.lose(serial, failed[0][1])
        done_with = self._ending.state is State.COMPLETE or not self._ending.orderly
        if not waits and done_with:  # else a restart makes another attempt
            self._stages.ledger.closed(*of)

    async def _finish(self, prompt: Prompt, future: asyncio.Future[Trajectory]) -> Outcome:
        """The outcome of one episode; what the end of the run cut off says so."""
        try:
            outcome = await episode(prompt, future, self._score, self._stages.clock.now)
        except asyncio.CancelledError:
            if not self._ending.orderly or not future.done() or future.cancelled():
                raise
            return Outcome(trajectory=future.result(), failure=DropReason.RUN_ENDED)
        if outcome.failure is None:
            self._rows.scored(outcome.trajectory)
        elif outcome.failure is DropReason.STALE and self._ending.orderly:
            return replace(outcome, failure=DropReason.RUN_ENDED)
        elif outcome.detail:
            self._rows.reward_failed(outcome.detail)
        return outcome

    async def _score(self, completion: Completion) -> Score:
        with self._stages.clock.span("reward", version=self._stages.books.version):
            scoring = asyncio.create_task(self._stages.scorer.score(completion))
            self._scoring.add(scoring)
            try:
                return await scoring
            finally:
                self._scoring.discard(scoring)

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what the answers of unfinished groups have come to."""
        found = await self._stages.pool.under_way()
        finished = {
            serial: {
                i: f.result() for i, f in enumerate(futures) if f.done() and not f.cancelled() and not f.exception()
            }
            for serial, futures in self._running.items()
        }
        return {serial: found.get(serial, {}) | done for serial, done in finished.items()}

    async def abort(self, *tasks: asyncio.Task[None]) -> None:
        """End what is in flight, and wait until it is accounted for, or one of `tasks` is over."""
        self._stages.pool.abort(list(self._running))
        while self._running and not any(task.done() for task in tasks):
            for scoring in self._scoring:
                scoring.cancel()
            await asyncio.sleep(0.01)


def sampling_of(config: Config) -> Sampling:
    """How training answers are sampled."""
    r = config.rollout
    return Sampling(
        max_new_tokens=r.max_new_tokens,
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop=r.stop,
    )

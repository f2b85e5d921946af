"""The loop: two coroutines that meet in the buffer. Read this and you have read the system.

    produce   draws prompts, generates, scores      waits for: room in the buffer
    learn     trains, publishes, books a row        waits for: groups in the buffer

How far the first may run ahead of the second is the buffer's business, so synchronous, overlapped and fully
asynchronous training are this one loop with another `max_lag`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.config import Config
from headrace.errors import RunError, StalledError
from headrace.ledger.clock import STALL
from headrace.loop.evaluate import evaluate
from headrace.loop.rows import RowMaker
from headrace.loop.stages import Stages
from headrace.loop.watchdog import beside
from headrace.reward.cache import MAX_VERDICTS
from headrace.types import (
    Attempt,
    Completion,
    Drop,
    DropReason,
    FinishReason,
    Group,
    Item,
    Prompt,
    Row,
    Sampling,
    StepStats,
    Trajectory,
)

TARGET_STEPS = 8  # whose mean reward must reach `loop.target_reward`
SKIPPED_STEPS = 4  # in a row: there will be no other


@dataclass(frozen=True, slots=True)
class Again:
    """A group that a restart starts again: from nothing, or from what its answers had sampled, by index.

    Example:
        Again(Attempt(serial=40, number=2, ...), so_far={0: Trajectory(...), 3: Trajectory(...)})
    """

    attempt: Attempt
    so_far: Mapping[int, Trajectory] | None = None  # None: the books do not know of the attempt yet


class Loop:
    """One run of `config.loop.steps` optimizer steps."""

    def __init__(self, config: Config, stages: Stages) -> None:
        self.config = config
        self.stages = stages
        self.version = 0
        self.interrupted = False
        self.solved = False  # whether `loop.target_reward` was reached
        self.on_row: Callable[[Row], None] = lambda row: None
        self.on_note: Callable[[str], None] = lambda text: None
        self.again: list[Again] = []  # to be started before anything else: a restart's
        self.rows = RowMaker(stages.ledger, stages.clock, stages.actor)
        self._sampling = sampling_of(config)
        self._running: dict[int, list[asyncio.Future[Trajectory]]] = {}  # serial -> answers of the groups under way
        self._taken: list[Group] = []  # groups of the step under way
        self._scoring: set[asyncio.Task[object]] = set()
        self._learning: asyncio.Task[None] | None = None
        self._ending = self._abandoned = False
        self._complete = False  # all steps are done: what is left over will never be trained on
        self._writing: asyncio.Task[None] | None = None
        self._skipped = 0  # steps in a row
        self._rewards: deque[float] = deque(maxlen=TARGET_STEPS)

    @property
    def over(self) -> bool:
        """Whether every step is done: what was not trained on will not be."""
        return self.solved or self.version >= self.config.loop.steps

    @property
    def _stopping(self) -> bool:
        return (self.interrupted or self._ending) and not self._abandoned

    @property
    def first_reward_failure(self) -> str:
        """Why the first answer that could not be scored could not."""
        return self.rows.first_reward_failure

    async def run(self) -> None:
        """Train until the steps are done, `interrupt` is called, or a stage fails; then account for what is left.

        A run whose steps are not done can be resumed, whatever ended it.
        """
        if self.over:
            self._drop_buffered()
            return
        await self.stages.device.run(self.stages.canary.check, self.version)
        self.rows.begin()
        producing = asyncio.create_task(self.produce())  # first: the learner waits for what a restart starts again
        self._learning = asyncio.create_task(self.learn())
        engine = asyncio.create_task(self.stages.actor.run())
        tasks = (engine, self._learning, producing)  # a failure of the first fails the others too
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self._end(engine, producing)
            await self._written()
        except asyncio.CancelledError:  # from outside: at once, as by a kill. A restart finds out what was under way
            self._abandoned = True
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        failures = [t.exception() for t in tasks if not t.cancelled()]
        for failure in failures:
            if isinstance(failure, StalledError) and self.first_reward_failure:
                raise StalledError(f"{failure}\nThe first answer without a verdict: {self.first_reward_failure}")
            if failure is not None:
                raise _cause(failure)

    def interrupt(self) -> None:
        """Stop at the next opportunity, as Ctrl-C does."""
        self.interrupted = True
        if self._learning is not None:
            self._learning.cancel()

    # ---- producing

    async def produce(self) -> None:
        """Start groups whenever the buffer has room; first what a restart has to start again."""
        async with asyncio.TaskGroup() as groups:
            again, self.again = self.again, []
            for a in again:
                prompt = self.stages.prompts.at(a.attempt.serial)
                groups.create_task(self._start(a.attempt.serial, prompt, a.attempt.number, a.so_far))
            while True:
                for _ in range(await self.stages.buffer.admit()):
                    groups.create_task(self._start(*self.stages.prompts.next(), 1))

    def _start(
        self, serial: int, prompt: Prompt, attempt: int, so_far: Mapping[int, Trajectory] | None = None
    ) -> Coroutine[None, None, None]:
        """Queue a group's generation; what is returned carries it on to the buffer.

        Queued here, not in the task: the engine sees a whole wave before its first step.
        """
        stages, samplings = self.stages, [self._sampling] * self.config.rollout.samples
        version = stages.buffer.start(serial, attempt)
        started = Attempt(serial=serial, number=attempt, prompt_id=prompt.id, wave=stages.buffer.wave, version=version)
        if so_far is None:
            stages.ledger.started(len(samplings), started)
        futures = stages.actor.start(serial, prompt, samplings, attempt=attempt, so_far=so_far)
        begun = [t.oldest_version for t in (so_far or {}).values() if t.spans]
        if begun:
            stages.buffer.begin(serial, min(begun))
        self._running[serial] = futures
        return self.produce_one(started, prompt, futures)

    async def produce_one(self, started: Attempt, prompt: Prompt, futures: list[asyncio.Future[Trajectory]]) -> None:
        """Carry one prompt to the buffer: each answer is scored as soon as it is complete."""
        serial, of = started.serial, (started.serial, started.number)
        outcomes = await asyncio.gather(*(self._finish_one(prompt, future) for future in futures))
        del self._running[serial]
        failed = [(trajectory, reason) for trajectory, reason in outcomes if reason is not None]
        scored = tuple(trajectory for trajectory, reason in outcomes if reason is None)
        cut_short = any(reason is DropReason.RUN_ENDED for _, reason in failed)  # a restart makes the group whole
        if cut_short or len(scored) < min(2, len(futures)):
            reason = DropReason.RUN_ENDED if self._ending else DropReason.INCOMPLETE
            failed += [(trajectory, reason) for trajectory in scored]
            scored = ()
        self.drop(failed, from_buffer=False, of=of)
        if scored:
            group = Group(
                serial=serial, prompt=prompt, version=started.version, trajectories=scored, attempt=started.number
            )
            waits = await self.stages.buffer.put(group)
        else:
            waits = False
            await self.stages.buffer.lose(serial, failed[0][1])
        if not waits and (self._complete or not self._ending):  # else a restart makes another attempt
            self.stages.ledger.closed(*of)

    async def _finish_one(
        self, prompt: Prompt, future: asyncio.Future[Trajectory]
    ) -> tuple[Trajectory, DropReason | None]:
        """One trajectory with its reward, or with why it has none."""
        trajectory = await future
        if trajectory.finish is FinishReason.ABORT:
            return trajectory, DropReason.RUN_ENDED if self._ending else DropReason.STALE
        completion = Completion.of(prompt, trajectory)
        with self.stages.clock.span("reward", version=self.version):
            scoring = asyncio.create_task(self.stages.scorer.score(completion))
            self._scoring.add(scoring)
            try:
                score = await scoring
            except asyncio.CancelledError:
                if not self._ending:
                    raise
                return trajectory, DropReason.RUN_ENDED
            finally:
                self._scoring.discard(scoring)
        if score.failure is not None:
            self.rows.reward_failed(score.detail)
            return trajectory, score.failure
        timing = replace(trajectory.timing, scored_s=self.stages.clock.now())
        trajectory = replace(trajectory, reward=score.reward, reward_parts=score.parts, timing=timing)
        self.rows.scored(trajectory)
        return trajectory, None

    # ---- learning

    async def learn(self) -> None:
        """Train on fresh groups, publish, and only then let new groups start."""
        for step in range(self.version + 1, self.config.loop.steps + 1):
            await self._accumulate()
            self.stages.ledger.step_begins(step, self._taken)
            stats = await self._update()
            taken, self._taken = self._taken, []
            row = await self.conclude(step, taken, stats)
            last = self.over
            if last:
                await self.stages.buffer.hold(True)  # what would start now could never be trained on
            for serial in await self.stages.buffer.settle(self.version):
                self.stages.actor.abort(serial)
            self.on_row(row)
            self._check_skipped(row)
            if last:
                await self._written()  # this one is not to be left out
            if last or step % self.config.recovery.every_steps == 0:
                await self.checkpoint()
            self._complete = last
            if last or self._stopping:
                return

    def _check_skipped(self, row: Row) -> None:
        self._skipped = self._skipped + 1 if row.skipped else 0
        if self._skipped == SKIPPED_STEPS:
            raise StalledError(
                f"the last {SKIPPED_STEPS} steps were skipped, because their gradients were not finite: training does "
                "not come further. Look at the rewards (very large ones overflow), lower learner.lr, or set "
                "model.dtype=float32"
            )

    async def conclude(self, step: int, taken: list[Group], stats: StepStats, *, may_evaluate: bool = True) -> Row:
        """Book a step that was taken, and make its row: both or neither."""
        end_s = self.stages.clock.now()
        # before new groups may start, so that what a row counts does not depend on how long an evaluation takes
        score = await self._score(step) if may_evaluate else None
        moved = self.stages.publisher.moved_bytes
        with self.stages.ledger.together():
            self._book(taken, step, stats)
            row = self.rows.make(step, self.version, taken, stats, end_s=end_s, moved_bytes=moved, score=score)
        self.solved = self.reached(row.reward_mean)
        return row

    async def redo(self, groups: list[Group]) -> StepStats:
        """Take a step again that a process took before it died: the same groups in the same order."""
        for group in groups:
            await self._add(group)
        for items in self.stages.learner.rest():
            await self._train_on(items)
        return await self._update()

    async def checkpoint(self) -> None:
        """Write the present version to disk, beside the training; what is still being written is not waited for."""
        if self._writing is not None and not self._writing.done():
            return
        stages, version = self.stages, self.version
        facts = {"prompts": stages.prompts.state()}
        with stages.clock.span("checkpoint", version=version, detail=STALL):
            write_tensors = await stages.device.run(stages.learner.snapshot)
            if self.config.recovery.in_flight == "resume":
                stages.ledger.keep_partials(await self._under_way())
            stages.ledger.sync()  # a checkpoint must never be ahead of the books

        async def write() -> None:
            try:
                with stages.clock.span("checkpoint", version=version):
                    await beside(stages.checkpoints.write, version, write_tensors, facts)
                self._prune(version)
            except RunError as error:
                self.on_note(f"{error}. Training goes on; the last complete checkpoint stays")

        self._writing = asyncio.create_task(write())

    def _prune(self, version: int) -> None:
        """Forget answers that neither a restart needs nor the user wants to read any more."""
        if kept := self.config.recovery.journal_steps:
            before = min(self.stages.checkpoints.oldest_version + 1, version + 1 - kept)
            self.stages.ledger.prune(before=before, max_verdicts=MAX_VERDICTS)

    async def _under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what the answers of unfinished groups have come to."""
        found: dict[int, dict[int, Trajectory]] = await self.stages.device.run(self.stages.actor.under_way)
        finished = {
            serial: {
                i: f.result() for i, f in enumerate(futures) if f.done() and not f.cancelled() and not f.exception()
            }
            for serial, futures in self._running.items()
        }
        return {serial: found.get(serial, {}) | done for serial, done in finished.items()}

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def reached(self, reward_mean: float) -> bool:
        """Whether the mean reward of the latest steps, this one included, is at `loop.target_reward`."""
        self._rewards.append(reward_mean)
        latest = self._rewards
        return len(latest) == latest.maxlen and sum(latest) / len(latest) >= self.config.loop.target_reward

    async def _accumulate(self) -> None:
        """The gradient of one step: it adds up while the step's last groups are still being generated."""
        stages = self.stages
        while (group := await stages.buffer.next()) is not None:
            self._taken.append(group)
            await self._add(group)
        for items in stages.learner.rest():
            await self._train_on(items)
        if self.config.rollout.on_update == "drain":
            await stages.buffer.hold(True)
            await stages.actor.drain()
            await stages.buffer.hold(False)

    async def _add(self, group: Group) -> None:
        """A group's part of the gradient, as far as its micro-batches are full."""
        learner, references = self.stages.learner, None
        if learner.uses_reference:
            references = await self._timed("reference", learner.reference_logprobs, group)
        for items in learner.add(group, references):
            await self._train_on(items)

    async def _update(self) -> StepStats:
        """The optimizer step. An interrupt waits for it: once the weights change, the books have to say so."""
        committing = asyncio.ensure_future(self.stages.device.run(self._commit))
        while not committing.done():
            try:
                await asyncio.wait([committing])
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
        return committing.result()  # type: ignore[no-any-return]

    def _commit(self) -> StepStats:
        """In the device thread, between two decode steps: the weights change and so does the version."""
        with self.stages.clock.span("train", version=self.version):
            stats = self.stages.learner.finish()
        with self.stages.clock.span("publish", version=self.version + 1):
            self.stages.publisher.commit(self.version + 1)
            self.stages.canary.check(self.version + 1)
        self.version += 1
        return stats

    async def _train_on(self, items: list[Item]) -> None:
        """One micro-batch; how many tokens it has tells what a pass costs apart from what a token does."""
        detail = f"{sum(map(len, items))} tokens"
        await self._timed("train", self.stages.learner.accumulate, items, detail=detail)

    async def _timed(self, stage: str, work: Callable[..., Any], *args: Any, detail: str = "") -> Any:
        def timed() -> Any:
            with self.stages.clock.span(stage, version=self.version, detail=detail):
                return work(*args)

        return await self.stages.device.run(timed)

    async def _score(self, step: int) -> float | None:
        """The held-out score, on the steps that evaluate."""
        every = self.config.loop.eval_every
        if not every or step % every or step == self.config.loop.steps or self._stopping:
            return None
        try:
            return await self.evaluate()
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            return None  # the step is done and has its row, with or without a score

    async def evaluate(self) -> float | None:
        """The held-out score of the present policy."""
        return await evaluate(self.stages.actor, self.stages.scorer, self.stages.prompts.held_out, self.config)

    # ---- books

    def _book(self, taken: list[Group], step: int, stats: StepStats) -> None:
        trained_on = self.version - 1
        for group in taken:
            if stats.skipped:
                skipped = [(t, DropReason.SKIPPED_STEP) for t in group.trajectories]
                self.drop(skipped, from_buffer=True, version=trained_on)
            else:
                self.stages.ledger.trained(group, step=step, lag_of=lambda t: trained_on - t.oldest_version)

    def drop(
        self,
        dropped: list[tuple[Trajectory, DropReason]] | list[tuple[Trajectory, str]],
        *,
        from_buffer: bool,
        version: int | None = None,
        of: tuple[int, int] | None = None,
    ) -> None:
        """Book trajectories that will not be trained on; their lag is measured from `version`, or from the present.

        `of` names the group and the attempt of those that never reached the buffer.
        """
        now = self.version if version is None else version
        drops = [
            Drop(
                trajectory_id=t.id,
                prompt_id=t.prompt_id,
                reason=str(reason),
                num_tokens=t.num_sampled_tokens,
                lag=now - t.oldest_version if t.spans else 0,
                reward=t.reward,
            )
            for t, reason in dropped
        ]
        records = [t for t, _ in dropped]
        if drops and from_buffer:
            self.stages.ledger.dropped(drops, source="buffered")
        elif drops:
            self.stages.ledger.dropped(drops, source="in_flight", trajectories=records, of=of)

    async def _end(self, engine: asyncio.Task[None], producing: asyncio.Task[None]) -> None:
        """What is under way is dropped, with the reason that the run ended, or kept where a restart goes on with it.

        What is buffered is dropped only when all steps are done; else it waits for a restart, which makes another
        attempt at what was under way.
        """
        self._ending = True
        assert self._learning is not None
        self._learning.cancel()
        await asyncio.wait([self._learning])
        await self.stages.buffer.hold(True)
        if self.interrupted and not self._complete and not engine.done():
            await self._written()  # this one is not to be left out
            await self.checkpoint()
        if self._complete or self.config.recovery.in_flight != "resume":
            await self._abort_all(engine, producing)
        for task in (producing, engine):
            task.cancel()
        await asyncio.wait([producing, engine])
        if self._complete:
            self._drop_buffered()
        self.rows.flush()

    async def _abort_all(self, engine: asyncio.Task[None], producing: asyncio.Task[None]) -> None:
        for serial in self._running:
            self.stages.actor.abort(serial)
        while self._running and not engine.done() and not producing.done():
            for scoring in self._scoring:
                scoring.cancel()
            await asyncio.sleep(0.01)

    def _drop_buffered(self) -> None:
        for group in (*self._taken, *self.stages.buffer.buffered):
            self.drop([(t, DropReason.RUN_ENDED) for t in group.trajectories], from_buffer=True)
        self._taken, self.stages.buffer.buffered = [], []


def _cause(failure: BaseException) -> BaseException:
    """The first error of a task group: the user's message is there, not in the group."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


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

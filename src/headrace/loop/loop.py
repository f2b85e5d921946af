"""The loop: two coroutines that meet in the buffer. Read this and you have read the system.

    produce   draws prompts, generates, scores      waits for: room in the buffer
    learn     trains, publishes, books a row        waits for: groups in the buffer

How far the first may run ahead of the second is the buffer's business, so synchronous, overlapped and fully
asynchronous training are this one loop with another `max_lag`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headrace.buffer.buffer import Buffer
from headrace.config import Config
from headrace.errors import StalledError
from headrace.learner.learner import Learner, StepStats
from headrace.ledger.clock import StageClock
from headrace.ledger.ledger import Ledger
from headrace.loop.evaluate import evaluate
from headrace.loop.rows import RowMaker
from headrace.prompts.stream import PromptStream
from headrace.publish.shared import SharedPublisher
from headrace.reward.scorer import Scorer
from headrace.roles import Device
from headrace.rollout.actor import RolloutActor
from headrace.rollout.sampling import Sampling
from headrace.types import Completion, Drop, DropReason, FinishReason, Group, Prompt, Row, Trajectory

TARGET_STEPS = 8  # whose mean reward must reach `loop.target_reward`


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Everything the loop wires together, in the order a trajectory meets it."""

    prompts: PromptStream
    actor: RolloutActor
    scorer: Scorer
    buffer: Buffer
    learner: Learner
    publisher: SharedPublisher
    ledger: Ledger
    clock: StageClock
    device: Device


class Loop:
    """One run of `config.loop.steps` optimizer steps."""

    def __init__(self, config: Config, stages: Stages) -> None:
        self.config = config
        self.stages = stages
        self.version = 0
        self.interrupted = False
        self.solved = False  # whether `loop.target_reward` was reached
        self.on_row: Callable[[Row], None] = lambda row: None
        self._rows = RowMaker(stages.ledger, stages.clock, stages.actor.engine)
        self._sampling = sampling_of(config)
        self._running: dict[int, Prompt] = {}  # serial -> prompt of the groups under way
        self._taken: list[Group] = []  # groups of the step under way
        self._scoring: set[asyncio.Task[object]] = set()
        self._learning: asyncio.Task[None] | None = None
        self._ending = False
        self._rewards: deque[float] = deque(maxlen=TARGET_STEPS)

    @property
    def _stopping(self) -> bool:
        return self.interrupted or self._ending

    @property
    def first_reward_failure(self) -> str:
        """Why the first answer that could not be scored could not."""
        return self._rows.first_reward_failure

    async def run(self) -> None:
        """Train until the steps are done, `interrupt` is called, or a stage fails; then account for what is left."""
        if not self.config.loop.steps:
            return
        self._rows.begin()
        self._learning = asyncio.create_task(self.learn())
        engine = asyncio.create_task(self.stages.actor.run())
        producing = asyncio.create_task(self.produce())
        tasks = (engine, self._learning, producing)  # a failure of the first fails the others too
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(engine, producing)
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
        """Start groups whenever the buffer has room."""
        async with asyncio.TaskGroup() as groups:
            while True:
                for _ in range(await self.stages.buffer.admit()):
                    serial, prompt = self.stages.prompts.next()
                    version = self.stages.buffer.start(serial)
                    self._running[serial] = prompt
                    self.stages.ledger.started(self.config.rollout.samples)
                    # queued here, not in the task: the engine sees the whole wave before its first step
                    futures = self.stages.actor.start(serial, prompt, [self._sampling] * self.config.rollout.samples)
                    groups.create_task(self.produce_one(serial, prompt, version, futures))

    async def produce_one(
        self, serial: int, prompt: Prompt, version: int, futures: list[asyncio.Future[Trajectory]]
    ) -> None:
        """Carry one prompt to the buffer: each answer is scored as soon as it is complete."""
        outcomes = await asyncio.gather(*(self._finish_one(prompt, future) for future in futures))
        del self._running[serial]
        failed = [(trajectory, reason) for trajectory, reason in outcomes if reason is not None]
        scored = tuple(trajectory for trajectory, reason in outcomes if reason is None)
        if len(scored) < min(2, len(futures)):
            reason = DropReason.RUN_ENDED if self._ending else DropReason.INCOMPLETE
            failed += [(trajectory, reason) for trajectory in scored]
            scored = ()
        self.drop(failed, from_buffer=False)
        if scored:
            await self.stages.buffer.put(Group(serial=serial, prompt=prompt, version=version, trajectories=scored))
        else:
            await self.stages.buffer.lose(serial, failed[0][1])

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
            self._rows.reward_failed(score.detail)
            return trajectory, score.failure
        timing = replace(trajectory.timing, scored_s=self.stages.clock.now())
        trajectory = replace(trajectory, reward=score.reward, reward_parts=score.parts, timing=timing)
        self._rows.scored(trajectory)
        return trajectory, None

    # ---- learning

    async def learn(self) -> None:
        """Train on fresh groups, publish, and only then let new groups start."""
        for step in range(1, self.config.loop.steps + 1):
            await self._accumulate()
            stats = await self._update()
            taken, self._taken = self._taken, []
            self._book(taken, step, stats)
            end_s = self.stages.clock.now()
            # before new groups may start, so that what a row counts does not depend on how long an evaluation takes
            score = await self._score(step)
            moved = self.stages.publisher.moved_bytes
            row = self._rows.make(step, self.version, taken, stats, end_s=end_s, moved_bytes=moved, score=score)
            self.solved = self._reached(row)
            last = self.solved or step == self.config.loop.steps
            if last:
                await self.stages.buffer.hold(True)  # what would start now could never be trained on
            for serial in await self.stages.buffer.settle(self.version):
                self.stages.actor.abort(serial, self._running[serial], self.config.rollout.samples)
            self.on_row(row)
            if last or self._stopping:
                return

    def _reached(self, row: Row) -> bool:
        """Whether the mean reward of the latest steps is at `loop.target_reward`."""
        self._rewards.append(row.reward_mean)
        latest = self._rewards
        return len(latest) == latest.maxlen and sum(latest) / len(latest) >= self.config.loop.target_reward

    async def _accumulate(self) -> None:
        """The gradient of one step: it adds up while the step's last groups are still being generated."""
        stages = self.stages
        while len(self._taken) < self.config.loop.groups_per_step:
            group = await stages.buffer.next()
            self._taken.append(group)
            references = None
            if stages.learner.uses_reference:
                references = await self._timed("reference", stages.learner.reference_logprobs, group)
            for items in stages.learner.add(group, references):
                await self._timed("train", stages.learner.accumulate, items)
        for items in stages.learner.rest():
            await self._timed("train", stages.learner.accumulate, items)
        if self.config.rollout.on_update == "drain":
            await stages.buffer.hold(True)
            await stages.actor.drain()
            await stages.buffer.hold(False)

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
        self.version += 1
        return stats

    async def _timed(self, stage: str, work: Callable[..., Any], *args: Any) -> Any:
        def timed() -> Any:
            with self.stages.clock.span(stage, version=self.version):
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
    ) -> None:
        """Book trajectories that will not be trained on; their lag is measured from `version`, or from the present."""
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
            self.stages.ledger.dropped(drops, source="in_flight", trajectories=records)

    async def _end(self, engine: asyncio.Task[None], producing: asyncio.Task[None]) -> None:
        """Whatever is still under way is dropped, with the reason that the run ended."""
        self._ending = True
        assert self._learning is not None
        self._learning.cancel()
        await asyncio.wait([self._learning])
        await self.stages.buffer.hold(True)
        for serial, prompt in self._running.items():
            self.stages.actor.abort(serial, prompt, self.config.rollout.samples)
        while self._running and not engine.done() and not producing.done():
            for scoring in self._scoring:
                scoring.cancel()
            await asyncio.sleep(0.01)
        for task in (producing, engine):
            task.cancel()
        await asyncio.wait([producing, engine])
        for group in (*self._taken, *self.stages.buffer.buffered):
            self.drop([(t, DropReason.RUN_ENDED) for t in group.trajectories], from_buffer=True)
        self._rows.flush()


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

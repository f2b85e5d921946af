"""The loop: three coroutines that meet in the buffer. Read this and you have read the system.

    produce   draws prompts, generates, scores      waits for: room in the buffer
    learn     trains, books a row, offers weights   waits for: groups in the buffer
    deliver   brings them to the rollout workers    waits for: an offer

The buffer decides how far `produce` may run ahead of `learn`: at most `max_lag` versions
(staleness). So synchronous, overlapped and fully asynchronous training are this one loop with
another `max_lag`. How answers come about is in groups.py, how a run ends in ending.py.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from headrace.config import Config
from headrace.errors import RunError, StalledError
from headrace.learner.tree import Forest
from headrace.ledger.files import BEST
from headrace.loop.books import RowMaker
from headrace.loop.ending import Ending, State
from headrace.loop.groups import Again, Groups, evaluate, in_flight_rule
from headrace.loop.replay import PastGroups
from headrace.loop.stages import Stages
from headrace.loop.watchdog import beside
from headrace.measured import STALL, Row, StepStats
from headrace.reward.scorer import MAX_VERDICTS
from headrace.roles import R
from headrace.types import DropReason, Group, Item

SKIPPED_STEPS = 4  # in a row, after which a run is stuck


class Loop:
    """One run of `config.loop.steps` steps. `on_row` gets each step's row, `on_note` warnings."""

    def __init__(
        self, config: Config, stages: Stages, on_row: Callable[[Row], None], on_note: Callable[[str], None]
    ) -> None:
        self.config, self.stages = config, stages
        self.on_row, self._on_note = on_row, on_note
        self.ending = Ending(config.loop)
        self.rows = RowMaker(stages.ledger, stages.clock, stages.pool)
        self.groups = Groups(config, stages, self.rows, self.ending)
        self.replay = PastGroups(config, stages)
        self.again: list[Again] = []  # groups that a resumed run starts first
        self._taken: list[Group] = []  # the groups of the present step
        self._learning: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._offered: asyncio.Queue[int] = asyncio.Queue()  # versions that `deliver` has not brought yet
        self._skipped = 0  # the latest steps that were skipped, in a row

    @property
    def version(self) -> int:
        """The policy's version: how many optimizer steps were taken."""
        return self.stages.books.version

    @property
    def over(self) -> bool:
        return bool(self.ending.early) or self.version >= self.config.loop.steps

    async def run(self) -> None:
        """Train until the steps are done, `interrupt` is called or a stage fails; book what is left."""
        if self.over:
            self._drop_buffered()
            return
        await self.stages.device.run(self.stages.canary.check, self.version)
        if self.ending.orderly:  # interrupted meanwhile
            return
        self.rows.begin()
        # `produce` goes first: the learner waits for what a resumed run starts again
        producing = asyncio.create_task(self.produce())
        self._learning = asyncio.create_task(self.learn())
        sampling = asyncio.create_task(self.stages.pool.run())
        delivering = asyncio.create_task(self.deliver())
        tasks = (sampling, self._learning, producing, delivering)  # if the first fails, others do
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self._end(self._learning, sampling, producing, delivering)
            await self._written()
        except asyncio.CancelledError:
            self.ending.become(State.ABANDONED)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        for failure in [t.exception() for t in tasks if not t.cancelled()]:
            if failure is not None:
                raise self._explained(failure)

    def interrupt(self) -> None:
        """Stop soon, as on Ctrl-C; an optimizer step under way is finished."""
        self.ending.ask()
        if self._learning is not None:
            self._learning.cancel()

    async def produce(self) -> None:
        prompts = self.stages.prompts
        async with asyncio.TaskGroup() as tasks:
            while self.again:
                serial, number, so_far = self.again.pop(0)
                tasks.create_task(self.groups.start(serial, prompts.at(serial), number, so_far))
            while True:
                room = await self.stages.buffer.admit()
                prompts.heed(self.stages.ledger.outcomes)
                with self.stages.ledger.writing():  # a restart finds all of a wave, or nothing
                    for _ in range(room):
                        tasks.create_task(self.groups.start(*prompts.next()))

    async def deliver(self) -> None:
        """Bring each version to the workers while the learner goes on; then groups may start."""
        while True:
            await self._deliver(await self._offered.get())
            if not self.over:  # else a group that starts now is never trained on
                await self.stages.buffer.release()
            self._offered.task_done()

    async def _deliver(self, version: int) -> None:
        stages = self.stages
        with stages.clock.span("publish", version=version):
            while not await beside(stages.publisher.deliver):
                await stages.device.run(stages.publisher.offer, version)
        await stages.device.run(stages.canary.check, version)

    async def learn(self) -> None:
        """Train on groups of the buffer and offer the new weights."""
        for step in range(self.version + 1, self.config.loop.steps + 1):
            await self._accumulate()
            self.stages.ledger.step_begins(step, self._taken)
            stats = await self._update()
            travels = self.stages.publisher.pending is not None
            if travels:
                self.stages.buffer.hold()  # a group that starts before it arrives would be older
                self._offered.put_nowait(step)
            taken, self._taken = self._taken, []
            row = await self.conclude(step, taken, stats)
            if last := self.over:
                self.stages.buffer.hold()
            elif not travels:
                await self.stages.buffer.release()
            self.stages.answers.abort(await self.stages.buffer.settle(self.version))
            self.on_row(row)
            self._check_skipped(row)
            if last or self.config.publish.transport == "collective":  # which shares the device
                await self._offered.join()
            if last:
                await self._written()  # else `checkpoint` leaves the last one out
            if last or step % self.config.recovery.every_steps == 0:
                await self.checkpoint()
            if last:
                self.ending.become(State.COMPLETE)
            if self.ending.orderly:
                return

    async def _accumulate(self) -> None:
        """Add up the gradient of one step, group by group while later ones are being generated."""
        stages = self.stages
        while (group := await stages.buffer.next()) is not None:
            self._taken.append(group)
            await self._add(group)
        for group in self.replay.choose(self.version + 1):
            self._taken.append(group)
            await self._add(group)
        await self._train_on(stages.ranks.intake.rest())
        await self._offered.join()  # one version travels at a time
        if self.config.rollout.on_update == "drain":
            stages.buffer.hold()
            await stages.answers.drain()

    async def _add(self, group: Group) -> None:
        ranks, references = self.stages.ranks, None
        if ranks.uses_reference:
            references = await self._timed("reference", partial(ranks.reference_logprobs, group))
        await self._train_on(ranks.intake.add(group, references))

    async def _train_on(self, micro_batches: list[list[Item]]) -> None:
        for items in micro_batches:
            computed = Forest(item.trajectory for item in items).num_tokens
            detail = f"{computed} tokens"  # `insight` fits the cost of a pass and of a token
            await self._timed("train", partial(self.stages.ranks.accumulate, items), detail)

    async def _timed(self, stage: str, work: Callable[[], R], detail: str = "") -> R:
        def timed() -> R:
            with self.stages.clock.span(stage, version=self.version, detail=detail):
                return work()

        elsewhere = stage == "reference" and self.stages.ranks.teacher
        return await (beside(timed) if elsewhere else self.stages.device.run(timed))

    async def _update(self) -> StepStats:
        """Take the optimizer step. It is not cancelled: weights that changed must be booked."""
        committing = asyncio.ensure_future(self.stages.device.run(self._commit))
        while not committing.done():
            try:
                await asyncio.wait([committing])
            except asyncio.CancelledError:
                if not self.ending.orderly:
                    raise
        return committing.result()

    def _commit(self) -> StepStats:
        """In the device thread, between two decode steps: change the weights and the version."""
        stages, version = self.stages, self.version
        with stages.clock.span("train", version=version):
            if stages.shares_memory:
                stages.pool.release_cache()
            stats = stages.ranks.finish()
        with stages.clock.span("publish", version=version + 1, detail=STALL):
            stages.publisher.offer(version + 1)
            if stages.publisher.pending is None:
                stages.canary.check(version + 1)
        stages.books.reached(version + 1)
        return stats

    async def conclude(self, step: int, taken: list[Group], stats: StepStats, *, may_evaluate: bool = True) -> Row:
        """Book the groups of a step and its row, in one transaction."""
        now = self.stages.clock.now()
        # before new groups may start: what a row counts must not depend on how long this takes
        score = await self._score(step) if may_evaluate else None
        ledger, own = self.stages.ledger, {"publish_bytes": self.stages.publisher.moved_bytes, "score": score}
        new = [group for group in taken if ledger.waits(group)]
        old = 0 if stats.skipped else sum(g.num_sampled_tokens for g in taken) - sum(g.num_sampled_tokens for g in new)
        with ledger.writing():
            self.stages.books.trained(new, skipped=stats.skipped)
            row = self.rows.make(step, new, stats, end_s=now, again_tokens=old, **own)
        self.replay.trained(step, [(group.serial, group.attempt) for group in taken], skipped=stats.skipped)
        self.ending.row(row)
        if self.config.loop.keep_best and row.score is not None and self.ending.best_step == step:
            await self.stages.device.run(self.stages.ranks.save, self.stages.ledger.run_dir / BEST)
        return row

    async def _score(self, step: int) -> float | None:
        """The held-out score after every `loop.eval_every` steps, else None."""
        stages, config, every = self.stages, self.config, self.config.loop.eval_every
        if not every or step % every or step == config.loop.steps or self.ending.orderly:
            return None
        try:
            await self._offered.join()
            return await evaluate(stages.answers, stages.scorer, stages.prompts.held_out, config)
        except asyncio.CancelledError:
            if not self.ending.orderly:
                raise
            return None  # the run is ending: the step's row has no score

    def _check_skipped(self, row: Row) -> None:
        self._skipped = self._skipped + 1 if row.skipped else 0
        if row.skipped and self._skipped == min(SKIPPED_STEPS, self.config.loop.steps):
            told = "because their gradients were not finite: training is stuck. Look at the rewards"
            helps = "(very large ones overflow), lower learner.lr, or set model.dtype=float32"
            raise StalledError(f"the last {self._skipped} steps were skipped {told} {helps}")

    async def redo(self, groups: list[Group]) -> StepStats:
        """Take a step of a dead process again, with the same groups in the same order."""
        for group in groups:
            await self._add(group)
        await self._train_on(self.stages.ranks.intake.rest())
        stats = await self._update()
        if self.stages.publisher.pending is not None:
            await self._deliver(self.version)
        return stats

    async def checkpoint(self) -> None:
        """Write a checkpoint while training goes on; skipped while an earlier one is written."""
        if self._writing is not None and not self._writing.done():
            return
        stages, version = self.stages, self.version
        with stages.clock.span("checkpoint", version=version, detail=STALL):
            write_tensors = await stages.device.run(stages.ranks.snapshot)
            if in_flight_rule(self.config) == "resume":
                stages.ledger.keep_partials(await self.groups.under_way())
            facts = {"prompts": stages.prompts.state(), "books": stages.ledger.sealed()}
            stages.ledger.sync()  # the ledger is durable before the checkpoint is

        async def write() -> None:
            try:
                with stages.clock.span("checkpoint", version=version):
                    await beside(stages.checkpoints.write, version, write_tensors, facts)
                if kept := self.config.recovery.journal_steps:  # older answers may go
                    before = min(stages.checkpoints.versions[-1], version - kept) + 1
                    before -= kept if self.config.buffer.replay[0] else 0  # a step that is taken again needs them
                    stages.ledger.prune(before=before, max_verdicts=MAX_VERDICTS)
            except RunError as error:
                self._on_note(f"{error}. Training goes on; the last complete checkpoint stays")

        self._writing = asyncio.create_task(write())

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _end(self, learning: asyncio.Task[None], *tasks: asyncio.Task[None]) -> None:
        """End all tasks; what is left behind depends on the `State` (see ending.py)."""
        sampling, producing, delivering = tasks
        self.ending.become(State.FAILED)
        learning.cancel()
        await asyncio.wait([learning])
        delivered = asyncio.create_task(self._offered.join())
        if not self.stages.ranks.lost:
            await asyncio.wait([delivering, delivered], return_when=asyncio.FIRST_COMPLETED)
        self.stages.buffer.hold()
        complete = self.ending.state is State.COMPLETE
        if self.ending.state is State.INTERRUPTED and not sampling.done():
            await self._written()  # else `checkpoint` leaves this one out
            await self.checkpoint()
        if complete or in_flight_rule(self.config) != "resume":
            await self.groups.abort(sampling, producing)
        else:
            self.stages.pool.close()  # tokens sampled from here on are lost
        for task in (*tasks, delivered):
            task.cancel()
        await asyncio.wait([*tasks, delivered])
        if complete:
            self._drop_buffered()
        self.stages.ledger.spans(self.stages.clock.drain())

    def _drop_buffered(self) -> None:
        for group in self.stages.buffer.clear():
            drops = [(t, DropReason.RUN_ENDED) for t in group.trajectories]
            self.stages.books.dropped(drops, group, was_buffered=True)

    def _explained(self, failure: BaseException) -> BaseException:
        """The first error of a task group, which has the message for the user."""
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, StalledError) and (why := self.rows.first_reward_failure):
            return StalledError(f"{failure}\nThe first answer without a verdict: {why}")
        return failure

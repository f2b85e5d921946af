"""A run on a virtual clock: the real buffer and lag policy, a producer and a learner of seconds.

The coroutines follow the loop's protocol (loop/loop.py) call by call. How long generation,
scoring, training and publishing take comes from a `Workload` and a `Machine`. What is admitted,
waited for, dropped or trained on is decided by the code that decides it in training.
"""

import asyncio
import heapq
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from headrace.buffer.buffer import Buffer, LagPolicy, Sieve
from headrace.config import BufferSection
from headrace.insight.engine_pool import EnginePool, GroupPart, run_virtually
from headrace.insight.workload import LEAST_SHARED, Machine, Workload
from headrace.measured import STAGES, StageSpan, StageTimes, busy_s
from headrace.types import DropReason, FinishReason, Group, Prompt, Span, Timing, Trajectory

_NO_TIMES = Timing(submitted_s=0.0, started_s=0.0, finished_s=0.0)  # the buffer asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step."""

    wall_s: float
    stage_s: StageTimes
    lags: Counter[int]  # trained tokens by lag


class Simulated:
    """What came of a simulated run. Means leave out the steps in which the pipeline fills."""

    def __init__(self, run: "_Simulation") -> None:
        wall_s, now_s, engines = run.loop.time(), run.pool.now(), run.pool.workers
        for engine in engines:
            engine.advance(now_s)
            engine.busy_s -= max(0.0, engine.hold_s - now_s)  # a prompt that is not computed yet
        in_flight = sum(engine.so_far(row) for engine in engines for row in engine.ends)
        in_flight += sum(sum(group.ended) for group in run._running.values())
        if run.pool.lost_tokens:
            run.dropped[DropReason.REDONE] = run.pool.lost_tokens
        self.max_lag, self.steps, self.wall_s = run.max_lag, tuple(run.steps), wall_s
        # share of its workers' seconds; colocated, it and the learner share one device
        self.rollout_idle = 1 - sum(engine.busy_s for engine in engines) / (wall_s * len(engines))
        trained_s = sum(step.stage_s.reference + step.stage_s.train for step in run.steps)
        self.learner_idle = 1 - trained_s / wall_s
        scored_s = run.scoring_s - sum(max(0.0, free_s - wall_s) for free_s in run.scorers)
        # so far; None where there is a worker for every answer
        self.reward_idle = 1 - scored_s / (wall_s * len(run.scorers)) if run.scorers else None
        self.generated_tokens = round(sum(engine.sampled for engine in engines))
        self.trained_tokens = sum(step.lags.total() for step in self.steps)
        self.dropped_tokens = {str(why): round(run.dropped[why]) for why in sorted(run.dropped)}
        self.buffered_tokens = sum(group.num_sampled_tokens for group in run.buffer.buffered)
        self.in_flight_tokens, self.failures = round(in_flight), run.pool.num_failures
        decided = self.trained_tokens + sum(self.dropped_tokens.values())
        self.useful_share = self.trained_tokens / max(1, decided)
        self.lag_max = max((lag for step in self.steps for lag in step.lags), default=0)
        counted = self.steps[min(math.ceil(self.max_lag) + 1, len(self.steps) // 2) :]
        counted_s = [step.wall_s for step in counted]
        self.step_s = float(np.mean(counted_s))
        self.step_p50_s, self.step_p95_s = np.quantile(counted_s, (0.5, 0.95)).tolist()
        of = {stage: [getattr(step.stage_s, stage) for step in counted] for stage in STAGES}
        self.stage_s = StageTimes(**{stage: float(np.mean(taken)) for stage, taken in of.items()})
        tokens = sum((step.lags for step in counted), Counter[int]())
        self.goodput_tokens_s = tokens.total() / sum(counted_s)
        self.lag_shares = {lag: tokens[lag] / tokens.total() for lag in sorted(tokens)}
        self.lag_mean = sum(lag * share for lag, share in self.lag_shares.items())


def simulate(workload: Workload, machine: Machine, *, max_lag: float, steps: int = 32, seed: int = 0) -> Simulated:
    """A run of `steps` steps. The same arguments give the same result."""

    async def run() -> Simulated:
        return await _Simulation(workload, machine, max_lag, seed).run(steps)

    return run_virtually(run())


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A group from its start to the buffer."""

    serial: int
    lengths: list[int]
    reward_s: list[float]  # of the answers that are not complete
    has_signal: bool
    parts: list[GroupPart]
    version: int = -1  # of the first token; -1 before
    ended: list[int] = field(default_factory=list)  # lengths of those that are
    scored_s: float = 0.0  # when the last verdict so far is there


class _Simulation:
    """One run; what is not written out here is in the buffer."""

    def __init__(self, workload: Workload, machine: Machine, max_lag: float, seed: int) -> None:
        self.workload, self.machine, self.max_lag = workload, machine, max_lag
        self.loop = asyncio.get_running_loop()
        self.version = self.published = 0  # the learner's, and that of the engines
        self._rng = np.random.default_rng(seed)
        kinds = {"no_signal": workload.samples > 1, "overlong": workload.drop_overlong}
        drop = ",".join(kind for kind, is_on in kinds.items() if is_on) or "nothing"
        section = BufferSection.model_validate({"drop": drop})
        policy = LagPolicy(
            max_lag=max_lag,
            groups_per_step=workload.groups_per_step,
            eager=machine.batchwise,  # a batch begins as a whole
            most_at_once=machine.rollout_workers * machine.rows_per_worker // workload.samples,
        )
        self.buffer = Buffer(
            policy, Sieve(section), patience=section.patience, on_buffered=lambda group: None, on_drop=self._on_drop
        )
        rng, prompt_tokens = np.random.default_rng([seed, 1]), workload.prompt_tokens
        self.pool = EnginePool(machine, rng, prompt_tokens, self._on_begin, self._on_end)
        self._spans: list[StageSpan] = []  # of stages, that reach beyond the last step's end
        self.scorers = [0.0] * machine.reward_workers  # a heap: when each is free; empty: there is always one
        self.scoring_s = 0.0  # of all of them
        self.dropped: defaultdict[str, float] = defaultdict(float)
        self.steps: list[SimulatedStep] = []
        self._running: dict[int, _UnderWay] = {}
        self._none_running = asyncio.Event()
        self._none_running.set()
        self._tasks = asyncio.TaskGroup()
        self._prompt = Prompt(id="p", text="", token_ids=np.empty(0, np.int32))
        self._blank = np.empty(0, np.int32), np.empty(0, np.bool_), np.empty(0, np.float32)
        self._booked_s, self._booked_rollout_s = 0.0, 0.0  # at the last step's end

    async def run(self, steps: int) -> Simulated:
        """Both sides until the learner is done, then the books."""
        try:
            async with self._tasks:
                learning = self._tasks.create_task(self._learn(steps))
                endless = [self._tasks.create_task(self._produce())]
                if self.machine.worker_mtbf_s < math.inf:
                    endless.append(self._tasks.create_task(self._fail()))
                await asyncio.wait([learning])  # and the producer hears of the last step too
                learning.result()  # or what kept it from its end
                found = Simulated(self)
                self._running.clear()
                for task in endless:
                    task.cancel()
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return found

    async def _produce(self) -> None:
        work, serials = self.workload, count()
        while True:
            room = await self.buffer.admit()
            if self.machine.batchwise:
                await self._none_running.wait()
                room = min(room, work.groups_per_step)
            for serial in islice(serials, room):
                self.buffer.start(serial)
                drawn = np.maximum(1.0, np.rint(work.tokens.draw(self._rng, work.samples)))
                lengths = [min(int(n), work.max_new_tokens or int(n)) for n in drawn]
                seconds = work.reward_s.draw(self._rng, work.samples).tolist()
                has_signal = self._rng.random() >= work.no_signal_share
                group = _UnderWay(serial, lengths, seconds, has_signal, [])
                self._running[serial] = group
                self._none_running.clear()
                group.parts = self.pool.submit(group, lengths)

    def _on_begin(self, group: _UnderWay) -> None:
        if group.version < 0:
            group.version = self.published
            self.buffer.begin(group.serial, self.published)

    def _on_end(self, group: _UnderWay, length: int) -> None:
        """An answer is complete: first come, first scored, whatever its group does."""
        group.ended.append(length)
        played_s, seconds = self.loop.time() + self.workload.environment_s, group.reward_s.pop()
        end_s = played_s + seconds
        if self.scorers and seconds:  # a verdict that is known already needs no worker
            end_s = max(played_s, self.scorers[0]) + seconds
            heapq.heapreplace(self.scorers, end_s)
        if seconds:
            self._spans.append(StageSpan(stage="reward", start_s=played_s, end_s=end_s))
        self.scoring_s += seconds
        group.scored_s = max(group.scored_s, end_s)
        if not group.reward_s:
            self.loop.call_at(group.scored_s, lambda: self._put(group))
        elif len(group.ended) == self.workload.first:
            self.loop.call_soon(self._end_late, group)

    def _end_late(self, group: _UnderWay) -> None:
        """What is left of a group when all have been heard that were complete at this moment."""
        if group.reward_s and group.serial in self._running:
            self.dropped[DropReason.LATE] += self.pool.abort(group.parts)
            group.lengths, group.reward_s = group.ended, []
            self.loop.call_at(group.scored_s, lambda: self._put(group))

    def _put(self, group: _UnderWay) -> None:
        if self._ended(group.serial) is not None:  # else it was aborted, or all is over
            self._tasks.create_task(self.buffer.put(self._group(group)))

    def _ended(self, serial: int) -> _UnderWay | None:
        group = self._running.pop(serial, None)
        if not self._running:
            self._none_running.set()
        return group

    async def _abort(self, serial: int) -> None:
        if (group := self._ended(serial)) is not None:  # else the buffer is getting it, and finds out by itself
            self.dropped[DropReason.STALE] += self.pool.abort(group.parts) + sum(group.ended)
            await self.buffer.lose(serial, DropReason.STALE)

    def _on_drop(self, dropped: list[tuple[Trajectory, str]], group: Group, was_buffered: bool) -> None:
        for trajectory, reason in dropped:
            self.dropped[str(reason)] += trajectory.num_sampled_tokens

    def _group(self, group: _UnderWay) -> Group:
        """The record that the buffer knows. Of an answer's spans it asks for the oldest alone."""
        if max(group.lengths) > len(self._blank[0]):  # shared by all answers: nobody looks
            size = 2 * max(group.lengths)
            self._blank = np.zeros(size, np.int32), np.ones(size, np.bool_), np.zeros(size, np.float32)
        token_ids, sampled, logprobs = self._blank
        cut_at = self.workload.max_new_tokens or math.inf
        trajectories = tuple(
            Trajectory(
                id="",
                prompt_id="p",
                index=index,
                token_ids=token_ids[:length],
                sampled=sampled[:length],
                logprobs=logprobs[:length],
                spans=(Span(version=group.version, start=0, end=length),),
                finish=FinishReason.LENGTH if length >= cut_at else FinishReason.EOS,
                text="",
                timing=_NO_TIMES,
                reward=float(index % 2 and group.has_signal),
            )
            for index, length in enumerate(group.lengths)
        )
        return Group(serial=group.serial, prompt=self._prompt, version=group.version, trajectories=trajectories)

    async def _learn(self, steps: int) -> None:
        publishing = self._tasks.create_task(asyncio.sleep(0))
        for _ in range(steps):
            taken = await self._accumulate()
            await publishing  # one version travels at a time
            await self._work("train", self.machine.optimizer_s)
            self.version += 1
            self.buffer.hold()
            publishing = self._tasks.create_task(self._publish(self.version))
            if self.machine.colocated:
                await publishing
            if self.machine.host_s:
                await asyncio.sleep(self.machine.host_s)
            self._book(taken)
            for serial in await self.buffer.settle(self.version):
                await self._abort(serial)
        await publishing

    async def _publish(self, version: int) -> None:
        await self._work("publish", self.machine.publish_s)
        self.published = version
        await self.buffer.release()

    async def _accumulate(self) -> list[Group]:
        machine, prompt_tokens = self.machine, self.workload.prompt_tokens
        pending, taken = 0.0, []
        shared = prompt_tokens if prompt_tokens >= LEAST_SHARED else 0.0

        async def train() -> None:
            nonlocal pending
            if pending:
                await self._work("train", machine.train_pass_s + pending * machine.train_token_s)
            pending = 0.0

        while (group := await self.buffer.next()) is not None:
            taken.append(group)
            tokens = group.num_sampled_tokens + self.workload.samples * prompt_tokens
            await self._work("reference", machine.reference_token_s * tokens)
            known = 0.0  # tokens of the prompt that this pass computes already
            for trajectory in group.trajectories:
                tokens = trajectory.num_sampled_tokens + prompt_tokens - known
                if machine.pass_tokens and pending + tokens > machine.pass_tokens:
                    await train()
                    tokens += known
                pending, known = pending + tokens, shared
            if not machine.pass_tokens:
                await train()
        await train()
        return taken

    async def _work(self, stage: str, seconds: float) -> None:
        """The learner's `seconds` for a stage; colocated, rollout stops for them."""
        if not seconds:
            return
        if self.machine.colocated:
            self.pool.pause()
        start_s = self.loop.time()
        self._spans.append(StageSpan(stage=stage, start_s=start_s, end_s=start_s + seconds))
        await asyncio.sleep(seconds)
        if self.machine.colocated:
            self.pool.resume()

    async def _fail(self) -> None:
        workers = self.pool.workers
        while True:
            await asyncio.sleep(self._rng.exponential(self.machine.worker_mtbf_s / len(workers)))
            self.pool.fail(workers[int(self._rng.integers(len(workers)))])

    def _book(self, taken: list[Group]) -> None:
        now_s, lags = self.loop.time(), Counter[int]()
        for group in taken:
            lags[group.lag(self.version - 1)] += group.num_sampled_tokens
        busy, rollout_s = busy_s(self._spans, self._booked_s, now_s), self.pool.active_s
        stage_s = StageTimes(**busy, rollout=rollout_s - self._booked_rollout_s)
        self.steps.append(SimulatedStep(wall_s=now_s - self._booked_s, stage_s=stage_s, lags=lags))
        self._spans = [span for span in self._spans if span.end_s > now_s]
        self._booked_s, self._booked_rollout_s = now_s, rollout_s

"""A run on a virtual clock: the real buffer, sieve and lag policy between a producer and a learner made of seconds.

The two coroutines follow the loop's protocol (loop/loop.py) call by call. How long generation, scoring, training and
publishing take comes from a `Workload` and a `Machine`. What is admitted, waited for, dropped or trained on is decided
by the code that decides it in training.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace

import numpy as np

from headrace.buffer.buffer import Buffer, LagPolicy, Sieve
from headrace.config import BufferSection
from headrace.errors import ConfigError
from headrace.insight.engine_pool import EnginePool, GroupPart, run_virtually
from headrace.insight.workload import Machine, Workload
from headrace.types import STAGES, DropReason, FinishReason, Group, Prompt, Span, StageTimes, Timing, Trajectory

_NO_TIMES = Timing(submitted_s=0.0, started_s=0.0, finished_s=0.0)  # the buffer asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step."""

    wall_s: float
    stage_s: StageTimes
    trained_tokens: int
    lags: Mapping[int, int]  # trained tokens by lag
    buffered_groups: int  # at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of a simulated run. Means leave out the steps in which the pipeline fills."""

    max_lag: int
    steps: tuple[SimulatedStep, ...]
    num_filling: int  # steps at the start that are in no mean
    wall_s: float
    rollout_busy: float  # share of its workers' seconds; of what is colocated, rollout and learner share one device
    learner_busy: float
    reward_busy: float  # NaN where there is a worker for every answer
    generated_tokens: int
    trained_tokens: int
    dropped_tokens: Mapping[str, int]
    buffered_tokens: int
    in_flight_tokens: int
    num_failures: int

    @property
    def counted(self) -> tuple[SimulatedStep, ...]:
        """The steps that means are over."""
        return self.steps[self.num_filling :]

    @property
    def step_s(self) -> float:
        return float(np.mean([step.wall_s for step in self.counted]))

    def step_quantile_s(self, share: float) -> float:
        """Seconds that such a share of the steps stays below."""
        return float(np.quantile([step.wall_s for step in self.counted], share))

    @property
    def stage_s(self) -> StageTimes:
        """Mean seconds that each stage is busy in a step."""
        means = {stage: float(np.mean([getattr(s.stage_s, stage) for s in self.counted])) for stage in STAGES}
        return StageTimes(**means)

    @property
    def goodput(self) -> float:
        return sum(step.trained_tokens for step in self.counted) / sum(step.wall_s for step in self.counted)

    @property
    def lag_shares(self) -> dict[int, float]:
        """Share of the trained tokens with each lag."""
        tokens: Counter[int] = Counter()
        for step in self.counted:
            tokens.update(step.lags)
        return {lag: tokens[lag] / tokens.total() for lag in sorted(tokens)}

    @property
    def lag_mean(self) -> float:
        return sum(lag * share for lag, share in self.lag_shares.items())

    @property
    def lag_max(self) -> int:
        return max((lag for step in self.steps for lag in step.lags), default=0)

    @property
    def useful_share(self) -> float:
        """Trained tokens, of those that were trained on or dropped."""
        return self.trained_tokens / max(1, self.trained_tokens + sum(self.dropped_tokens.values()))


def simulate(workload: Workload, machine: Machine, *, max_lag: int, steps: int = 32, seed: int = 0) -> Simulated:
    """A run of `steps` steps. The same arguments give the same result."""
    if steps < 1 or max_lag < 0:
        raise ConfigError(f"{steps} steps with max_lag = {max_lag} cannot be simulated")
    return run_virtually(_run(workload, machine, max_lag, steps, seed))


async def _run(workload: Workload, machine: Machine, max_lag: int, steps: int, seed: int) -> Simulated:
    return await _Simulation(workload, machine, max_lag, seed).run(steps)


class _Busy:
    """Seconds in which something was under way, from intervals that come in the order they begin."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._reached_s = 0.0

    def add(self, start_s: float, end_s: float) -> None:
        if end_s > self._reached_s:
            self._total_s += end_s - max(start_s, self._reached_s)
            self._reached_s = end_s

    def until(self, now_s: float) -> float:
        """What lies before now; every interval has begun by then."""
        return self._total_s - max(0.0, self._reached_s - now_s)


class _RewardPool:
    """First come, first served; when an answer will be scored is known as soon as it comes."""

    def __init__(self, num_workers: int) -> None:
        self._free_s = [0.0] * num_workers  # a heap: when each worker is free; empty: there is always one
        self.busy = _Busy()
        self._worker_s = 0.0

    def score(self, now_s: float, seconds: float) -> float:
        """When the verdict is there."""
        end_s = now_s + seconds
        if self._free_s and seconds:  # a verdict that is known already needs no worker
            end_s = max(now_s, self._free_s[0]) + seconds
            heapq.heapreplace(self._free_s, end_s)
        self.busy.add(now_s, end_s)
        self._worker_s += seconds
        return end_s

    def busy_share(self, now_s: float) -> float:
        """Of the workers' seconds so far; what they will do later with what has come already does not count."""
        if not self._free_s:
            return math.nan
        later_s = sum(max(0.0, free_s - now_s) for free_s in self._free_s)
        return (self._worker_s - later_s) / (now_s * len(self._free_s))


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A group from its start to the buffer."""

    serial: int
    lengths: list[int]
    reward_s: list[float]
    has_signal: bool
    parts: list[GroupPart]
    version: int = -1  # of the first token; -1 before
    num_left: int = 0  # answers that are not complete
    done_tokens: int = 0  # of those that are
    scored_s: float = 0.0  # when the last verdict so far is there
    over: bool = False  # aborted


class _Simulation:
    """One run; what is not written out here is in the buffer."""

    def __init__(self, workload: Workload, machine: Machine, max_lag: int, seed: int) -> None:
        self.workload, self.machine, self.max_lag = workload, machine, max_lag
        self.loop = asyncio.get_running_loop()
        self.version = 0
        self._rng = np.random.default_rng(seed)
        section = BufferSection(drop_overlong=workload.drop_overlong, drop_no_signal=workload.samples > 1)
        policy = LagPolicy(
            max_lag=max_lag,
            groups_per_step=workload.groups_per_step,
            min_share=workload.min_share,
            eager=machine.batchwise,  # a batch begins as a whole
        )
        self.buffer = Buffer(
            policy,
            Sieve(section),
            patience=section.patience,
            on_buffered=lambda group: None,
            on_drop=self._on_drop,
        )
        self.pool = EnginePool(
            machine,
            np.random.default_rng([seed, 1]),
            prompt_tokens=workload.prompt_tokens,
            on_begin=self._on_begin,
            on_end=self._on_end,
            on_lost=self._on_lost,
        )
        self.rewards = _RewardPool(machine.reward_workers)
        self.stage_busy = {stage: _Busy() for stage in STAGES}
        self.dropped: defaultdict[str, float] = defaultdict(float)
        self.trained_tokens = 0
        self.steps: list[SimulatedStep] = []
        self._running: dict[int, _UnderWay] = {}
        self._none_running = asyncio.Event()
        self._none_running.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = self.loop.create_future()
        self._prompt = Prompt(id="p", text="", token_ids=np.empty(0, np.int32))
        self._blank = _blank_tokens(1)
        self._row_start_s = 0.0
        self._row_stages = StageTimes()

    async def run(self, steps: int) -> Simulated:
        """Both sides until the learner is done, then the books."""
        learning = self._spawn(self._learn(steps))
        self._spawn(self._produce())
        if self.machine.worker_mtbf_s < math.inf:
            self._spawn(self._fail())
        await asyncio.wait([learning, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            await self._failure
        return self._result()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task of the run; an error in it is the run's."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    # ---- producing

    async def _produce(self) -> None:
        serial = 0
        while True:
            room = await self.buffer.admit()
            if self.machine.batchwise:
                await self._none_running.wait()
                room = min(room, self.workload.groups_per_step)
            for _ in range(room):
                self._start(serial)
                serial += 1

    def _start(self, serial: int) -> None:
        work, samples = self.workload, self.workload.samples
        self.buffer.start(serial)
        lengths = [int(n) for n in np.maximum(1.0, np.rint(work.tokens.draw(self._rng, samples)))]
        if work.max_new_tokens:
            lengths = [min(n, work.max_new_tokens) for n in lengths]
        seconds = work.reward_s.draw(self._rng, samples).tolist()
        has_signal = self._rng.random() >= work.no_signal_share
        group = _UnderWay(serial, lengths, seconds, has_signal, [], num_left=samples)
        self._running[serial] = group
        self._none_running.clear()
        group.parts = self.pool.submit(group, lengths)

    def _on_begin(self, part: GroupPart) -> None:
        group: _UnderWay = part.owner  # type: ignore[assignment]
        if group.version < 0:
            group.version = self.version
            self.buffer.begin(group.serial, self.version)

    def _on_end(self, part: GroupPart, length: int) -> None:
        """An answer is complete: it is scored at once, whatever its group does."""
        group: _UnderWay = part.owner  # type: ignore[assignment]
        group.num_left -= 1
        group.done_tokens += length
        group.scored_s = max(group.scored_s, self.rewards.score(self.loop.time(), group.reward_s[group.num_left]))
        if not group.num_left:
            self.loop.call_at(group.scored_s, lambda: self._spawn(self._put(group)))

    def _on_lost(self, part: GroupPart, tokens: float) -> None:
        self.dropped[DropReason.REDONE] += tokens

    async def _put(self, group: _UnderWay) -> None:
        """A group is scored."""
        if group.over:
            return
        self._forget(group)
        await self.buffer.put(self._group(group))

    def _forget(self, group: _UnderWay) -> None:
        group.over = True
        del self._running[group.serial]
        if not self._running:
            self._none_running.set()

    async def _abort(self, serial: int) -> None:
        """A group that can no longer be trained on."""
        group = self._running.get(serial)
        if group is None:  # it is just being put into the buffer, which finds out by itself
            return
        tokens = self.pool.abort(group.parts) + group.done_tokens
        self._forget(group)
        self.dropped[DropReason.STALE] += tokens
        await self.buffer.lose(serial, DropReason.STALE)

    def _on_drop(self, dropped: list[tuple[Trajectory, str]], group: Group, was_buffered: bool) -> None:
        for trajectory, reason in dropped:
            self.dropped[str(reason)] += trajectory.num_sampled_tokens

    def _group(self, group: _UnderWay) -> Group:
        """The record that the buffer knows. Of an answer's spans it asks for the oldest alone, and there is one."""
        if max(group.lengths) > len(self._blank[0]):
            self._blank = _blank_tokens(2 * max(group.lengths))
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

    # ---- learning

    async def _learn(self, steps: int) -> None:
        for _ in range(steps):
            taken = await self._accumulate()
            await self._work("train", self.machine.optimizer_s)
            await self._work("publish", self.machine.publish_s)
            self.version += 1
            if self.machine.host_s:
                await asyncio.sleep(self.machine.host_s)
            self._book(taken)
            for serial in await self.buffer.settle(self.version):
                await self._abort(serial)

    async def _accumulate(self) -> list[Group]:
        """The gradient of one step, pass by pass as groups arrive."""
        machine, pending, taken = self.machine, 0.0, []
        while (group := await self.buffer.next()) is not None:
            taken.append(group)
            await self._work("reference", self._reference_s(group.num_sampled_tokens))
            for length in [t.num_sampled_tokens for t in group.trajectories]:
                tokens = length + self.workload.prompt_tokens
                if pending and machine.pass_tokens and pending + tokens > machine.pass_tokens:
                    await self._train(pending)
                    pending = 0.0
                pending += tokens
            if not machine.pass_tokens:
                await self._train(pending)
                pending = 0.0
        await self._train(pending)
        return taken

    async def _train(self, tokens: float) -> None:
        if tokens:
            await self._work("train", self.machine.train_pass_s + tokens * self.machine.train_token_s)

    def _reference_s(self, sampled_tokens: int) -> float:
        return self.machine.reference_token_s * (sampled_tokens + self.workload.samples * self.workload.prompt_tokens)

    async def _work(self, stage: str, seconds: float) -> None:
        """The learner's `seconds` for a stage; colocated, rollout stops for them."""
        if not seconds:
            return
        if self.machine.colocated:
            self.pool.pause()
        start_s = self.loop.time()
        self.stage_busy[stage].add(start_s, start_s + seconds)
        await asyncio.sleep(seconds)
        if self.machine.colocated:
            self.pool.resume()

    async def _fail(self) -> None:
        """Workers die, independently of each other."""
        workers = self.pool.workers
        while True:
            await asyncio.sleep(self._rng.exponential(self.machine.worker_mtbf_s / len(workers)))
            self.pool.fail(workers[int(self._rng.integers(len(workers)))])

    # ---- books

    def _book(self, taken: list[Group]) -> None:
        now_s, lags = self.loop.time(), Counter[int]()
        for group in taken:
            lags[group.lag(self.version - 1)] += group.num_sampled_tokens
        busy = {stage: self.stage_busy[stage].until(now_s) for stage in STAGES}
        busy |= {"rollout": self.pool.active_s, "reward": self.rewards.busy.until(now_s)}
        stages = {stage: busy[stage] - getattr(self._row_stages, stage) for stage in STAGES}
        self.trained_tokens += lags.total()
        self.steps.append(
            SimulatedStep(
                wall_s=now_s - self._row_start_s,
                stage_s=StageTimes(**stages),
                trained_tokens=lags.total(),
                lags=dict(lags),
                buffered_groups=len(self.buffer.buffered),
            )
        )
        self._row_start_s, self._row_stages = now_s, replace(self._row_stages, **busy)

    def _result(self) -> Simulated:
        wall_s, machine = self.loop.time(), self.machine
        engines = self.pool.advanced()
        in_flight = sum(engine.so_far(row) for engine in engines for row in engine.ends)
        in_flight += sum(group.done_tokens for group in self._running.values())
        return Simulated(
            max_lag=self.max_lag,
            steps=tuple(self.steps),
            num_filling=min(self.max_lag + 1, len(self.steps) // 2),
            wall_s=wall_s,
            rollout_busy=sum(engine.busy_s for engine in engines) / (wall_s * machine.rollout_workers),
            learner_busy=sum(self.stage_busy[stage].until(wall_s) for stage in ("reference", "train")) / wall_s,
            reward_busy=self.rewards.busy_share(wall_s),
            generated_tokens=round(sum(engine.sampled for engine in engines)),
            trained_tokens=self.trained_tokens,
            dropped_tokens={str(reason): round(tokens) for reason, tokens in sorted(self.dropped.items())},
            buffered_tokens=sum(group.num_sampled_tokens for group in self.buffer.buffered),
            in_flight_tokens=round(in_flight),
            num_failures=self.pool.num_failures,
        )


def _blank_tokens(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, which of them were sampled (all) and log-probs, for as many answers as ask: nobody looks at them."""
    return np.zeros(count, np.int32), np.ones(count, np.bool_), np.zeros(count, np.float32)

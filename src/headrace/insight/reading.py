"""What a run's ledger says about its speed and its health, as one record: what triage needs.

The first steps of a run are unlike the others (caches fill, programs are compiled), so by default the
numbers are about the steps after them. Nothing is written, and the run may go on meanwhile.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.config import Config
from headrace.errors import RunError
from headrace.ledger.files import run_config
from headrace.measured import STAGES, STALL, StageTimes
from headrace.runs import columns as tables
from headrace.runs.columns import Columns, Numbers, RowColumns
from headrace.runs.facts import RunState, read_run
from headrace.types import BoolArray, FinishReason

DEVICE, REWARD = "device", "reward"  # pools: engine and learner take turns on the one
MOST_SPANS = 100_000  # of a longer run only the last steps are looked at this closely
MOST_ANSWERS = 200_000  # of a longer run the newest
TAIL_SHARE = 0.05  # of a step's answers: the last ones, that the others have to wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution in a few numbers."""

    count: int
    mean: float
    cv: float  # standard deviation over mean
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Numbers) -> "Spread | None":
        """Of those that are known; None if none is."""
        known = values[np.isfinite(values)]
        if not len(known):
            return None
        mean = float(known.mean())
        p50, p95, p99 = (float(value) for value in np.quantile(known, (0.5, 0.95, 0.99)))
        cv = float(known.std()) / mean if mean else 0.0
        return cls(count=len(known), mean=mean, cv=cv, p50=p50, p95=p95, p99=p99, max=float(known.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How the stages of some steps lay side by side. Seconds are totals over these steps."""

    num_steps: int
    wall_s: float
    busy_s: float  # at least one stage was busy
    stage_s: StageTimes
    idle_shares: Mapping[str, float]  # of each pool, or of each worker where a pool has several
    stall_s: float  # training waited for a checkpoint

    @property
    def overlap_share(self) -> float:
        """Saved by stages side by side, of the sum of their times: 0.5 is two all the time."""
        total_s = sum(float(getattr(self.stage_s, stage)) for stage in STAGES)
        return 1.0 - self.busy_s / total_s if total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One run. `num_steps` and restarts are of all of it, the rest is about its `measured_steps`."""

    run_dir: Path
    config: Config
    num_steps: int  # that have a row
    num_restarts: int
    redone_steps: int  # because of these
    measured_steps: range
    wall_s: float
    step_s: Spread | None
    stage_s: StageTimes | None  # mean per step
    stage_p50_s: StageTimes | None
    stage_p95_s: StageTimes | None
    occupancy: Occupancy | None
    trained_tokens: int
    dropped_tokens: Mapping[str, int]
    answer_tokens: Spread | None  # sampled, per answer
    tail_s: Spread | None  # of each step: from the end of 95 in 100 answers to the end of the last
    verdict_s: Spread | None  # from an answer's end to its verdict, the wait for a worker included
    no_signal_share: float | None  # of the groups: all their answers earned the same
    lag_mean: float | None  # over trained tokens
    lag_max: int | None
    ratio_outside: float | None  # means over steps, with `Row`'s names
    effective_samples: float | None
    preemptions: int

    @property
    def goodput_tokens_per_s(self) -> float | None:
        return self.trained_tokens / self.wall_s if self.wall_s else None

    @property
    def useful_share(self) -> float | None:
        """Of the tokens whose fate was decided, those that were trained on."""
        decided = self.trained_tokens + sum(self.dropped_tokens.values())
        return self.trained_tokens / decided if decided else None

    @property
    def tail_share(self) -> float | None:
        """Of a step's time, in which only its last answers (one in twenty) were being generated."""
        if self.tail_s is None or self.step_s is None or not self.step_s.mean:
            return None
        return min(1.0, self.tail_s.mean / self.step_s.mean)


def read(run_dir: Path, *, last_steps: int | None = None, after_step: int = 2) -> Reading:
    """Measured are the steps after `after_step` (all, if there are no more), or their `last_steps`."""
    facts = read_run(run_dir)
    if facts.state is RunState.UNREADABLE:
        raise RunError(facts.problem)
    config = run_config(run_dir)
    with tables.reading(run_dir) as connection:
        counted = "SELECT COUNT(*), COALESCE(MAX(step), 0) FROM rows"
        num_steps, last_step = connection.execute(counted).fetchone()
        after = after_step if last_step > after_step else 0
        if last_steps is not None:
            after = max(after, last_step - last_steps)
        rows = RowColumns.read(connection, after_step=after)
        times = tables.read_steps(connection, rows)
        since_s = float(times["start_s"][0]) if len(times) and after else 0.0
        found = tables.read_trajectories(connection, since_s=since_s, newest=MOST_ANSWERS)
        occupancy = read_occupancy(connection, times, config) if len(times) else None
        restarted = "SELECT COUNT(*), COALESCE(SUM(redone_steps), 0) FROM restarts"
        num_restarts, redone_steps = connection.execute(restarted).fetchone()
    # those that came to their own end: the length of others says nothing about how long answers are
    answers = found[~np.isin(found["finish"], ("", FinishReason.ABORT))]
    tokens, signal, wall_s = rows.column("trained_tokens"), signal_of(answers), rows.column("wall_s")
    return Reading(
        run_dir=run_dir,
        config=config,
        num_steps=num_steps,
        num_restarts=num_restarts,
        redone_steps=redone_steps,
        measured_steps=range(last_step + 1 - len(rows), last_step + 1),
        wall_s=float(np.nansum(wall_s)),
        step_s=Spread.of(wall_s),
        stage_s=rows.stages(np.mean) if len(rows) else None,
        stage_p50_s=rows.stages(np.median) if len(rows) else None,
        stage_p95_s=rows.stages(lambda taken: np.quantile(taken, 0.95)) if len(rows) else None,
        occupancy=occupancy,
        trained_tokens=int(np.nansum(tokens)),
        dropped_tokens=rows.dropped_tokens(),
        answer_tokens=Spread.of(answers["num_tokens"]),
        tail_s=Spread.of(tails_s(answers["finished_s"], times)) if len(times) else None,
        verdict_s=Spread.of(answers["scored_s"] - answers["finished_s"]),
        no_signal_share=1.0 - float(signal.mean()) if len(signal) else None,
        lag_mean=float(np.average(rows.column("lag_mean"), weights=tokens)) if tokens.sum() else None,
        lag_max=int(rows.column("lag_max").max()) if tokens.sum() else None,
        ratio_outside=rows.mean("ratio_outside"),
        effective_samples=rows.mean("effective_samples"),
        preemptions=int(np.nansum(rows.column("preemptions"))),
    )


def read_occupancy(connection: sqlite3.Connection, times: Columns, config: Config) -> Occupancy | None:
    """What the stages did in these steps, or in the last of them if there are very many spans.

    Everything is measured on the time that rows count, without what came between two steps.
    """
    (last_rowid,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM spans").fetchone()
    times = times[-max(1, (times["after_rowid"] >= last_rowid - MOST_SPANS).sum()) :]
    spans = tables.read_spans(connection, after_rowid=int(times["after_rowid"][0]))
    if not len(spans):
        return None
    steps = times["start_s"], times["end_s"]
    wall_s = float((steps[1] - steps[0]).sum())
    starts_s, ends_s = (tables.elapsed_s(steps, spans[side]) for side in ("start_s", "end_s"))

    def busy_s(of: BoolArray, at_once: int = 1) -> float:
        return tables.covered_s((starts_s[of], ends_s[of]), at_once=at_once)

    def idle_shares(pool: str, of_pool: BoolArray) -> Iterator[tuple[str, float]]:
        workers = np.unique(spans["worker"][of_pool])
        num = max(1, config.reward.workers) if pool == REWARD and len(workers) == 1 else 1
        for worker in workers:
            work_s = busy_s(of_pool & (spans["worker"] == worker), num)
            idle = min(1.0, max(0.0, 1.0 - work_s / (wall_s * num))) if wall_s else 0.0
            yield f"{pool} {worker}" if len(workers) > 1 else pool, idle

    works, scores = np.isin(spans["stage"], STAGES), spans["stage"] == REWARD
    return Occupancy(
        num_steps=len(times),
        wall_s=wall_s,
        busy_s=busy_s(works),
        stage_s=StageTimes(**{stage: busy_s(spans["stage"] == stage) for stage in STAGES}),
        idle_shares=dict((*idle_shares(DEVICE, works & ~scores), *idle_shares(REWARD, scores))),
        stall_s=busy_s((spans["stage"] == "checkpoint") & (spans["detail"] == STALL)),
    )


def signal_of(answers: Columns) -> BoolArray:
    """[G] whether the rewards of a group differ, of the groups with at least two verdicts."""
    known = answers[np.isfinite(answers["reward"]) & np.isfinite(answers["serial"])]
    groups, begins = tables.by_group(known)
    rewards = groups["reward"]
    if not len(rewards):
        return np.zeros(0, np.bool_)
    differ: BoolArray = np.maximum.reduceat(rewards, begins) > np.minimum.reduceat(rewards, begins)
    return differ[np.diff(begins, append=len(rewards)) > 1]


def tails_s(finished_s: Numbers, times: Columns) -> Numbers:
    """Of each step the seconds from when all but its last answers have ended to the end of the last.

    The last are one in twenty, and at least one. A step's answers are those that finished in it.
    """
    known = np.isfinite(finished_s) & (finished_s > times["start_s"][0])
    finished_s = np.sort(finished_s[known])
    ends = np.searchsorted(finished_s, times["end_s"], side="right")
    counts = ends - np.searchsorted(finished_s, times["start_s"], side="right")
    num_tail = np.maximum(1, np.floor(TAIL_SHARE * counts)).astype(np.int64)
    last, num_tail = ends[counts >= 2] - 1, num_tail[counts >= 2]
    tails: Numbers = finished_s[last] - finished_s[last - num_tail]
    return tails

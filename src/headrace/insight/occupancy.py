"""Which stage was busy when: what the spans of a run's steps add up to.

Everything is measured on the time that rows count. Between two rows there may be an evaluation, which belongs to no
step, so a moment `t` is first mapped to the seconds of steps that had gone by at `t` (`StepTimes.measured`).
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.insight.step_rows import Numbers
from headrace.ledger.clock import STALL
from headrace.types import STAGES, StageTimes

DEVICE, REWARD = "device", "reward"  # pools: engine and learner take turns on the one, the other scores
MOST_SPANS = 100_000  # of a longer run only the last steps are looked at this closely
_STALLED = len(STAGES)  # stands for training that waits for a checkpoint, behind the numbers of the stages

Intervals = tuple[Numbers, Numbers]  # starts and ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers that do one kind of work, and how much of the time they had none.

    Example:
        Pool(name="reward", worker="local", num_workers=4, idle_share=0.91)
    """

    name: str
    worker: str
    num_workers: int
    idle_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How the stages of some steps lay side by side. Seconds are totals over these steps.

    Example:
        Occupancy(num_steps=58, wall_s=81.2, busy_s=79.0, stage_s=StageTimes(rollout=52.0, reward=14.5, train=26.0),
            pools=(Pool(...), Pool(...)), stall_s=0.3)
    """

    num_steps: int
    wall_s: float
    busy_s: float  # at least one stage was busy
    stage_s: StageTimes
    pools: tuple[Pool, ...]
    stall_s: float  # training waited for a checkpoint

    @property
    def overlap_s(self) -> float:
        """Seconds saved because stages ran side by side: their sum less their union."""
        return sum(float(getattr(self.stage_s, stage)) for stage in STAGES) - self.busy_s

    @property
    def overlap_share(self) -> float:
        """Of the sum of the stage times; 0 is one after the other, 0.5 is two stages side by side all the time."""
        total_s = self.busy_s + self.overlap_s
        return self.overlap_s / total_s if total_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When consecutive steps began and ended, on the run's clock; `span_ids` are those of their publish spans.

    Example:
        StepTimes(steps=np.array([3, 4]), starts_s=np.array([2.1, 4.0]), ends_s=np.array([4.0, 5.8]),
            span_ids=np.array([340, 512]))
    """

    steps: npt.NDArray[np.int64]
    starts_s: Numbers
    ends_s: Numbers
    span_ids: npt.NDArray[np.int64]

    @classmethod
    def read(cls, connection: sqlite3.Connection, steps: Numbers, walls_s: Numbers) -> StepTimes | None:
        """Of those of these steps that have a publish span: a step ends with it. None if none has.

        Spans are written with their row, in the order they ended, so the newest are found from the table's end. A step
        that a restart took again has another publish span; the first is the one of its row.
        """
        if not len(steps):
            return None
        (redone,) = connection.execute("SELECT COALESCE(SUM(redone_steps), 0) FROM restarts").fetchone()
        found = connection.execute(
            "SELECT version, id, end_s FROM spans WHERE stage = 'publish' AND version >= ? ORDER BY id DESC LIMIT ?",
            (int(steps[0]), len(steps) + redone),
        )
        published = {version: (id, end_s) for version, id, end_s in found}
        known = np.array([int(step) in published for step in steps])
        if not known.any():
            return None
        numbers = steps[known].astype(np.int64)
        ids, ends = zip(*(published[step] for step in numbers.tolist()), strict=True)
        ends_s = np.maximum.accumulate(np.array(ends, np.float64))
        before_s = np.concatenate([[-np.inf], ends_s[:-1]])
        return cls(
            steps=numbers,
            starts_s=np.minimum(np.maximum(ends_s - walls_s[known], before_s), ends_s),
            ends_s=ends_s,
            span_ids=np.array(ids, np.int64),
        )

    def last(self, num_steps: int) -> StepTimes:
        """The last so many."""
        steps, starts_s = self.steps[-num_steps:], self.starts_s[-num_steps:]
        return StepTimes(
            steps=steps, starts_s=starts_s, ends_s=self.ends_s[-num_steps:], span_ids=self.span_ids[-num_steps:]
        )

    @property
    def wall_s(self) -> float:
        """Seconds of all steps."""
        return float((self.ends_s - self.starts_s).sum())

    def measured(self, times_s: Numbers) -> Numbers:
        """Seconds of these steps that had gone by at each moment."""
        done_s = np.cumsum(self.ends_s - self.starts_s)
        knots_s = np.stack([self.starts_s, self.ends_s], axis=1).ravel()
        values_s = np.stack([done_s - (self.ends_s - self.starts_s), done_s], axis=1).ravel()
        return np.interp(times_s, knots_s, values_s)


def read_occupancy(connection: sqlite3.Connection, times: StepTimes, *, reward_workers: int) -> Occupancy | None:
    """What the stages did in these steps, or in the last of them if there are very many spans."""
    times, first_id = _bounded(connection, times)
    stages = [*STAGES, "checkpoint"]
    cases = " ".join(f"WHEN '{stage}' THEN {number}" for number, stage in enumerate(stages))
    rows = connection.execute(
        f"SELECT CASE stage {cases} END AS number, worker, start_s, end_s FROM spans "
        "WHERE id > ? AND number IS NOT NULL AND (number < ? OR detail = ?)",
        (first_id, _STALLED, STALL),
    ).fetchall()
    if not rows:
        return None
    numbers, workers, starts, ends = zip(*rows, strict=True)
    stage = np.array(numbers)
    starts_s, ends_s = (times.measured(np.array(column, np.float64)) for column in (starts, ends))
    busy_s = [_length(union((starts_s[stage == i], ends_s[stage == i]))) for i in range(len(stages))]
    working = stage < _STALLED
    return Occupancy(
        num_steps=len(times.steps),
        wall_s=times.wall_s,
        busy_s=_length(union((starts_s[working], ends_s[working]))),
        stage_s=StageTimes(**dict(zip(STAGES, busy_s, strict=False))),
        pools=_pools(stage, np.array(workers), (starts_s, ends_s), times.wall_s, reward_workers),
        stall_s=busy_s[_STALLED],
    )


def union(intervals: Intervals) -> Intervals:
    """The same moments in intervals that do not touch, in order."""
    order = np.argsort(intervals[0], kind="stable")
    starts, ends = intervals[0][order], intervals[1][order]
    if not len(starts):
        return starts, ends
    reached = np.maximum.accumulate(ends)
    first = np.concatenate([[True], starts[1:] > reached[:-1]])
    return starts[first], reached[np.concatenate([first[1:], [True]])]


def at_most(intervals: Intervals, limit: int) -> float:
    """Sum of the intervals' lengths, where at any moment no more than `limit` of them count."""
    moments = np.concatenate(intervals)
    order = np.argsort(moments, kind="stable")
    running = np.cumsum(np.where(order < len(intervals[0]), 1, -1))[:-1]
    return float((np.diff(moments[order]) * np.minimum(running, limit)).sum())


def _bounded(connection: sqlite3.Connection, times: StepTimes) -> tuple[StepTimes, int]:
    """As many of the last steps as have few enough spans, and the id after which their spans come."""
    (last_id,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM spans").fetchone()
    before = connection.execute(
        "SELECT id FROM spans WHERE stage = 'publish' AND version = ? AND id < ? ORDER BY id DESC LIMIT 1",
        (int(times.steps[0]) - 1, int(times.span_ids[0])),
    ).fetchone()
    after_ids = np.concatenate([[before[0] if before else 0], times.span_ids[:-1]])
    num_steps = max(1, int((after_ids >= last_id - MOST_SPANS).sum()))
    return times.last(num_steps), int(after_ids[-num_steps])


def _pools(
    stage: npt.NDArray[np.int64], workers: npt.NDArray[np.str_], spans: Intervals, wall_s: float, reward_workers: int
) -> tuple[Pool, ...]:
    found = []
    scores = stage == STAGES.index(REWARD)
    for name, of_pool in ((DEVICE, ~scores & (stage < _STALLED)), (REWARD, scores)):
        names = np.unique(workers[of_pool])
        num_workers = reward_workers if name == REWARD and len(names) == 1 else 1
        for worker in names:
            own = of_pool & (workers == worker)
            work_s = at_most((spans[0][own], spans[1][own]), num_workers)
            idle_share = 1.0 - work_s / (wall_s * num_workers) if wall_s else 0.0
            found.append(
                Pool(name=name, worker=str(worker), num_workers=num_workers, idle_share=min(1.0, max(0.0, idle_share)))
            )
    return tuple(found)


def _length(intervals: Intervals) -> float:
    return float((intervals[1] - intervals[0]).sum())

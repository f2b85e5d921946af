"""What the page asks of a run's ledger: curves over its steps, accounts, spans, lag, rewards.

Nothing here looks at a whole table when it is asked again: every row is read once. A curve has a point for
each step while they are few, and one for 2, 4, 8 ... of them when they are many.
"""

import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME
from headrace.ledger.ledger import Books
from headrace.measured import ROW_METRICS, STAGES, StageTimes
from headrace.runs.audit import books
from headrace.runs.columns import Ints, Numbers, RowColumns, one, query, read_spans, reading, union

Points = list[tuple[float, float | None]]
MOST_POINTS = 400  # of a curve
# What a curve may be drawn along: the column that is added up, and how much of it is one unit.
AXES = {"step": ("", 1), "trained tokens": ("trained_tokens", 1), "hours": ("wall_s", 3600)}
RECENT_STEPS = 20  # what "now" is in the overview

_DERIVED = {"reward_low": -1, "reward_high": 1}  # standard deviations from the mean reward
# How the numbers of several rows become one; what a row adds up becomes the mean of its steps.
_OVER = {name: metric.over for name, metric in ROW_METRICS.items() if metric.over != "sum"}
_COLUMNS = ("step", *ROW_METRICS, *_DERIVED, *(f"stage_s.{stage}" for stage in STAGES))
_CREATED = "SELECT value FROM meta WHERE key = 'created'"  # tells a ledger from a later one in its place
MOST_SPANS = 20_000  # of a timeline
FINEST = 800  # parts of a timeline that can be told apart; spans that are closer are drawn as one
NUM_REWARDS = 1000  # of the first and of the newest answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The rows of a run by column, up to the newest."""

    created: str = ""  # when the ledger was: another run may take the place of one
    columns: Mapping[str, Numbers] = field(default_factory=lambda: dict.fromkeys(_COLUMNS, np.empty(0)))
    last_step: int = 0
    num_damaged: int = 0  # rows that cannot be read

    @property
    def width(self) -> int:
        return steps_together(self.last_step, MOST_POINTS)

    def curve(self, name: str, scale: float = 1.0, by: str = "step") -> Points:
        """The points of one curve, with gaps, along one of `AXES`; `goodput` is trained tokens per second."""
        if name == "goodput":
            return self.ratio(self.columns["trained_tokens"], self.columns["wall_s"], by)
        return self._points(self.columns[name] * scale, by, _OVER.get(name, "mean"))

    def ratio(self, values: Numbers, of: Numbers, by: str) -> Points:
        both = zip(self._points(values, by), self._points(of, by), strict=True)
        return [(place, value / num if value and num else value) for (place, value), (_, num) in both]

    def _points(self, values: Numbers, by: str, over: str = "mean") -> Points:
        begins = np.flatnonzero(np.diff((self.places("step") - 1) // self.width, prepend=-1))
        places = self.places(by)[np.append(begins[1:], len(values))[: len(begins)] - 1]
        both = zip(places.tolist(), _combined(values, begins, over).tolist(), strict=True)
        return [(place, value if math.isfinite(value) else None) for place, value in both]

    def places(self, by: str) -> Numbers | Ints:
        """Where each row stands on one of `AXES`."""
        if by == "step":
            return self.columns["step"].astype(np.int64)
        column, per = AXES[by]
        return np.asarray(np.nancumsum(self.columns[column]) / per)

    def skipped_steps(self) -> list[int]:
        return [int(step) for step in self.columns["step"][self.columns["skipped"] > 0]]

    def goodput(self, num_steps: int = 0) -> float | None:
        tokens, wall_s = self.columns["trained_tokens"], self.columns["wall_s"]
        taken_s = np.nansum(wall_s[-num_steps:])
        return float(np.nansum(tokens[-num_steps:]) / taken_s) if taken_s else None

    def now(self, name: str) -> float | None:
        """The mean of the last steps that have the number."""
        values = self.columns[name][-RECENT_STEPS:]
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else None

    def stages_now(self) -> StageTimes:
        return StageTimes(**{stage: self.now(f"stage_s.{stage}") or 0.0 for stage in STAGES})


def steps_together(last_step: int, most: int) -> int:
    """1, 2, 4, 8 ...: so many that there are at most `most` of them."""
    return int(2 ** max(0, math.ceil(math.log2(max(last_step, 1) / most))))


def read_series(run_dir: Path, before: Series) -> Series:
    """The rows as they are now; `before` is what the last look found, or an empty Series."""
    with looking_into(run_dir) as connection:
        created = str(one(connection, _CREATED))
        last_step = one(connection, "SELECT COALESCE(MAX(step), 0) FROM rows")
        if created != before.created or last_step < before.last_step:
            before = Series(created=created)
        if last_step == before.last_step:
            return before
        rows = RowColumns.read(connection, after_step=before.last_step, strict=False)
        new = {name: rows.column(name) for name in _COLUMNS if name not in _DERIVED}
        new |= {name: new["reward_mean"] + sign * new["reward_std"] for name, sign in _DERIVED.items()}
        return Series(
            created=created,
            columns={name: np.append(known, new[name]) for name, known in before.columns.items()},
            last_step=last_step,
            num_damaged=before.num_damaged + int(rows.damaged.sum()),
        )


@contextmanager
def looking_into(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One view of the books. Whatever is wrong with them is said in words."""
    if not (run_dir / FILE_NAME).is_file():
        raise RunError(f"{run_dir.name} has no ledger yet: it is just starting, or ended before its first step.")
    try:
        with reading(run_dir) as connection:
            yield connection
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise RunError(f"The ledger of {run_dir.name} holds something that cannot be read ({error}).") from error


def _combined(values: Numbers, begins: Ints, over: str) -> Numbers:
    """One number for the finite values from each of `begins` to the next; NaN where there is none."""
    if not len(begins):
        return np.empty(0)
    if over == "last":
        return np.asarray(values[np.append(begins[1:], len(values)) - 1])
    known = np.isfinite(values)
    counts = np.add.reduceat(known, begins, dtype=np.int64)
    ways = {"max": (np.maximum, -np.inf), "min": (np.minimum, np.inf), "mean": (np.add, 0.0)}
    combine, neutral = ways[over]
    found = combine.reduceat(np.where(known, values, neutral), begins)
    found = found / np.maximum(counts, 1) if over == "mean" else found
    return np.where(counts > 0, found, np.nan)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over a run's transfers, by step and something else; grows with the run, reading each once."""

    created: str = ""  # when the ledger was: another run may take the place of one
    last_id: int = 0  # of the transfers that were read
    sums: Counter[tuple[int, Any]] = field(default_factory=Counter)
    counts: Counter[tuple[int, Any]] = field(default_factory=Counter)

    def update(self, run_dir: Path, query: str) -> "Tally":
        """Read what is new; a copy, which other threads do not change."""
        with looking_into(run_dir) as connection:
            last_id = one(connection, "SELECT COALESCE(MAX(id), 0) FROM transfers")
            if (created := str(one(connection, _CREATED))) != self.created:
                self.created, self.last_id, self.sums, self.counts = created, 0, Counter(), Counter()
            for step, key, total, num in connection.execute(query, (self.last_id, last_id)):
                self.sums[step, key] += total
                self.counts[step, key] += num
            self.last_id = last_id
        return replace(self, sums=self.sums.copy(), counts=self.counts.copy())

    def means(self, series: Series, by: str = "step") -> dict[str, Points]:
        """By key, the mean of each step or, of a long run, of a few, as `Series.curve` has them."""
        steps, found = series.places("step").tolist(), {}
        for key in sorted({key for _, key in self.sums}):
            total, num = (
                np.array([held.get((step, key), math.nan) for step in steps]) for held in (self.sums, self.counts)
            )
            found[key] = [point for point in series.ratio(total, num, by) if point[1] is not None]
        return found


# For `Tally.update`: trained tokens by lag; the parts of the rewards of what was scored.
LAGS = (
    "SELECT step, COALESCE(lag, 0), SUM(tokens), COUNT(*) FROM transfers "
    "WHERE id > ? AND id <= ? AND credit = 'trained' GROUP BY 1, 2"
)
PARTS = (
    "SELECT x.step, part.key, SUM(part.value), COUNT(*) FROM transfers x "
    "JOIN trajectories t ON t.id = x.trajectory_id, json_each(t.reward_parts) part "
    "WHERE x.id > ? AND x.id <= ? AND x.debit = 'in_flight' AND t.reward IS NOT NULL "
    "AND part.type IN ('integer', 'real') GROUP BY 1, 2"
)


def read_accounts(run_dir: Path) -> Books:
    with looking_into(run_dir):
        return books(run_dir)


def read_elapsed_s(run_dir: Path) -> float:
    """Seconds on the run's clock when something was last booked; pauses between processes do not count."""
    with looking_into(run_dir) as connection:
        span_s = one(connection, "SELECT MAX(end_s) FROM spans")
        moved_s = one(connection, "SELECT at_s FROM transfers ORDER BY id DESC LIMIT 1")
    return max(float(span_s or 0.0), float(moved_s or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every worker did in the last seconds of a run."""

    start_s: float
    end_s: float
    busy: Mapping[str, float]  # by lane (a stage, or one worker of it), the share of these seconds
    bars: Sequence[tuple[str, str, float, float]]  # lane, stage, start, end; close spans are one bar


def read_timeline(run_dir: Path, num_steps: int) -> Timeline:
    """About the last `num_steps` steps; an evaluation between them takes its part of the time."""
    last = "SELECT SUM(wall_s) FROM (SELECT wall_s FROM rows ORDER BY step DESC LIMIT ?)"
    with looking_into(run_dir) as connection:
        end_s = one(connection, "SELECT MAX(end_s) FROM spans") or 0.0
        length_s = one(connection, last, num_steps)
        start_s = max(0.0, end_s - length_s) if length_s else 0.0
        spans = read_spans(connection, since_s=start_s, newest=MOST_SPANS)
    if len(spans) == MOST_SPANS:
        start_s = float(spans["end_s"].min())
    length_s = max(end_s - start_s, 1e-9)
    gap_s, bars, busy = length_s / FINEST, [], {}
    # stages in the order of a step, then whatever else there is; the worker only if there are several
    order = {stage: place for place, stage in enumerate(STAGES)}
    lanes = set(zip(spans["stage"].tolist(), spans["worker"].tolist(), strict=True))
    num_workers = Counter(stage for stage, _ in lanes)
    for stage, worker in sorted(lanes, key=lambda lane: (order.get(lane[0], len(order)), lane)):
        name = stage if num_workers[stage] == 1 else f"{stage} · {worker}"
        own = spans[(spans["stage"] == stage) & (spans["worker"] == worker)]
        starts_s, ends_s = union((np.maximum(own["start_s"], start_s), own["end_s"]))
        busy[name] = float((ends_s - starts_s).sum()) / length_s
        starts_s, ends_s = union((starts_s, ends_s + gap_s))
        drawn = zip(starts_s.tolist(), (ends_s - gap_s).tolist(), strict=True)
        bars += [(name, stage, begin, end) for begin, end in drawn]
    return Timeline(start_s=start_s, end_s=end_s, busy=busy, bars=bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """The rewards of the first answers and of the newest; of each part of them, both means."""

    first: Numbers
    newest: Numbers
    parts: Mapping[str, tuple[float, float]]


_REWARDS = "SELECT reward FROM trajectories WHERE rowid BETWEEN ? AND ? AND reward IS NOT NULL"
_PART_MEANS = (
    "SELECT part.key, AVG(part.value) FROM trajectories t, json_each(t.reward_parts) part "
    "WHERE t.rowid BETWEEN ? AND ? AND t.reward IS NOT NULL AND part.type IN ('integer', 'real') GROUP BY 1"
)


def read_rewards(run_dir: Path) -> Rewards:
    """Of a short run, those of its two halves."""
    with looking_into(run_dir) as connection:
        last = one(connection, "SELECT COALESCE(MAX(rowid), 0) FROM trajectories")
        num_each = min(NUM_REWARDS, (last + 1) // 2)
        sides = ((1, num_each), (last - num_each + 1, last))
        first, newest = (query(connection, _REWARDS, *side)["reward"] for side in sides)
        before, now = (dict(connection.execute(_PART_MEANS, side)) for side in sides)
    parts = {name: (before[name], now[name]) for name in before if name in now}
    return Rewards(first=first, newest=newest, parts=parts)

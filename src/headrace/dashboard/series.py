"""Curves of a run over its steps. Every row is read once: the next look reads only what came since.

A curve has a point for each step while they are few, and one for 2, 4, 8 ... of them when they are many.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME
from headrace.row import ROW_METRICS
from headrace.runs.columns import Ints, Numbers, RowColumns, one, reading
from headrace.types import STAGES, StageTimes

MOST_POINTS = 400  # of a curve
RECENT_STEPS = 20  # what "now" is in the overview

_DERIVED = {"reward_low": -1, "reward_high": 1}  # standard deviations from the mean reward
# How the numbers of several rows become one.
_OVER = {name: metric.over for name, metric in ROW_METRICS.items()}
_OVER |= dict.fromkeys((*_DERIVED, *(f"stage_s.{stage}" for stage in STAGES)), "mean")
_COLUMNS = ("step", *_OVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The rows of a run by column, up to the newest.

    Example:
        Series(created="2026-05-01T12:00:00+00:00", columns={"step": np.array([1.0, 2.0]), ...}, last_step=2)
    """

    created: str = ""  # when the ledger was: another run may take the place of one
    columns: Mapping[str, Numbers] = field(default_factory=lambda: dict.fromkeys(_COLUMNS, np.empty(0)))
    last_step: int = 0
    num_damaged: int = 0  # rows that cannot be read

    @property
    def width(self) -> int:
        """Steps that make one point of a curve."""
        return int(2 ** max(0, math.ceil(math.log2(max(self.last_step, 1) / MOST_POINTS))))

    def curve(self, name: str, scale: float = 1.0, over: str = "") -> list[tuple[int, float | None]]:
        """The points of one curve, with gaps; `goodput` is trained tokens per second."""
        if name == "goodput":
            both = zip(self.curve("trained_tokens"), self.curve("wall_s"), strict=True)
            return [(step, num / wall_s if num and wall_s else num) for (step, num), (_, wall_s) in both]
        steps = self.columns["step"].astype(np.int64)
        begins = np.flatnonzero(np.diff((steps - 1) // self.width, prepend=-1))
        last = steps[np.append(begins[1:], len(steps))[: len(begins)] - 1]
        values = _combined(self.columns[name], begins, over or _OVER[name]) * scale
        return [
            (step, value if math.isfinite(value) else None)
            for step, value in zip(last.tolist(), values.tolist(), strict=True)
        ]

    def goodput(self, num_steps: int = 0) -> float | None:
        """Trained tokens per second of the last `num_steps`, or of all."""
        tokens, wall_s = self.columns["trained_tokens"], self.columns["wall_s"]
        taken_s = np.nansum(wall_s[-num_steps:])
        return float(np.nansum(tokens[-num_steps:]) / taken_s) if taken_s else None

    def now(self, name: str, over: str = "") -> float | None:
        values = self.columns[name][-RECENT_STEPS:]
        found = _combined(values, np.zeros(min(len(values), 1), np.int64), over or _OVER[name])
        return float(found[0]) if len(found) and np.isfinite(found[0]) else None

    def stages_now(self) -> StageTimes:
        """Mean seconds of each stage, over the last steps."""
        return StageTimes(**{stage: self.now(f"stage_s.{stage}") or 0.0 for stage in STAGES})


def read_series(run_dir: Path, before: Series) -> Series:
    """The rows as they are now; `before` is what the last look found, or an empty Series."""
    with looking_into(run_dir) as connection:
        created = when_created(connection)
        last_step = one(connection, "SELECT COALESCE(MAX(step), 0) FROM rows")
        if created != before.created or last_step < before.last_step:
            before = Series(created=created)
        if last_step == before.last_step:
            return before
        rows = RowColumns.read(connection, after_step=before.last_step, strict=False)
        new = {name: rows.column(name) for name in _COLUMNS if name not in _DERIVED}
        for name, sign in _DERIVED.items():
            new[name] = new["reward_mean"] + sign * new["reward_std"]
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
        why = "it is just starting, or ended before its first step"
        raise RunError(f"{run_dir.name} has no ledger yet: {why}.")
    try:
        with reading(run_dir) as connection:
            yield connection
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        found = f"something that cannot be read ({error})"
        raise RunError(f"The ledger of {run_dir.name} holds {found}.") from error


def when_created(connection: sqlite3.Connection) -> str:
    """What tells a ledger from another in the same place."""
    return str(connection.execute("SELECT value FROM meta WHERE key = 'created'").fetchone())


def _combined(values: Numbers, begins: Ints, over: str) -> Numbers:
    """One number for the finite values from each of `begins` to the next; NaN where there is none."""
    if not len(begins):
        return np.empty(0)
    if over == "last":
        return np.asarray(values[np.append(begins[1:], len(values)) - 1])
    known = np.isfinite(values)
    counts = np.add.reduceat(known, begins, dtype=np.int64)
    ways = {"max": (np.maximum, -np.inf), "min": (np.minimum, np.inf)}
    combine, neutral = ways.get(over, (np.add, 0.0))
    found = combine.reduceat(np.where(known, values, neutral), begins)
    found = found / np.maximum(counts, 1) if over == "mean" else found
    return np.where(counts > 0, found, np.nan)

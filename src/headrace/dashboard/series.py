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
from headrace.runs.columns import Ints, Numbers, RowColumns, reading
from headrace.types import STAGES, StageTimes

MOST_POINTS = 400  # of a curve
RECENT_STEPS = 20  # what "now" is in the overview

_DERIVED = {"reward_low": -1, "reward_high": 1}  # standard deviations from the mean reward
# How the numbers of several rows become one.
_OVER = {name: metric.over for name, metric in ROW_METRICS.items()}
_OVER |= dict.fromkeys((*_DERIVED, *(f"stage_s.{stage}" for stage in STAGES)), "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The rows of a run by column, up to the newest.

    Example:
        Series(created="2026-05-01T12:00:00+00:00", columns={"step": np.array([1.0, 2.0]), ...}, last_step=2)
    """

    created: str = ""  # when the ledger was: another run may take the place of one
    columns: Mapping[str, Numbers] = field(default_factory=lambda: {name: np.empty(0) for name in ("step", *_OVER)})
    last_step: int = 0
    num_damaged: int = 0  # rows that cannot be read

    @property
    def width(self) -> int:
        """Steps that make one point of a curve."""
        return int(2 ** max(0, math.ceil(math.log2(max(self.last_step, 1) / MOST_POINTS))))

    def curve(self, name: str, scale: float = 1.0, over: str = "") -> list[tuple[int, float | None]]:
        """The points of one curve; a gap where nothing was measured. `goodput` is trained tokens per second."""
        if name == "goodput":
            both = zip(self.curve("trained_tokens"), self.curve("wall_s"), strict=True)
            return [(step, tokens / wall_s if tokens and wall_s else tokens) for (step, tokens), (_, wall_s) in both]
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
        tokens, wall_s = (np.nansum(self.columns[name][-num_steps:]) for name in ("trained_tokens", "wall_s"))
        return float(tokens / wall_s) if wall_s else None

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
        (last_step,) = connection.execute("SELECT COALESCE(MAX(step), 0) FROM rows").fetchone()
        if created != before.created or last_step < before.last_step:
            before = Series(created=created)
        if last_step == before.last_step:
            return before
        rows = RowColumns.read(connection, after_step=before.last_step, strict=False)
        new = {name: rows.column(name) for name in ("step", *_OVER) if name not in _DERIVED}
        for name, sign in _DERIVED.items():
            new[name] = new["reward_mean"] + sign * new["reward_std"]
        columns = {name: np.append(known, new[name]) for name, known in before.columns.items()}
        num_damaged = before.num_damaged + int(rows.damaged.sum())
        return Series(created=created, columns=columns, last_step=last_step, num_damaged=num_damaged)


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


def when_created(connection: sqlite3.Connection) -> str:
    """What tells a ledger from another in the same place."""
    return str(connection.execute("SELECT value FROM meta WHERE key = 'created'").fetchone())


def _combined(values: Numbers, begins: Ints, over: str) -> Numbers:
    """One number for the values from each of `begins` to the next, of those that are finite; NaN where none is."""
    if not len(begins):
        return np.empty(0)
    if over == "last":
        return np.asarray(values[np.append(begins[1:], len(values)) - 1])
    known = np.isfinite(values)
    counts = np.add.reduceat(known, begins, dtype=np.int64)
    combine, neutral = {"max": (np.maximum, -np.inf), "min": (np.minimum, np.inf)}.get(over, (np.add, 0.0))
    found = combine.reduceat(np.where(known, values, neutral), begins)
    found = found / np.maximum(counts, 1) if over == "mean" else found
    return np.where(counts > 0, found, np.nan)

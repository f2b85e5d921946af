"""Curves of a run over its steps, read from the ledger in pieces.

A ledger may hold ten thousand rows, and a page asks every few seconds. So rows are averaged over buckets of equally
many steps, and what was read is kept: the next look reads the last bucket and what follows it.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME
from headrace.runs.columns import Ints, Numbers, RowColumns, reading
from headrace.types import ROW_METRICS, STAGES, StageTimes

MOST_POINTS = 400  # of a curve; a bucket has twice as many steps once there would be more
RECENT_STEPS = 20  # what "now" is in the overview

# How the numbers of a bucket's rows become one.
_OVER = {name: metric.over for name, metric in ROW_METRICS.items()} | {f"stage_s.{stage}": "mean" for stage in STAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A few steps in a row, as one point of every curve.

    Example:
        Bucket(index=3, num_steps=2, last_step=8, num_damaged=0, values={"reward_mean": 0.4, "wall_s": 2.8, ...})
    """

    index: int
    num_steps: int
    last_step: int
    num_damaged: int  # rows that cannot be read
    values: Mapping[str, float | None]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step."""
        wall_s = self.values["wall_s"]
        return None if wall_s is None else wall_s / self.num_steps

    @property
    def goodput_tokens_per_s(self) -> float | None:
        """Trained tokens per second of the loop."""
        tokens, wall_s = self.values["trained_tokens"], self.values["wall_s"]
        return tokens / wall_s if tokens is not None and wall_s else None

    @property
    def stage_s(self) -> StageTimes:
        """Mean seconds of each stage in a step."""
        return StageTimes(**{stage: self.values[f"stage_s.{stage}"] or 0.0 for stage in STAGES})


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All buckets of a run, and the last steps once more as one bucket.

    Example:
        Series(created="2026-05-01T12:00:00+00:00", width=2, buckets=[Bucket(...), Bucket(...)], recent=Bucket(...))
    """

    created: str = ""  # when the ledger was: another run may take the place of one
    width: int = 1  # steps in a bucket
    buckets: Sequence[Bucket] = field(default_factory=list)
    recent: Bucket | None = None  # None before the first row

    @property
    def last_step(self) -> int:
        """The newest step."""
        return self.buckets[-1].last_step if self.buckets else 0

    @property
    def num_damaged(self) -> int:
        """Rows that cannot be read."""
        return sum(bucket.num_damaged for bucket in self.buckets)

    @property
    def goodput_tokens_per_s(self) -> float | None:
        """Of the whole run."""
        wall_s = self.total("wall_s")
        return self.total("trained_tokens") / wall_s if wall_s else None

    def total(self, name: str) -> float:
        """Of a number that is summed."""
        return sum(bucket.values[name] or 0.0 for bucket in self.buckets)

    def curve(self, name: str, scale: float = 1.0) -> list[tuple[int, float | None]]:
        """Points of one curve; a gap where nothing was measured."""
        return [(b.last_step, None if (y := b.values[name]) is None else y * scale) for b in self.buckets]


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


def read_series(run_dir: Path, before: Series) -> Series:
    """The curves as they are now; `before` is what the last look found, or an empty Series."""
    with looking_into(run_dir) as connection:
        created = when_created(connection)
        if created != before.created:
            before = Series(created=created)
        (last_step,) = connection.execute("SELECT COALESCE(MAX(step), 0) FROM rows").fetchone()
        if last_step == before.last_step:
            return before
        width = 2 ** max(0, math.ceil(math.log2(last_step / MOST_POINTS)))
        goes_on = width == before.width and last_step > before.last_step
        kept = list(before.buckets[:-1]) if goes_on else []
        first = kept[-1].index + 1 if kept else 0
        found = _buckets(connection, after_step=first * width, width=width)
        (recent,) = _buckets(connection, after_step=last_step - RECENT_STEPS, width=last_step + 1)
        return Series(created=created, width=width, buckets=[*kept, *found], recent=recent)


def when_created(connection: sqlite3.Connection) -> str:
    """What tells a ledger from another in the same place."""
    return str(connection.execute("SELECT value FROM meta WHERE key = 'created'").fetchone())


def _buckets(connection: sqlite3.Connection, *, after_step: int, width: int) -> list[Bucket]:
    rows = RowColumns.read(connection, after_step=after_step, strict=False)
    index = (rows.column("step").astype(np.int64) - 1) // width
    begins = np.flatnonzero(np.diff(index, prepend=-1))
    ends = np.append(begins[1:], len(rows))
    columns = {name: _of_buckets(rows.column(name), begins, ends, over) for name, over in _OVER.items()}
    return [
        Bucket(
            index=int(index[begin]),
            num_steps=int(end - begin),
            last_step=int(rows.column("step")[end - 1]),
            num_damaged=int(rows.damaged[begin:end].sum()),
            values={name: values[place] for name, values in columns.items()},
        )
        for place, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]


def _of_buckets(values: Numbers, begins: Ints, ends: Ints, over: str) -> list[float | None]:
    """One number for each bucket, from those that are finite; None where none is."""
    known = np.isfinite(values)
    if not len(begins):
        return []
    counts = np.add.reduceat(known, begins, dtype=np.int64)
    if over == "last":
        found, counts = values[ends - 1], known[ends - 1]
    else:
        combine, neutral = {"max": (np.maximum, -np.inf), "min": (np.minimum, np.inf)}.get(over, (np.add, 0.0))
        found = combine.reduceat(np.where(known, values, neutral), begins)
        found = found / np.maximum(counts, 1) if over == "mean" else found
    return [value if number else None for value, number in zip(found.tolist(), counts.tolist(), strict=True)]

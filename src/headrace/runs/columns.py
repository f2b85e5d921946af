"""A run's tables by column, as numpy arrays: rows, spans and trajectories.

Ten thousand rows take a tenth of a second this way; a record for each would take four. In a column of
numbers NaN stands for what is not known, in a column of texts the empty text.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME, explained, open_database
from headrace.measured import STAGES, StageTimes
from headrace.types import BoolArray

Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Intervals = tuple[Numbers, Numbers]  # starts and ends

_TEXTS = ("stage", "worker", "detail", "finish", "drop_reason", "reward_parts")
_ROW = "step, wall_s, generated_tokens, trained_tokens, data"
_SPAN = "rowid AS rowid, stage, worker, version, start_s, end_s, detail"
_TRAJECTORY = (
    "rowid AS rowid, serial, attempt, num_tokens, num_prompt_tokens, reward, reward_parts, finish, "
    "started_s, finished_s, scored_s, drop_reason, trained_step"
)


@contextlib.contextmanager
def reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One view of the books, however much a live run adds meanwhile."""
    with contextlib.closing(open_database(run_dir)) as connection, explained(run_dir / FILE_NAME):
        connection.execute("BEGIN")
        yield connection


def one(connection: sqlite3.Connection, query: str, *values: Any) -> Any:
    """The first value that `query` finds, if any."""
    found = connection.execute(query, values).fetchone()
    return found[0] if found else None


class Columns:
    """Columns of equal length, by name: `spans["start_s"]`."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self._columns = columns

    @classmethod
    def query(cls, connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> Self:
        cursor = connection.execute(sql, values)
        names = [name for name, *_ in cursor.description]
        columns = list(zip(*cursor, strict=True)) or [()] * len(names)
        return cls(dict(zip(names, map(_array, names, columns), strict=True)))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def where(self, condition: npt.NDArray[Any]) -> Columns:
        """Those for which `condition` holds; or, of indices, those in that order."""
        return Columns({name: values[condition] for name, values in self._columns.items()})


def read_spans(
    connection: sqlite3.Connection,
    *,
    stage: str | None = None,
    after_rowid: int = 0,
    since_s: float = -np.inf,
    newest: int = -1,
) -> Columns:
    """Spans in the order they were booked, of one `stage` or of all; only `newest` of them, if not -1."""
    by = "end_s" if since_s > -np.inf else "rowid"  # either way there is an index to go along
    found = Columns.query(
        connection,
        f"SELECT {_SPAN} FROM spans WHERE rowid > ? AND end_s > ? AND stage = COALESCE(?, stage) "
        f"ORDER BY {by} DESC LIMIT ?",
        (after_rowid, since_s, stage, newest),
    )
    return found.where(np.argsort(found["rowid"], kind="stable"))


def read_trajectories(
    connection: sqlite3.Connection, *, since_s: float = 0.0, newest: int = -1, oldest: int = -1
) -> Columns:
    """Trajectories in the order they were booked; only `newest` or `oldest` of them, if not -1."""
    first = _first_rowid(connection, since_s)
    if newest >= 0:
        first = max(first, _last_rowid(connection) - newest + 1)
    sql = f"SELECT {_TRAJECTORY} FROM trajectories WHERE rowid >= ? ORDER BY rowid LIMIT ?"
    return Columns.query(connection, sql, (first, oldest))


class RowColumns:
    """The rows of consecutive steps by column. `damaged` marks those that cannot be read."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], damaged: BoolArray) -> None:
        self._rows, self.damaged = rows, damaged
        self._columns: dict[str, Numbers] = {}

    @classmethod
    def read(cls, connection: sqlite3.Connection, *, after_step: int = 0, strict: bool = True) -> Self:
        """A damaged row is an error if `strict`, else only its columns in the database are known."""
        names = _ROW.split(", ")[:-1]
        query = f"SELECT {_ROW} FROM rows WHERE step > ? ORDER BY step"
        found = connection.execute(query, (after_step,)).fetchall()
        try:
            parsed = json.loads(f"[{','.join(data for *_, data in found)}]")
        except (ValueError, TypeError):
            parsed = [_parsed(data) for *_, data in found]
        damaged = np.array([not _is_row(row) for row in parsed], np.bool_)
        for i in np.flatnonzero(damaged):
            parsed[i] = dict(zip(names, found[i], strict=False))
        if strict and damaged.any():
            raise RunError(f"the ledger's rows are damaged: step {found[int(np.argmax(damaged))][0]} cannot be read")
        return cls(parsed, damaged)

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Numbers:
        """One number of every row, by its name in `Row`; a stage's seconds are `stage_s.rollout` etc."""
        if name not in self._columns:  # numpy makes None NaN, and the text "Infinity" a number
            outer, _, inner = name.partition(".")
            values = [row.get(outer) for row in self._rows]
            if inner:
                values = [value.get(inner) if value else None for value in values]
            self._columns[name] = np.array(values, np.float64)
        return self._columns[name]

    def stage(self, stage: str) -> Numbers:
        return self.column(f"stage_s.{stage}")

    def stage_total_s(self) -> StageTimes:
        return StageTimes(**{stage: float(np.nansum(self.stage(stage))) for stage in STAGES})

    def total(self, name: str) -> int:
        return int(np.nansum(self.column(name)))

    def mean(self, name: str) -> float | None:
        """The mean over the rows that have the number, if any has."""
        values = self.column(name)
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else None

    def dropped_tokens(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for row in self._rows:
            total.update(row.get("dropped_tokens", {}))
        return dict(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When consecutive steps began and ended, on the run's clock; their spans come after `after_rowids`.

    Between two rows there may be an evaluation, which belongs to no step: see `measured`.
    """

    steps: Ints
    starts_s: Numbers
    ends_s: Numbers
    after_rowids: Ints

    @classmethod
    def read(cls, connection: sqlite3.Connection, rows: RowColumns) -> StepTimes | None:
        """Of the rows whose step has a publish span: a step ends with it. None if no row has one.

        A step that a restart took again was published again; the first time is the one of its row.
        """
        found = read_spans(connection, stage="publish")
        columns = (found[name] for name in ("version", "rowid", "end_s"))
        published: dict[float, tuple[float, float]] = {}
        current = None  # the version that the last span was of, if that was its first time
        for version, rowid, end_s in zip(*columns, strict=True):
            if version == current or version not in published:
                published[version], current = (rowid, end_s), version
            else:
                current = None
        known = np.array([step in published for step in rows.column("step")])
        if not known.any():
            return None
        steps, wall_s = rows.column("step")[known], rows.column("wall_s")[known]
        rowids, ends_s = np.array([published[step] for step in steps], np.float64).T
        ends_s = np.maximum.accumulate(ends_s)
        before, _ = published.get(steps[0] - 1, (0.0, 0.0))
        before_s = np.concatenate([[-np.inf], ends_s[:-1]])
        after = np.concatenate([[before if before < rowids[0] else 0], rowids[:-1]])
        return cls(
            steps=steps.astype(np.int64),
            starts_s=np.clip(ends_s - wall_s, before_s, ends_s),
            ends_s=ends_s,
            after_rowids=after.astype(np.int64),
        )

    def last(self, num_steps: int) -> StepTimes:
        return StepTimes(**{name: getattr(self, name)[-num_steps:] for name in self.__slots__})

    @property
    def wall_s(self) -> float:
        return float((self.ends_s - self.starts_s).sum())

    def measured(self, times_s: Numbers) -> Numbers:
        """Seconds of these steps that had gone by at each moment."""
        done_s = np.cumsum(self.ends_s - self.starts_s)
        knots_s = np.stack([self.starts_s, self.ends_s], axis=1).ravel()
        values_s = np.stack([done_s - (self.ends_s - self.starts_s), done_s], axis=1).ravel()
        return np.interp(times_s, knots_s, values_s)


def union(intervals: Intervals) -> Intervals:
    """The same moments in intervals that do not touch, in order."""
    order = np.argsort(intervals[0], kind="stable")
    starts, ends = intervals[0][order], intervals[1][order]
    if not len(starts):
        return starts, ends
    reached = np.maximum.accumulate(ends)
    first = np.concatenate([[True], starts[1:] > reached[:-1]])
    return starts[first], reached[np.concatenate([first[1:], [True]])]


def _array(name: str, column: Sequence[Any]) -> npt.NDArray[Any]:
    if name in _TEXTS:
        return np.array(["" if value is None else value for value in column], np.str_)
    return np.array(column, np.float64)


def _parsed(data: Any) -> Any:
    with contextlib.suppress(ValueError, TypeError):
        return json.loads(data)
    return None


def _is_row(row: Any) -> bool:
    inner = ("stage_s", "dropped_tokens")
    return isinstance(row, dict) and all(isinstance(row.get(name), dict) for name in inner)


def _first_rowid(connection: sqlite3.Connection, since_s: float) -> int:
    """Where the trajectories begin that left the engine since a moment.

    Transfers are in the order of time, and a trajectory's record is made with its first transfer.
    """
    if since_s <= 0.0:
        return 0
    at_s = "SELECT at_s FROM transfers WHERE id >= ? ORDER BY id LIMIT 1"
    last_id = one(connection, "SELECT COALESCE(MAX(id), 0) FROM transfers")
    query = (
        "SELECT t.rowid FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id "
        "WHERE x.id >= ? AND x.debit = 'in_flight' ORDER BY x.id LIMIT 1"
    )
    earlier = bisect_left(range(1, last_id + 1), since_s, key=lambda id: one(connection, at_s, id))
    found = one(connection, query, 1 + earlier)
    return _last_rowid(connection) + 1 if found is None else int(found)


def _last_rowid(connection: sqlite3.Connection) -> int:
    return int(one(connection, "SELECT COALESCE(MAX(rowid), 0) FROM trajectories"))

"""A run's tables by column, as numpy arrays: rows, spans and trajectories.

Ten thousand rows take a tenth of a second this way; a record for each would take four. In a column
of numbers NaN stands for what is not known, in a column of texts the empty text.
"""

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME, explained, open_database
from headrace.types import BoolArray

Numbers = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Intervals = tuple[Numbers, Numbers]  # starts and ends
Columns = npt.NDArray[Any]
"""Records: `spans["start_s"]` is a column, `spans[spans["stage"] == "train"]` are some of them."""

_TEXTS = {"stage", "worker", "detail", "finish", "drop_reason"}
_ROW = "step, wall_s, generated_tokens, trained_tokens, data"
_SQL = Path(__file__).with_name("columns.sql").read_text(encoding="utf-8")
_SPANS, _TRAJECTORIES, _LEFT_ENGINE = _SQL.split(";")


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


def query(connection: sqlite3.Connection, sql: str, *values: Any) -> Columns:
    """What a statement finds, by column."""
    cursor = connection.execute(sql, values)
    names = [name for name, *_ in cursor.description]
    columns = list(zip(*cursor, strict=True)) or [()] * len(names)
    arrays = [
        np.array([t or "" for t in column], np.str_) if name in _TEXTS else np.array(column, np.float64)
        for name, column in zip(names, columns, strict=True)
    ]
    return np.rec.fromarrays(arrays, names=names, formats=None)


def read_spans(
    connection: sqlite3.Connection,
    *,
    stage: str | None = None,
    after_rowid: int = 0,
    since_s: float = -np.inf,
    newest: int = -1,
) -> Columns:
    """Spans as they were booked, of one `stage` or of all; `newest` of them, if not -1."""
    by = "end_s" if since_s > -np.inf else "rowid"  # either way there is an index to go along
    found = query(connection, _SPANS.format(by=by), after_rowid, since_s, stage, newest)
    return found[np.argsort(found["rowid"], kind="stable")]


def read_trajectories(connection: sqlite3.Connection, *, since_s: float = 0.0, newest: int = -1) -> Columns:
    """Trajectories in the order they were booked; only `newest` of them, if not -1."""
    last = one(connection, "SELECT COALESCE(MAX(rowid), 0) FROM trajectories")
    first = last - newest + 1 if newest >= 0 else 0
    if since_s > 0.0:  # a record is made with its first transfer, and those are in order of time
        left = one(connection, _LEFT_ENGINE, since_s)
        first = max(first, last + 1 if left is None else left)
    return query(connection, _TRAJECTORIES, first)


class RowColumns:
    """The rows of consecutive steps by column. `damaged` marks those that cannot be read.

    Such a row is an error if `strict`, else only its columns of the table are known.
    """

    def __init__(self, connection: sqlite3.Connection, *, after_step: int = 0, strict: bool = True) -> None:
        names = _ROW.split(", ")[:-1]
        sql = f"SELECT {_ROW} FROM rows WHERE step > ? ORDER BY step"
        found = connection.execute(sql, (after_step,)).fetchall()
        parsed = [_parsed(data) for *_, data in found]
        self.damaged: BoolArray = np.array([row is None for row in parsed], np.bool_)
        for i in np.flatnonzero(self.damaged):
            if strict:
                raise RunError(f"the ledger's rows are damaged: step {found[i][0]} cannot be read")
            parsed[i] = dict(zip(names, found[i], strict=False))
        self._rows: Sequence[Mapping[str, Any]] = parsed

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Numbers:
        """One number of every row, by its name in `Row`; `stage_s.rollout` etc. are seconds."""
        outer, _, inner = name.partition(".")
        values = [row.get(outer) for row in self._rows]
        if inner:
            values = [value.get(inner) if value else None for value in values]
        return np.array(values, np.float64)  # None becomes NaN, and the text "Infinity" a number

    def dropped_tokens(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for row in self._rows:
            total.update(row.get("dropped_tokens", {}))
        return dict(total)


def read_steps(connection: sqlite3.Connection, rows: RowColumns) -> Columns:
    """When steps began and ended, on the run's clock; their spans come after `after_rowid`.

    A step ends with its publish span; a row without one is left out. A step that a restart took
    again was published again; the first time is the one of its row. Between two steps there may be
    an evaluation, which belongs to neither.
    """
    found, steps = read_spans(connection, stage="publish"), rows.column("step")
    begins = np.flatnonzero(np.diff(found["version"], prepend=np.nan))  # one may have several spans
    published, first = np.unique(found["version"][begins], return_index=True)
    last = found[(np.append(begins[1:], len(found)) - 1)[first]]
    known = np.isin(steps, published)
    steps, wall_s = steps[known], rows.column("wall_s")[known]
    place = np.searchsorted(published, steps)
    rowids, ends_s = last["rowid"][place], np.maximum.accumulate(last["end_s"][place])
    starts_s = np.clip(ends_s - wall_s, np.append(0.0, ends_s)[:-1], ends_s)
    is_before = (published == steps[:1] - 1) & (last["rowid"] < rowids[:1])
    before = last["rowid"][is_before].sum()  # one at most; 0: there is none
    types = [("start_s", np.float64), ("end_s", np.float64), ("step", np.int64), ("after_rowid", np.int64)]
    return np.rec.fromarrays([starts_s, ends_s, steps, np.append(before, rowids)[:-1]], dtype=types)


def mean(values: Numbers) -> float | None:
    """Of those that are known, if any is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def overlaps(*parts: Intervals) -> tuple[Numbers, Numbers]:
    """The moments at which an interval begins or ends, in order, and how many last from each on."""
    starts, ends = (np.concatenate(side) for side in zip(*parts, strict=True))
    moments = np.concatenate([starts, ends])
    order = np.argsort(moments, kind="stable")  # beginnings come before ends at one moment
    return moments[order], np.cumsum(np.where(order < len(starts), 1.0, -1.0))


def union(intervals: Intervals) -> Intervals:
    """The same moments in intervals that do not touch, in order."""
    moments, lasting = overlaps(intervals)
    return moments[np.roll(lasting == 0, 1)], moments[lasting == 0]


def elapsed_s(at_s: npt.ArrayLike, *parts: Intervals, at_once: int = 1) -> Numbers:
    """Seconds in the intervals that had gone by at each moment, counted as in `covered_s`."""
    moments, lasting = (np.insert(values, 0, 0.0) for values in overlaps(*parts))
    gone_s = np.cumsum(np.diff(moments) * np.minimum(lasting, at_once)[:-1])
    found: Numbers = np.interp(np.asarray(at_s, float), moments, np.insert(gone_s, 0, 0.0))
    return found


def covered_s(*parts: Intervals, at_once: int = 1) -> float:
    """Seconds in the intervals; where they overlap, no more than `at_once` of them count."""
    return float(elapsed_s(np.inf, *parts, at_once=at_once))


def by_group(answers: Columns) -> tuple[Columns, Ints]:
    """The answers group by group, as they finished, and the index of each group's first."""
    ordered = answers[np.lexsort((answers["finished_s"], answers["attempt"], answers["serial"]))]
    changes = np.diff([ordered["serial"], ordered["attempt"]], prepend=-1)
    return ordered, np.flatnonzero(changes.any(axis=0))


def _parsed(data: Any) -> Any:
    """The row that a text holds; None if it holds no row."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        row = json.loads(data)
        if isinstance(row["stage_s"], dict) and isinstance(row["dropped_tokens"], dict):
            return row
    return None

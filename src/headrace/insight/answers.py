"""Every complete answer of some steps, by column: lengths, times and rewards, for distributions over them."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from headrace.insight.occupancy import StepTimes
from headrace.insight.step_rows import Numbers
from headrace.types import FinishReason

MOST_ANSWERS = 200_000  # of a longer run the newest
TAIL_SHARE = 0.05  # of a step's answers: the last ones, that the others have to wait for
_COMPLETE = [str(reason) for reason in FinishReason if reason is not FinishReason.ABORT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One entry per answer, in the order they were booked; NaN where a number is not known.

    An answer that was ended before its time is not here: its length says nothing about how long answers are.

    Example:
        Answers(num_tokens=[212, 80], group=[40.001, 40.001], reward=[1, 0], finished_s=[4.0, 2.2], scored_s=[4.1, 2.3])
    """

    num_tokens: Numbers  # [A]
    group: Numbers  # [A] the same number for answers of one attempt at a prompt
    reward: Numbers  # [A]
    finished_s: Numbers  # [A]
    scored_s: Numbers  # [A]

    @classmethod
    def read(cls, connection: sqlite3.Connection, *, since_s: float = 0.0) -> Answers:
        """Those booked since a moment, or the newest of them if they are very many."""
        first = max(_first_rowid(connection, since_s), _last_rowid(connection) - MOST_ANSWERS + 1)
        rows = connection.execute(
            "SELECT num_tokens, serial + attempt / 1000.0, reward, finished_s, scored_s FROM trajectories "
            f"WHERE rowid >= ? AND finish IN ({', '.join('?' * len(_COMPLETE))}) ORDER BY rowid",
            (first, *_COMPLETE),
        ).fetchall()
        columns = zip(*rows, strict=True) if rows else ((),) * len(fields(cls))
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.array(column, np.float64) for name, column in zip(names, columns, strict=True)})

    @property
    def scored(self) -> npt.NDArray[np.bool_]:
        """[A] whether there is a verdict."""
        return np.isfinite(self.reward)

    def signal(self) -> npt.NDArray[np.bool_]:
        """[G] whether the rewards of a group differ, of those with at least two verdicts."""
        known = self.scored
        rewards, group = self.reward[known], self.group[known]
        several = _of_groups(np.ones(len(group)), group, np.add) > 1
        high, low = _of_groups(rewards, group, np.maximum), _of_groups(rewards, group, np.minimum)
        found: npt.NDArray[np.bool_] = (high > low)[several]
        return found

    def tails_s(self, times: StepTimes) -> Numbers:
        """Of each step the seconds between the end of all but its last answers and the end of its very last.

        The last are one in twenty, and at least one. A step's answers are those that finished in it.
        """
        known = np.isfinite(self.finished_s) & (self.finished_s > times.starts_s[0])
        finished_s = np.sort(self.finished_s[known])
        ends = np.searchsorted(finished_s, times.ends_s, side="right")
        begins = np.searchsorted(finished_s, times.starts_s, side="right")
        counts = ends - begins
        several = counts >= 2
        num_tail = np.maximum(1, np.floor(TAIL_SHARE * counts)).astype(np.int64)
        last, before = ends[several] - 1, ends[several] - 1 - num_tail[several]
        tails: Numbers = finished_s[last] - finished_s[before]
        return tails


def _of_groups(values: Numbers, group: Numbers, combine: np.ufunc) -> Numbers:
    """[G] the values of each group, combined."""
    known = np.isfinite(group)
    order = np.argsort(group[known], kind="stable")
    values, group = values[known][order], group[known][order]
    if not len(group):
        return np.zeros(0)
    begins = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    combined: Numbers = combine.reduceat(values, begins)
    return combined


def _first_rowid(connection: sqlite3.Connection, since_s: float) -> int:
    """Where the trajectories begin that left the engine since a moment.

    Transfers are in the order of time, and a trajectory's record is made with its first: no need to look at them all.
    """
    if since_s <= 0.0:
        return 0

    def at_s(id: int) -> float:
        found = connection.execute("SELECT at_s FROM transfers WHERE id >= ? ORDER BY id LIMIT 1", (id,)).fetchone()
        return float(found[0])

    (num,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM transfers").fetchone()
    first_id = 1 + bisect_left(range(1, num + 1), since_s, key=at_s)
    found = connection.execute(
        "SELECT t.rowid FROM transfers x JOIN trajectories t ON t.id = x.trajectory_id "
        "WHERE x.id >= ? AND x.debit = 'in_flight' ORDER BY x.id LIMIT 1",
        (first_id,),
    ).fetchone()
    return int(found[0]) if found else _last_rowid(connection) + 1


def _last_rowid(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute("SELECT COALESCE(MAX(rowid), 0) FROM trajectories").fetchone()
    return int(last)

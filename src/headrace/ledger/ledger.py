"""The run's books: every token and trajectory is in exactly one account, and moves by transfers that stay for ever.

The writer belongs to one thread. A call that would break the books (training what is not buffered, say) raises
sqlite3.IntegrityError and changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from headrace.ledger.clock import StageClock, StageSpan
from headrace.ledger.database import FILE_NAME, close_database, create_database, explain, open_database, transaction
from headrace.ledger.row_json import plain, row_from_json, row_to_json
from headrace.ledger.schema import DROPPED, SOURCE
from headrace.types import Drop, Group, Row, Trajectory

_TRAJECTORY_COLUMNS = (
    "id, prompt_id, serial, idx, num_tokens, num_prompt_tokens, reward, reward_parts, finish, spans, oldest_version, "
    "submitted_s, started_s, finished_s, scored_s, state, drop_reason, lag"
)
_INSERT_TRAJECTORY = (
    f"INSERT INTO trajectories ({_TRAJECTORY_COLUMNS}) VALUES ({', '.join('?' * (_TRAJECTORY_COLUMNS.count(',') + 1))})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What one account holds.

    Example:
        Amount(tokens=4096, trajectories=128)
    """

    tokens: int = 0
    trajectories: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """All accounts at one moment: generated = trained + dropped + buffered + in flight.

    Example:
        Books(generated=Amount(tokens=900, trajectories=10), trained=Amount(tokens=700, trajectories=8),
            dropped={"stale": Amount(tokens=200, trajectories=2)}, buffered=Amount(), in_flight=Amount())
    """

    generated: Amount
    trained: Amount
    buffered: Amount
    in_flight: Amount
    dropped: Mapping[str, Amount] = field(default_factory=dict)

    @property
    def backlog_tokens(self) -> int:
        """Tokens paid for and not yet decided on: buffered and in flight."""
        return self.buffered.tokens + self.in_flight.tokens

    @property
    def balanced(self) -> bool:
        """Whether what was generated is accounted for, in tokens and in trajectories."""
        parts = [self.trained, self.buffered, self.in_flight, *self.dropped.values()]
        tokens, trajectories = sum(part.tokens for part in parts), sum(part.trajectories for part in parts)
        return self.generated == Amount(tokens=tokens, trajectories=trajectories)


class Ledger:
    """The front door to a run's database: one writer, and any number of readers while it writes."""

    def __init__(self, connection: sqlite3.Connection, path: Path, clock: StageClock | None) -> None:
        self._connection = connection
        self._path = path
        self._clock = clock
        self._step = 1  # the step whose row comes next: what is booked now belongs to it

    @classmethod
    def create(cls, run_dir: Path, *, clock: StageClock | None = None) -> Ledger:
        """Make the ledger of a new run; `clock` stamps the transfers."""
        return cls(create_database(run_dir), run_dir / FILE_NAME, clock or StageClock())

    @classmethod
    def open(cls, run_dir: Path) -> Ledger:
        """Open a run's ledger for reading, also while the run goes on."""
        return cls(open_database(run_dir), run_dir / FILE_NAME, None)

    def close(self) -> None:
        """Bring everything into the one file and close it."""
        if self._clock is None:
            self._connection.close()
        else:
            close_database(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What happens to tokens and trajectories, in the order of their life.

    def started(self, num_trajectories: int) -> None:
        """So many trajectories began to be generated."""
        with self._write():
            self._transfer(SOURCE, "in_flight", 0, num_trajectories)

    def sampled(self, num_tokens: int) -> None:
        """So many tokens were sampled for trajectories in flight."""
        with self._write():
            self._transfer(SOURCE, "in_flight", num_tokens, 0)

    def buffered(self, group: Group) -> None:
        """A group is complete and scored, and waits in the buffer."""
        with self._write():
            for trajectory in group.trajectories:
                record = _record(trajectory, group.serial, "buffered")
                self._connection.execute(_INSERT_TRAJECTORY, record)
                self._transfer("in_flight", "buffered", trajectory.num_sampled_tokens, 1, trajectory.id)

    def trained(self, group: Group, *, step: int, lag_of: Callable[[Trajectory], int]) -> None:
        """A buffered group was trained on in `step`."""
        with self._write():
            for trajectory in group.trajectories:
                lag = int(lag_of(trajectory))
                self._transfer(
                    "buffered", "trained", trajectory.num_sampled_tokens, 1, trajectory.id, lag=lag, step=step
                )
                self._connection.execute(
                    "UPDATE trajectories SET state = 'trained', lag = ?, trained_step = ? WHERE id = ?",
                    (lag, step, trajectory.id),
                )

    def dropped(
        self,
        drops: Sequence[Drop],
        *,
        source: Literal["in_flight", "buffered"],
        trajectories: Sequence[Trajectory] = (),
    ) -> None:
        """Trajectories that will not be trained on; give the records of those that were finished but never buffered."""
        records = {trajectory.id: trajectory for trajectory in trajectories}
        with self._write():
            for drop in drops:
                account, lag = f"{DROPPED}{drop.reason}", int(drop.lag)
                if source == "in_flight":
                    record = _dropped_record(drop, records.get(drop.trajectory_id))
                    self._connection.execute(_INSERT_TRAJECTORY, record)
                self._transfer(source, account, drop.num_tokens, 1, drop.trajectory_id, lag=lag)
                if source == "buffered":
                    self._connection.execute(
                        "UPDATE trajectories SET state = 'dropped', drop_reason = ?, lag = ? WHERE id = ?",
                        (str(drop.reason), lag, drop.trajectory_id),
                    )

    def spans(self, spans: Iterable[StageSpan]) -> None:
        """Book what `StageClock.drain` gave."""
        records = [(span.stage, span.worker, span.version, span.start_s, span.end_s, span.detail) for span in spans]
        with self._write():
            self._connection.executemany(
                "INSERT INTO spans (stage, worker, version, start_s, end_s, detail) VALUES (?, ?, ?, ?, ?, ?)", records
            )

    def row(self, row: Row) -> None:
        """Close a step: the row counts everything booked up to this call, and what follows belongs to the next step."""
        columns = (
            int(row.step),
            int(row.version),
            float(row.wall_s),
            int(row.generated_tokens),
            int(row.trained_tokens),
            int(row.backlog_tokens),
            float(row.reward_mean),
            int(row.lag_max),
            None if row.score is None else float(row.score),
            row_to_json(row),
        )
        with self._write():
            self._connection.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", columns)
        self._step = int(row.step) + 1

    # What readers ask.

    def balance(self) -> dict[str, tuple[int, int]]:
        """Tokens and trajectories per account, as booked: `generated` is below zero and all add up to zero."""
        accounts = self._read("SELECT name, tokens, trajectories FROM accounts ORDER BY name")
        return {name: (tokens, trajectories) for name, tokens, trajectories in accounts}

    def totals(self) -> Books:
        """All accounts, with what was generated as a positive amount."""
        balance = {name: Amount(tokens=held[0], trajectories=held[1]) for name, held in self.balance().items()}
        source = balance[SOURCE]
        return Books(
            generated=Amount(tokens=-source.tokens, trajectories=-source.trajectories),
            trained=balance["trained"],
            buffered=balance["buffered"],
            in_flight=balance["in_flight"],
            dropped={name.removeprefix(DROPPED): held for name, held in balance.items() if name.startswith(DROPPED)},
        )

    def dropped_tokens(self) -> dict[str, int]:
        """Tokens dropped so far, by reason."""
        return {reason: amount.tokens for reason, amount in self.totals().dropped.items()}

    def rows(self, *, after_step: int = -1) -> list[Row]:
        """The rows, complete and in order; `after_step` asks for the newer ones only."""
        found = self._read("SELECT data FROM rows WHERE step > ? ORDER BY step", (after_step,))
        return [row_from_json(text) for (text,) in found]

    def drops(self) -> list[Drop]:
        """Every drop with its reason, length, lag and reward."""
        found = self._read("SELECT trajectory_id, prompt_id, reason, num_tokens, lag, reward FROM drops")
        names = ("trajectory_id", "prompt_id", "reason", "num_tokens", "lag", "reward")
        return [Drop(**dict(zip(names, values, strict=True))) for values in found]

    def spans_between(self, start_s: float, end_s: float) -> list[StageSpan]:
        """The booked spans that touch the interval, whole."""
        found = self._read(
            "SELECT stage, start_s, end_s, worker, version, detail FROM spans "
            "WHERE end_s >= ? AND start_s <= ? ORDER BY start_s, id",
            (start_s, end_s),
        )
        names = ("stage", "start_s", "end_s", "worker", "version", "detail")
        return [StageSpan(**dict(zip(names, values, strict=True))) for values in found]

    def _write(self) -> AbstractContextManager[None]:
        return transaction(self._connection, self._path)

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.ProgrammingError:
            raise  # our mistake, not the user's
        except sqlite3.DatabaseError as error:
            raise explain(error, self._path) from error

    def _transfer(
        self,
        debit: str,
        credit: str,
        num_tokens: int,
        num_trajectories: int,
        trajectory_id: str | None = None,
        *,
        lag: int | None = None,
        step: int | None = None,
    ) -> None:
        at_s = self._clock.now() if self._clock else 0.0
        step = self._step if step is None else int(step)
        self._connection.execute(
            "INSERT INTO transfers (at_s, step, debit, credit, tokens, trajectories, trajectory_id, lag) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (at_s, step, debit, credit, int(num_tokens), int(num_trajectories), trajectory_id, lag),
        )


def _record(
    trajectory: Trajectory, serial: int | None, state: str, reason: str | None = None, lag: int | None = None
) -> tuple[Any, ...]:
    """The columns of a finished trajectory."""
    sampled, timing = trajectory.sampled, trajectory.timing
    num_prompt_tokens = int(np.argmax(sampled)) if sampled.any() else len(sampled)
    return (
        trajectory.id,
        trajectory.prompt_id,
        serial,
        int(trajectory.index),
        trajectory.num_sampled_tokens,
        num_prompt_tokens,
        None if trajectory.reward is None else float(trajectory.reward),
        json.dumps(plain(trajectory.reward_parts), allow_nan=False),
        str(trajectory.finish),
        json.dumps([[int(span.version), int(span.start), int(span.end)] for span in trajectory.spans]),
        int(trajectory.oldest_version) if trajectory.spans else None,
        timing.submitted_s,
        timing.started_s,
        timing.finished_s,
        timing.scored_s,
        state,
        reason,
        lag,
    )


def _dropped_record(drop: Drop, trajectory: Trajectory | None) -> tuple[Any, ...]:
    """The columns of a trajectory that never reached the buffer; of an aborted one only what the drop says is known."""
    reason, lag = str(drop.reason), int(drop.lag)
    if trajectory is not None:
        return _record(trajectory, None, "dropped", reason, lag)
    reward = None if drop.reward is None else float(drop.reward)
    known = (drop.trajectory_id, drop.prompt_id, None, None, int(drop.num_tokens), None, reward)
    return (*known, "{}", None, "[]", None, None, None, None, None, "dropped", reason, lag)

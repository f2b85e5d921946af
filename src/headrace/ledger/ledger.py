"""The run's books: every token and trajectory is in exactly one account, and moves by transfers that stay for ever.

The writer belongs to one thread. A call that would break the books (training what is not buffered, say) raises
sqlite3.IntegrityError and changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from headrace.errors import RunError
from headrace.ledger.clock import StageClock
from headrace.ledger.columns import INSERT, dropped_record, record
from headrace.ledger.database import (
    FILE_NAME,
    close_database,
    create_database,
    explain,
    open_database,
    reopen_database,
    transaction,
)
from headrace.ledger.journal import (
    Restart,
    encode,
    prune,
    read_partials,
    read_trajectories,
    read_verdicts,
    write_partials,
    write_verdicts,
)
from headrace.ledger.row_json import row_from_json, row_to_json
from headrace.ledger.schema import DROPPED, SOURCE
from headrace.types import Attempt, Drop, DropReason, FinishReason, Group, Row, Score, StageSpan, Trajectory


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

    @classmethod
    def of(cls, balance: Mapping[str, tuple[int, int]]) -> Books:
        """From the tokens and trajectories of each account, as booked."""
        held = {name: Amount(tokens=tokens, trajectories=number) for name, (tokens, number) in balance.items()}
        source = held[SOURCE]
        return cls(
            generated=Amount(tokens=-source.tokens, trajectories=-source.trajectories),
            trained=held["trained"],
            buffered=held["buffered"],
            in_flight=held["in_flight"],
            dropped={name.removeprefix(DROPPED): amount for name, amount in held.items() if name.startswith(DROPPED)},
        )

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
        self._together = False
        self._verdicts: dict[bytes, Score] = {}  # not written yet

    @classmethod
    def create(cls, run_dir: Path, *, clock: StageClock | None = None) -> Ledger:
        """Make the ledger of a new run; `clock` stamps the transfers."""
        return cls(create_database(run_dir), run_dir / FILE_NAME, clock or StageClock())

    @classmethod
    def reopen(cls, run_dir: Path) -> Ledger:
        """Go on with the ledger of a run that ended too soon; its clock goes on too."""
        connection = reopen_database(run_dir)
        (end_s,) = connection.execute(
            "SELECT MAX(s) FROM (SELECT MAX(at_s) AS s FROM transfers UNION SELECT MAX(end_s) FROM spans "
            "UNION SELECT MAX(at_s) FROM restarts)"
        ).fetchone()
        ledger = cls(connection, run_dir / FILE_NAME, StageClock(start_s=end_s or 0.0))
        (last_step,) = connection.execute("SELECT MAX(step) FROM rows").fetchone()
        ledger._step = (last_step or 0) + 1
        return ledger

    @classmethod
    def open(cls, run_dir: Path) -> Ledger:
        """Open a run's ledger for reading, also while the run goes on."""
        return cls(open_database(run_dir), run_dir / FILE_NAME, None)

    def close(self) -> None:
        """Bring everything into the one file and close it."""
        if self._clock is None:
            self._connection.close()
            return
        if self._verdicts:
            with suppress(RunError), self._write():  # on a full disk they are asked for again
                pass
        close_database(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Everything that is written inside is written at once, or not at all. Nothing may be awaited inside."""
        with self._write():
            self._together = True
            try:
                yield
            finally:
                self._together = False

    # What happens to tokens and trajectories, in the order of their life.

    def started(self, num_trajectories: int, attempt: Attempt | None = None) -> None:
        """So many trajectories of an attempt began to be generated."""
        with self._write():
            self._transfer(SOURCE, "in_flight", 0, num_trajectories)
            if attempt is not None:
                self._open(attempt)

    def closed(self, serial: int, number: int) -> None:
        """Nothing more comes of an attempt."""
        with self._write():
            self._close(serial, number)

    def sampled(self, num_tokens: int) -> None:
        """So many tokens were sampled for trajectories in flight."""
        with self._write():
            self._transfer(SOURCE, "in_flight", num_tokens, 0)

    def buffered(self, group: Group) -> None:
        """A group is complete and scored, and waits in the buffer: from here on a crash does not lose it.

        What comes of an attempt that a restart has replaced is refused.
        """
        with self._write():
            self._close(group.serial, group.attempt)
            for trajectory in group.trajectories:
                columns = record(trajectory, (group.serial, group.attempt), "buffered")
                self._connection.execute(INSERT, columns)
                self._transfer("in_flight", "buffered", trajectory.num_sampled_tokens, 1, trajectory.id)
                self._connection.execute("INSERT INTO journal VALUES (?, ?)", (trajectory.id, encode(trajectory)))

    def step_begins(self, step: int, groups: Sequence[Group]) -> None:
        """The weights are about to change: should the process die, a restart takes this step again."""
        named = json.dumps([[int(group.serial), int(group.attempt)] for group in groups])
        with self._write():
            self._connection.execute("INSERT INTO steps VALUES (?, ?)", (int(step), named))

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
        of: tuple[int, int] | None = None,
    ) -> None:
        """Trajectories that will not be trained on; give the records of those that were finished but never buffered.

        `of` is the serial and the attempt of their group. What an earlier attempt was dropped for already is booked as
        redone: it was generated again only because a restart had to.
        """
        records = {trajectory.id: trajectory for trajectory in trajectories}
        with self._write():
            if of is not None and source == "in_flight":
                self._check_open(*of)
            for drop in drops:
                if source == "in_flight" and self._dropped_before(records.get(drop.trajectory_id), of):
                    drop = replace(drop, reason=DropReason.REDONE)
                account, lag = f"{DROPPED}{drop.reason}", int(drop.lag)
                if source == "in_flight":
                    columns = dropped_record(drop, records.get(drop.trajectory_id), of)
                    self._connection.execute(INSERT, columns)
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

    # What a restart does.

    def lose(self, redo: Sequence[Attempt], reason: DropReason) -> Amount:
        """What was in flight is gone with the process, and so are these attempts, whatever came of them by now."""
        held = self.totals().in_flight
        with self._write():
            if held != Amount():
                self._transfer("in_flight", f"{DROPPED}{reason}", held.tokens, held.trajectories)
            self._connection.execute("UPDATE attempts SET state = ? WHERE state = 'open'", (str(reason),))
            for attempt in redo:
                key = (attempt.serial, attempt.number)
                sql = "SELECT id, num_tokens FROM trajectories WHERE serial = ? AND attempt = ? AND state = 'buffered'"
                for id, num_tokens in self._read(sql, key):
                    self._transfer("buffered", f"{DROPPED}{reason}", num_tokens, 1, id, lag=0)
                    self._connection.execute(
                        "UPDATE trajectories SET state = 'dropped', drop_reason = ?, lag = 0 WHERE id = ?",
                        (str(reason), id),
                    )
                self._mark(*key, reason)
        return held

    def carry_on(self, attempts: Sequence[Attempt], kept_tokens: int) -> Amount:
        """These are gone on with under another number, from so many tokens in all; what they sampled since is lost."""
        lost = self.totals().in_flight.tokens - kept_tokens
        with self._write():
            if lost:
                self._transfer("in_flight", f"{DROPPED}{DropReason.REDONE}", lost, 0)
            for a in attempts:
                self._mark(a.serial, a.number, DropReason.REDONE)
                gone = self._read("SELECT id FROM trajectories WHERE serial = ? AND attempt = ?", (a.serial, a.number))
                self._transfer(SOURCE, "in_flight", 0, len(gone))  # dropped by now: generated again with the others
                self._open(replace(a, number=a.number + 1))
        return Amount(tokens=lost)

    def redone(self, num_tokens: int) -> None:
        """So many tokens in flight went with the worker that sampled them; another samples those answers again."""
        with self._write():
            self._transfer("in_flight", f"{DROPPED}{DropReason.REDONE}", num_tokens, 0)

    def keep_partials(self, partials: Mapping[int, Mapping[int, Trajectory]]) -> None:
        """By serial and index: what a restart can go on from."""
        with self._write():
            write_partials(self._connection, partials)

    def partials(self, serial: int) -> dict[int, Trajectory]:
        """By index, what was kept of a group under way, without answers that were dropped since."""
        return read_partials(self._connection, serial)

    def judged(self, key: bytes, score: Score) -> None:
        """What the reward function said of an answer, by a digest of what it saw. Kept with whatever is booked next."""
        self._verdicts[key] = score

    def verdicts(self) -> dict[bytes, Score]:
        """What `judged` was told."""
        return read_verdicts(self._connection)

    def prune(self, *, before: int, max_verdicts: int) -> None:
        """Forget the tokens of older steps; the accounts, the rows and every trajectory's facts stay."""
        with self._write():
            prune(self._connection, before, max_verdicts)

    def restarted(self, restart: Restart) -> None:
        """A restart is complete, and the run goes on."""
        with self._write():
            self._connection.execute("INSERT INTO restarts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(restart))

    def remember(self, key: str, value: str) -> None:
        """A fact of the run that a restart could not measure again."""
        with self._write():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"run:{key}", value))

    def sync(self) -> None:
        """Everything booked so far outlasts a power failure, too."""
        self._read("PRAGMA wal_checkpoint(FULL)")

    # What readers ask.

    @property
    def run_dir(self) -> Path:
        """Where the run is."""
        return self._path.parent

    @property
    def clock(self) -> StageClock:
        """Stamps the transfers."""
        assert self._clock is not None
        return self._clock

    def remembered(self) -> dict[str, str]:
        """What `remember` was told."""
        return {k.removeprefix("run:"): v for k, v in self._read("SELECT key, value FROM meta") if k.startswith("run:")}

    def attempts(self, *, state: str | None = None, wave: int | None = None) -> list[Attempt]:
        """All attempts, or those in this state or of this wave, in the order they were started."""
        names = ("serial", "number", "prompt_id", "wave", "version")
        found = self._read(
            f"SELECT {', '.join(names)} FROM attempts WHERE state = COALESCE(?, state) AND wave = COALESCE(?, wave) "
            "ORDER BY wave, serial",
            (state, wave),
        )
        return [Attempt(**dict(zip(names, values, strict=True))) for values in found]

    def buffered_groups(self) -> list[tuple[int, int]]:
        """Serial and attempt of every group that waits to be trained on."""
        return self._read("SELECT DISTINCT serial, attempt FROM trajectories WHERE state = 'buffered' ORDER BY serial")

    def trajectories(self, serial: int, attempt: int) -> list[Trajectory]:
        """What reached the buffer of an attempt, whole."""
        return read_trajectories(self._connection, "t.serial = ? AND t.attempt = ?", (serial, attempt))

    def steps_after(self, step: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """The steps that were begun after this one, each with the serials and attempts it trains on."""
        found = self._read("SELECT step, groups FROM steps WHERE step > ? ORDER BY step", (step,))
        return [(number, [(serial, attempt) for serial, attempt in json.loads(groups)]) for number, groups in found]

    def scored_since_row(self) -> list[tuple[float, int, bool]]:
        """Reward, tokens and whether it was cut, of what was scored since the last row and is not to be done again."""
        found = self._read(
            "SELECT t.reward, t.num_tokens, t.finish FROM trajectories t JOIN transfers x ON x.trajectory_id = t.id "
            "WHERE x.debit = 'in_flight' AND x.step = ? AND t.reward IS NOT NULL AND NOT EXISTS "
            "(SELECT 1 FROM attempts a WHERE a.serial = t.serial AND a.number = t.attempt AND a.state = 'redone')",
            (self._step,),
        )
        return [(reward, num_tokens, FinishReason(finish).cut) for reward, num_tokens, finish in found]

    def restarts(self) -> list[Restart]:
        """All restarts of the run."""
        names = [field.name for field in fields(Restart)]
        found = self._read(f"SELECT {', '.join(names)} FROM restarts ORDER BY number")
        return [Restart(**dict(zip(names, values, strict=True))) for values in found]

    def balance(self) -> dict[str, tuple[int, int]]:
        """Tokens and trajectories per account, as booked: `generated` is below zero and all add up to zero."""
        accounts = self._read("SELECT name, tokens, trajectories FROM accounts ORDER BY name")
        return {name: (tokens, trajectories) for name, tokens, trajectories in accounts}

    def totals(self) -> Books:
        """All accounts, with what was generated as a positive amount."""
        return Books.of(self.balance())

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
        return nullcontext() if self._together else self._transaction()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with transaction(self._connection, self._path):
            if self._verdicts:
                write_verdicts(self._connection, self._verdicts)
            yield
        self._verdicts.clear()

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.ProgrammingError:
            raise  # our mistake, not the user's
        except sqlite3.DatabaseError as error:
            raise explain(error, self._path) from error

    def _dropped_before(self, trajectory: Trajectory | None, of: tuple[int, int] | None) -> bool:
        """Whether an earlier attempt at this trajectory came to an end of its own, and was dropped."""
        if trajectory is None or of is None or of[1] == 1:
            return False
        query = (
            "SELECT 1 FROM trajectories WHERE serial = ? AND attempt < ? AND idx = ? AND state = 'dropped' "
            "AND drop_reason NOT IN ('redone', 'crashed', 'run_ended')"
        )
        return self._connection.execute(query, (*of, int(trajectory.index))).fetchone() is not None

    def _open(self, a: Attempt) -> None:
        values = (a.serial, a.number, a.prompt_id, a.wave, a.version)
        self._connection.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, 'open')", values)

    def _check_open(self, serial: int, number: int) -> None:
        """Refuse what comes of an attempt that is over already, because a restart replaced it."""
        found = self._connection.execute("SELECT number, state FROM attempts WHERE serial = ?", (serial,)).fetchall()
        if found and (number, "open") not in found:
            raise sqlite3.IntegrityError(f"attempt {number} at group {serial} is over: {dict(found)}")

    def _close(self, serial: int, number: int) -> None:
        self._check_open(serial, number)
        self._mark(serial, number, "closed")

    def _mark(self, serial: int, number: int, state: str) -> None:
        query = "UPDATE attempts SET state = ? WHERE serial = ? AND number = ?"
        self._connection.execute(query, (str(state), int(serial), int(number)))

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

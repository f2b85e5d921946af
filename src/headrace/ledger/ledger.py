"""The run's books (double-entry): every token is in one account, and moves by transfers.

Transfers are never changed or deleted. The writer belongs to one thread. A call that would break
the books (training what is not buffered, for example) raises sqlite3.IntegrityError and changes
nothing. `recovery.py` is what a restart does with them.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from headrace.errors import RunError
from headrace.ledger import database, digests, journal
from headrace.ledger.database import DROPPED, SOURCE
from headrace.ledger.digests import Digests
from headrace.measured import Row, StageClock, StageSpan
from headrace.types import Attempt, DropReason, FinishReason, Group, Outcomes, Prompt, Score, Trajectory

# the newest transfer of the steps before one
LAST = "COALESCE((SELECT id FROM transfers WHERE step < ? ORDER BY id DESC LIMIT 1), 0)"
PROMPT = "prompt:"  # key of a prompt in the table `meta`
MAX_PROMPT_CHARS = 1 << 16  # with its fields
ROW_COLUMNS = (
    *("step", "version", "wall_s", "generated_tokens", "trained_tokens", "backlog_tokens"),
    *("reward_mean", "lag_max", "score"),
)

Dropped = Sequence[tuple[Trajectory, str]]  # each with its reason


class Amount(NamedTuple):
    """What is in one account."""

    tokens: int = 0
    trajectories: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """All accounts at one moment: generated = trained + dropped + buffered + in flight."""

    generated: Amount
    trained: Amount
    buffered: Amount
    in_flight: Amount
    dropped: Mapping[str, Amount] = field(default_factory=dict)  # by reason, as "stale"

    @property
    def backlog_tokens(self) -> int:
        """Tokens neither trained on nor dropped yet: buffered and in flight."""
        return self.buffered.tokens + self.in_flight.tokens


class Ledger(AbstractContextManager["Ledger"]):
    """The run's database: one writer, and any number of readers while it writes."""

    def __init__(self, connection: sqlite3.Connection, run_dir: Path, clock: StageClock | None) -> None:
        self.connection, self.run_dir, self.clock = connection, run_dir, clock or StageClock()
        self._path = run_dir / database.FILE_NAME
        self._file = self._path.stat().st_ino
        self._digests = None if clock is None else Digests(connection)  # None: it is only read
        self.step = 1  # the step whose row comes next: what is booked now belongs to it
        self._verdicts: dict[bytes, Score] = {}  # not written yet
        self._turns: dict[tuple[int, int], Trajectory] = {}  # by serial and index, not yet stored

    @classmethod
    def create(cls, run_dir: Path, *, clock: StageClock | None = None) -> Self:
        return cls(database.create_database(run_dir), run_dir, clock or StageClock())

    @classmethod
    def reopen(cls, run_dir: Path) -> Self:
        """Continue the ledger of a run that ended too soon, and its clock."""
        connection = database.reopen_database(run_dir)
        (end_s, last_step) = connection.execute(
            "SELECT (SELECT MAX(s) FROM (SELECT MAX(at_s) AS s FROM transfers UNION SELECT MAX(end_s) "
            "FROM spans UNION SELECT MAX(at_s) FROM restarts)), (SELECT MAX(step) FROM rows)"
        ).fetchone()
        ledger = cls(connection, run_dir, StageClock(start_s=end_s or 0.0))
        ledger.step = (last_step or 0) + 1
        return ledger

    @classmethod
    def open(cls, run_dir: Path) -> Self:
        """For reading, also while the run writes it."""
        return cls(database.open_database(run_dir), run_dir, None)

    def close(self) -> None:
        if self._digests is None:
            self.connection.close()
            return
        with suppress(RunError):  # if the disk is full, a restart judges and samples again
            self.flush()
        database.close_database(self.connection)

    def __exit__(self, *_: object) -> None:
        self.close()

    # What happens to tokens and trajectories, in order.

    def started(self, num_trajectories: int, attempt: Attempt | None = None) -> None:
        with self.writing():
            self.transfer(SOURCE, "in_flight", 0, num_trajectories)
            if attempt is not None:
                self.open_attempt(attempt)

    def closed(self, serial: int, number: int) -> None:
        with self.writing() as connection:
            self._check_open(serial, number)
            self.mark_attempt(serial, number, "closed")
            connection.execute("DELETE FROM partials WHERE serial = ?", (int(serial),))

    def sampled(self, num_tokens: int) -> None:
        with self.writing():
            self.transfer(SOURCE, "in_flight", num_tokens, 0)

    def buffered(self, group: Group) -> None:
        """A group is complete, scored and in the buffer: from now on a crash does not lose it.

        A group of an attempt that a restart has replaced is refused.
        """
        with self.writing():
            self.closed(group.serial, group.attempt)
            for t in group.trajectories:
                self._leave_flight(group, t, "buffered", {"state": "buffered"})
            self._ask(group.prompt)

    def step_begins(self, step: int, groups: Sequence[Group]) -> None:
        """The weights are about to change: if the process dies, a restart takes this step again."""
        named = json.dumps([[int(group.serial), int(group.attempt)] for group in groups])
        if not self._path.exists() or self._path.stat().st_ino != self._file:
            # a deleted file can still be written: nobody would notice before the end
            raise database.rescue_database(self.connection, self._path)
        with self.writing():
            self.connection.execute("INSERT INTO steps VALUES (?, ?)", (int(step), named))

    def waits(self, group: Group) -> bool:
        """Whether the group is in the buffer, as the books say: it was not trained on yet."""
        query = "SELECT 1 FROM trajectories WHERE serial = ? AND attempt = ? AND state = 'buffered'"
        return bool(self.read(query, (group.serial, group.attempt)))

    def trained(self, group: Group, *, version: int) -> None:
        """The present step trained on a group, with the policy `version`."""
        query = "UPDATE trajectories SET state = 'trained', lag = ?, trained_step = ? WHERE id = ?"
        with self.writing():
            for t in group.trajectories:
                lag = _lag(t, version)
                self.transfer("buffered", "trained", t.num_sampled_tokens, 1, trajectory_id=t.id, lag=lag)
                self.connection.execute(query, (lag, self.step, t.id))

    def dropped(self, group: Group, drops: Dropped, *, was_buffered: bool, version: int = 0) -> None:
        """Book trajectories of `group` as dropped, with their lag behind `version`.

        If an earlier attempt at the same trajectory was dropped, this one is booked as redone: it
        was generated again only because of a restart.
        """
        lost = "state = 'dropped' AND drop_reason NOT IN ('redone', 'crashed', 'run_ended')"
        before = f"SELECT 1 FROM trajectories WHERE serial = ? AND attempt < ? AND idx = ? AND {lost}"
        with self.writing():
            if was_buffered:
                for t, reason in drops:
                    self.drop_buffered(t.id, t.num_sampled_tokens, reason, _lag(t, version))
                return
            self._check_open(group.serial, group.attempt)
            self._ask(group.prompt)
            for t, reason in drops:
                if group.attempt > 1 and self.read(before, (group.serial, group.attempt, int(t.index))):
                    reason = DropReason.REDONE
                kept = replace(t, replay=None)  # to be read by people: no restart needs it
                of = {"state": "dropped", "drop_reason": str(reason), "lag": _lag(t, version)}
                self._leave_flight(group, kept, f"{DROPPED}{reason}", of)

    def spans(self, spans: Iterable[StageSpan]) -> None:
        with self.writing() as connection:
            for span in spans:
                journal.insert(connection, "spans", asdict(span))

    def row(self, row: Row) -> None:
        """Close a step: the row counts everything booked before this call."""
        values = {name: getattr(row, name) for name in ROW_COLUMNS}
        with self.writing() as connection:
            journal.insert(connection, "rows", values | {"data": journal.row_to_json(row)})
        self.step = row.step + 1

    def redone(self, num_tokens: int) -> None:
        """`num_tokens` in flight were lost with a worker; another worker samples them again."""
        with self.writing():
            self.transfer("in_flight", f"{DROPPED}{DropReason.REDONE}", num_tokens, 0)

    # What a restart will need.

    def keep_turn(self, serial: int, episode: Trajectory) -> None:
        """An episode has sampled another turn: a restart goes on after it. Stored with the next transaction."""
        self._turns[serial, episode.index] = episode

    def keep_partials(self, partials: Mapping[int, Mapping[int, Trajectory]]) -> None:
        """Replace what is stored of unfinished answers; `partials` are by serial and index."""
        with self.writing() as connection:
            connection.execute("DELETE FROM partials")
            for serial, answers in partials.items():
                for t in answers.values():
                    journal.write_partial(connection, serial, t)

    def flush(self) -> None:
        if self._verdicts or self._turns:
            with self.writing():
                pass

    def judged(self, key: bytes, score: Score) -> None:
        self._verdicts[key] = score

    def verdicts(self) -> dict[bytes, Score]:
        found = self.connection.execute("SELECT key, reward, parts FROM verdicts ORDER BY id")
        return {key: Score(reward=reward, parts=json.loads(parts)) for key, reward, parts in found}

    def prune(self, *, before: int, max_verdicts: int) -> None:
        """Delete old verdicts, and tokens of what was trained or dropped before step `before`."""
        old = (  # a skipped step is taken again with the others, and may have older trajectories
            "SELECT id FROM trajectories WHERE (state = 'trained' AND trained_step < ?1) "
            "OR (state = 'dropped' AND drop_reason <> 'skipped_step' AND oldest_version < ?1)"
        )
        last = "SELECT MAX(id) FROM verdicts"
        with self.writing() as connection:
            connection.execute(f"DELETE FROM journal WHERE trajectory_id IN ({old})", (before,))
            connection.execute(f"DELETE FROM verdicts WHERE id <= ({last}) - ?", (max_verdicts,))

    def remember(self, key: str, value: str) -> None:
        """Store a fact of the run that a restart cannot measure again."""
        with self.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"run:{key}", value))

    def sealed(self) -> list[Any]:
        """The number and head of the last digests: what a checkpoint remembers of these books."""
        return list(self.read(digests.LAST)[0])

    def sync(self) -> None:
        """Make everything booked so far survive a power failure."""
        self.read("PRAGMA wal_checkpoint(FULL)")

    # What readers ask.

    def remembered(self) -> dict[str, str]:
        facts = self.read("SELECT key, value FROM meta WHERE key GLOB 'run:*'")
        return {key.removeprefix("run:"): value for key, value in facts}

    def restarts(self) -> list[journal.Restart]:
        found = self.read("SELECT * FROM restarts ORDER BY number")
        return [journal.Restart(*values) for values in found]

    def totals(self) -> Books:
        accounts = self.read("SELECT name, tokens, trajectories FROM accounts ORDER BY name")
        held = {name: Amount(*amount) for name, *amount in accounts}  # all add up to zero
        generated = Amount(*(-number for number in held.pop(SOURCE)))
        kept = {name: held.pop(name) for name in ("trained", "buffered", "in_flight")}
        dropped = {name.removeprefix(DROPPED): amount for name, amount in held.items()}
        return Books(generated=generated, dropped=dropped, **kept)

    def moved_since_row(self) -> dict[str, int]:
        """Tokens that came into each account since the last row; generated: `in_flight`."""
        query = f"SELECT credit, SUM(tokens) FROM transfers WHERE id > {LAST} GROUP BY credit"
        return dict(self.read(query, (self.step,)))

    def scored_since_row(self) -> list[tuple[float, int, bool]]:
        """Reward, tokens and whether truncated, of what was scored since the last row."""
        tables = "trajectories t JOIN transfers x ON x.trajectory_id = t.id"
        came = f"x.debit = 'in_flight' AND x.id > {LAST} AND t.reward IS NOT NULL"
        redone = "a.serial = t.serial AND a.number = t.attempt AND a.state = 'redone'"
        where = f"{came} AND NOT EXISTS (SELECT 1 FROM attempts a WHERE {redone})"
        query = f"SELECT t.reward, t.num_tokens, t.finish FROM {tables} WHERE {where}"
        found = self.read(query, (self.step,))
        return [(reward, num_tokens, FinishReason(finish).cut) for reward, num_tokens, finish in found]

    def outcomes(self, serials: Iterable[int]) -> Outcomes:
        """Of those of these groups that are over; one that was lost has no rewards."""
        tables = "attempts a LEFT JOIN trajectories t ON t.serial = a.serial AND t.attempt = a.number"
        over = "a.state IN ('closed', 'crashed') AND a.serial IN (SELECT value FROM json_each(?))"
        query = f"SELECT a.serial, a.version, reward FROM {tables} WHERE {over} ORDER BY a.serial, idx"
        found: dict[int, tuple[int, list[float]]] = {}
        for serial, version, reward in self.read(query, (json.dumps(list(serials)),)):
            found.setdefault(serial, (version, []))[1].extend([] if reward is None else [reward])
        return found

    def rows(self, *, after_step: int = -1) -> list[Row]:
        found = self.read("SELECT data FROM rows WHERE step > ? ORDER BY step", (after_step,))
        return [journal.row_from_json(text) for (text,) in found]

    # What bookings are made of, here and in recovery.py.

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction for all that is booked inside, where nothing may be awaited.

        All or nothing. A full disk raises RunError, a broken rule of the books IntegrityError.
        """
        if self.connection.in_transaction:  # a part of it
            yield self.connection
            return
        with database.explained(self._path), self.connection:  # at its end, COMMIT or ROLLBACK
            self.connection.execute("BEGIN IMMEDIATE")
            if self._digests is not None:
                self._digests.noted.clear()  # of a transaction that failed
            query = "INSERT OR IGNORE INTO verdicts (key, reward, parts) VALUES (?, ?, ?)"
            judged = [(k, s.reward, json.dumps(dict(s.parts))) for k, s in self._verdicts.items()]
            self.connection.executemany(query, judged)
            for (serial, _), episode in self._turns.items():
                journal.write_partial(self.connection, serial, episode)
            yield self.connection
            if self._digests is not None:
                self._digests.seal(self.connection, self.step)
        self._verdicts.clear()
        self._turns.clear()

    def read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with database.explained(self._path):
            return self.connection.execute(query, values).fetchall()

    def drop_buffered(self, id: str, num_tokens: int, reason: str, lag: int) -> None:
        self.transfer("buffered", f"{DROPPED}{reason}", num_tokens, 1, trajectory_id=id, lag=lag)
        query = "UPDATE trajectories SET state = 'dropped', drop_reason = ?, lag = ? WHERE id = ?"
        self.connection.execute(query, (str(reason), lag, id))

    def _leave_flight(self, group: Group, t: Trajectory, account: str, of: Mapping[str, Any]) -> None:
        """Book what becomes of a trajectory in flight, with columns `of`; keep its tokens."""
        values = {**journal.columns(t), "serial": group.serial, "attempt": group.attempt, **of}
        journal.insert(self.connection, "trajectories", values)
        moved = {"trajectory_id": t.id, "lag": of.get("lag")}
        self.transfer("in_flight", account, t.num_sampled_tokens, 1, **moved)
        self.connection.execute("INSERT INTO journal VALUES (?, ?)", (t.id, journal.encode(t)))

    def _ask(self, prompt: Prompt) -> None:
        """Keep a prompt's text and fields, the expected answer among them, for people to read."""
        told = json.dumps({"text": prompt.text, "fields": dict(prompt.fields)}, default=str)
        if len(told) > MAX_PROMPT_CHARS:
            told = json.dumps({"text": prompt.text})
        key = f"{PROMPT}{prompt.id}"
        self.connection.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, told))

    def prompt(self, id: str) -> dict[str, Any]:
        """The `text` and `fields` of a prompt that was answered; empty if they were not kept."""
        found = self.read("SELECT value FROM meta WHERE key = ?", (f"{PROMPT}{id}",))
        return json.loads(found[0][0]) if found else {}

    def open_attempt(self, a: Attempt) -> None:
        self.connection.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, 'open')", astuple(a))

    def _check_open(self, serial: int, number: int) -> None:
        """Refuse what belongs to an attempt that a restart has replaced."""
        found = self.read("SELECT number, state FROM attempts WHERE serial = ?", (serial,))
        if found and (number, "open") not in found:
            raise sqlite3.IntegrityError(f"attempt {number} at group {serial} is over: {dict(found)}")

    def mark_attempt(self, serial: int, number: int, state: str) -> None:
        query = "UPDATE attempts SET state = ? WHERE serial = ? AND number = ?"
        self.connection.execute(query, (str(state), int(serial), int(number)))

    def transfer(self, debit: str, credit: str, num_tokens: int, num_trajectories: int, **of: str | int | None) -> None:
        """Move an amount to another account; `of` a trajectory, with `trajectory_id` and `lag`."""
        when = {"at_s": self.clock.now(), "step": self.step}
        amount = {"tokens": int(num_tokens), "trajectories": int(num_trajectories)}
        journal.insert(self.connection, "transfers", {**when, "debit": debit, "credit": credit, **amount, **of})


def _lag(trajectory: Trajectory, version: int) -> int:
    return int(version - trajectory.oldest_version) if trajectory.spans else 0

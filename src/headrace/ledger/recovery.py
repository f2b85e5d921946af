"""What a restart reads from the ledger and books in it.

Also what a run computes with: its settings and its users' code. A restart that finds something else
refuses to mix the two, unless the change was asked for by an override; then the ledger books the
change.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from operator import attrgetter

from headrace.config import Config
from headrace.config_file import NAME_FUNCTIONS, values
from headrace.errors import RunError
from headrace.ledger.database import DROPPED, SOURCE
from headrace.ledger.journal import Restart, read_partials, read_trajectories
from headrace.ledger.ledger import Amount, Ledger
from headrace.types import Attempt, DropReason, Trajectory
from headrace.user_code import source_hash

# where and on how many workers: free to change
WHERE = (
    *("model.threads", "rollout.workers", "reward.workers", "episode.workers", "learner.ranks"),
    *("publish.", "place.", "ledger.", "run.dollars_per_hour"),
)
FIXED = ("run.dir", "run.over", "run.seed", "warmstart.", "learner.lora_rank")  # the steps so far go by them
_ORIGIN, _CHANGES = "origin", "changes"


@dataclass(frozen=True)
class Recovery:
    """The ledger of a run that ended too soon, as `loop/resume.py` needs it."""

    ledger: Ledger

    # What there is.

    def attempts(self, *, state: str | None = None, wave: int | None = None) -> list[Attempt]:
        """All attempts, or those with this `state` or `wave`, in the order of their start."""
        columns = "serial, number, prompt_id, wave, version"
        where = "state = COALESCE(?, state) AND wave = COALESCE(?, wave) ORDER BY wave, serial"
        found = self.ledger.read(f"SELECT {columns} FROM attempts WHERE {where}", (state, wave))
        return [Attempt(*values) for values in found]

    def buffered_groups(self) -> list[tuple[int, int]]:
        query = "SELECT DISTINCT serial, attempt FROM trajectories WHERE state = 'buffered'"
        return [(serial, n) for serial, n in self.ledger.read(f"{query} ORDER BY serial")]

    def trajectories(self, serial: int, attempt: int) -> list[Trajectory]:
        """The trajectories of an attempt that reached the buffer, with their tokens."""
        came = "SELECT 1 FROM transfers x WHERE x.trajectory_id = t.id AND x.debit = 'in_flight'"
        where = f"t.serial = ? AND t.attempt = ? AND EXISTS ({came} AND x.credit = 'buffered')"
        return read_trajectories(self.ledger.connection, where, (serial, attempt))

    def partials(self, serial: int) -> dict[int, Trajectory]:
        return {t.index: t for t in read_partials(self.ledger.connection, serial)}

    def steps_after(self, step: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """The steps begun after `step`, each with the serials and attempts of its groups."""
        found = self.ledger.read("SELECT * FROM steps WHERE step > ? ORDER BY step", (step,))
        return [(number, [(serial, n) for serial, n in json.loads(groups)]) for number, groups in found]

    # What is done about it.

    def lose(self, redo: Sequence[Attempt], reason: DropReason) -> Amount:
        """Drop everything in flight, and the attempts `redo` with whatever of them is buffered."""
        ledger, held = self.ledger, self.ledger.totals().in_flight
        columns, of = "id, num_tokens", "serial = ? AND attempt = ? AND state = 'buffered'"
        buffered = f"SELECT {columns} FROM trajectories WHERE {of}"
        with ledger.writing() as connection:
            if held != Amount():
                ledger.transfer("in_flight", f"{DROPPED}{reason}", held.tokens, held.trajectories)
            connection.execute("UPDATE attempts SET state = ? WHERE state = 'open'", (str(reason),))
            for attempt in redo:
                key = (attempt.serial, attempt.number)
                for id, num_tokens in ledger.read(buffered, key):
                    ledger.drop_buffered(id, num_tokens, reason, lag=0)
                ledger.mark_attempt(*key, reason)
        return held

    def carry_on(self, attempts: Sequence[Attempt], kept_tokens: int) -> Amount:
        """Continue `attempts` under the next number; all but `kept_tokens` in flight is lost."""
        ledger, lost = self.ledger, self.ledger.totals().in_flight.tokens - kept_tokens
        with ledger.writing():
            if lost:
                ledger.transfer("in_flight", f"{DROPPED}{DropReason.REDONE}", lost, 0)
            for a in attempts:
                ledger.mark_attempt(a.serial, a.number, DropReason.REDONE)
                query = "SELECT id FROM trajectories WHERE serial = ? AND attempt = ?"
                dropped = ledger.read(query, (a.serial, a.number))
                ledger.transfer(SOURCE, "in_flight", 0, len(dropped))  # generated again
                ledger.open_attempt(replace(a, number=a.number + 1))
        return Amount(tokens=lost)

    def restarted(self, restart: Restart) -> None:
        with self.ledger.writing() as connection:
            connection.execute("INSERT INTO restarts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(restart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting that a restart changed. Example: Change(step=40, key="learner.lr", before="0.001", after="0.0001")."""

    step: int
    key: str
    before: str
    after: str


def origin_of(config: Config, reward: str = "") -> dict[str, str]:
    """By key, each setting that decides what is computed; of functions also a digest of their file.

    `reward` is the name of a reward function that is a Python object.
    """
    found = {key: text for key, text in values(config).items() if not key.startswith((*WHERE, "run.dir", "run.over"))}
    for key in (*NAME_FUNCTIONS, "learner.teacher"):
        given: str | tuple[str, ...] = attrgetter(key)(config)
        specs = [given] if isinstance(given, str) else given
        if code := [digest[:16] for spec in specs if (digest := source_hash(spec))]:
            found[key] += f" with code {' '.join(code)}"
    if reward:
        found["reward.function"] = f"{reward}, a Python object"
    return found


def changes(ledger: Ledger) -> list[Change]:
    return [Change(**change) for change in json.loads(ledger.remembered().get(_CHANGES, "[]"))]


def _unbooked(ledger: Ledger, config: Config, reward: str) -> list[Change]:
    before, after = json.loads(ledger.remembered().get(_ORIGIN, "{}")), origin_of(config, reward)
    step = len(ledger.rows())
    # a setting that is new has its default
    changed = [key for key in after if before.get(key, after[key]) != after[key]]
    return [Change(step=step, key=key, before=before[key], after=after[key]) for key in changed]


def refuse_unasked(ledger: Ledger, config: Config, overrides: Sequence[str], reward: str = "") -> None:
    asked = {override.partition("=")[0].strip() for override in overrides}
    if silent := [c for c in _unbooked(ledger, config, reward) if c.key not in asked]:
        told = "".join(f"\n  {c.key} was {c.before}, and is {c.after}" for c in silent)
        words = " ".join(f"{c.key}={values(config)[c.key]}" for c in silent)
        ask = f"Take that back, or ask for it: headrace resume {ledger.run_dir} {words}"
        raise RunError(f"{ledger.run_dir} has changed since step {silent[0].step}:{told}\n{ask}")


def book_origin(ledger: Ledger, config: Config, reward: str = "") -> None:
    """Book what the run computes with from here on, and what of it has changed."""
    with ledger.writing():
        if found := _unbooked(ledger, config, reward):
            ledger.remember(_CHANGES, json.dumps([asdict(change) for change in (*changes(ledger), *found)]))
        ledger.remember(_ORIGIN, json.dumps(origin_of(config, reward)))

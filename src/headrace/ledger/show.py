"""One run, and one trajectory of it, as far as the books know them."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError

from headrace.config import Config
from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME
from headrace.ledger.journal import Restart, read_trajectories
from headrace.ledger.ledger import Books, Ledger
from headrace.ledger.runs import START, WEIGHTS, RunFacts, RunState, read_run, reading, run_config
from headrace.ledger.schema import DROPPED
from headrace.ledger.token_texts import TokenTexts
from headrace.types import Row, Span, Trajectory

_SIMILAR = 5  # ids to suggest
_SEARCHED = 20_000  # ids to compare with, where nothing narrows them down
_ID = re.compile(r"(?P<serial>\d{1,15})(\.(?P<attempt>\d{1,9}))?:(?P<prompt_id>.+)/(?P<index>\d+)")
_COLUMNS = (
    "id, prompt_id, serial, attempt, num_tokens, reward, reward_parts, finish, spans, "
    "submitted_s, started_s, finished_s, scored_s, state, drop_reason, lag, trained_step"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """One run at length; `examples` is the newest trajectory in each account that names any.

    Example:
        RunDetails(facts=RunFacts(...), config=Config(...), books=Books(...), restarts=[Restart(...)], rows=[Row(...)],
            examples={"trained": "40:train-17/3", "dropped:stale": "12:train-4/0"})
    """

    facts: RunFacts
    config: Config
    books: Books | None  # None before the run has a ledger
    restarts: list[Restart]
    rows: list[Row]  # the last ones
    examples: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryDetails:
    """One trajectory, what became of it and when; its tokens only if it reached the buffer.

    Example:
        TrajectoryDetails(id="40:train-17/3", prompt_id="train-17", serial=40, attempt=1, num_tokens=3, reward=1.0,
            reward_parts={"correct": 1.0}, finish="eos", spans=(Span(version=7, start=5, end=8),),
            times_s={"submitted": 1.0, "started": 1.1, "finished": 2.4, "scored": 2.5, "trained": 3.0},
            state="trained", drop_reason=None, lag=0, step=8, whole=Trajectory(...))
    """

    id: str
    prompt_id: str
    serial: int | None
    attempt: int | None
    num_tokens: int
    reward: float | None
    reward_parts: Mapping[str, float]
    finish: str | None  # None where it was ended before its time
    spans: tuple[Span, ...]
    times_s: Mapping[str, float]  # on the run's clock, in order
    state: str
    drop_reason: str | None
    lag: int | None
    step: int  # it was trained in; of others the last that was complete when it was dropped or buffered
    whole: Trajectory | None


def read_details(run_dir: Path, *, num_rows: int) -> RunDetails:
    """A run, with its last so many rows."""
    facts = read_run(run_dir)
    if facts.state is RunState.UNREADABLE:
        raise RunError(facts.problem)
    config = run_config(run_dir)
    if not (run_dir / FILE_NAME).exists():
        return RunDetails(facts=facts, config=config, books=None, restarts=[], rows=[], examples={})
    with Ledger.open(run_dir) as ledger:
        rows = ledger.rows(after_step=facts.steps - num_rows)
        books, restarts = ledger.totals(), ledger.restarts()
    return RunDetails(
        facts=facts, config=config, books=books, restarts=restarts, rows=rows, examples=_examples(run_dir)
    )


def read_trajectory(run_dir: Path, id: str) -> TrajectoryDetails:
    """The trajectory of this id; of an unknown one the message has ids that look similar."""
    with reading(run_dir) as connection:
        found = connection.execute(f"SELECT {_COLUMNS} FROM trajectories WHERE id = ?", (id,)).fetchone()
        if found is None:
            raise RunError(_unknown(connection, run_dir, id))
        values = dict(zip(_COLUMNS.split(", "), found, strict=True))
        times = {name: values.pop(f"{name}_s") for name in ("submitted", "started", "finished", "scored")}
        moves = connection.execute(
            "SELECT at_s, step, credit FROM transfers WHERE trajectory_id = ? ORDER BY id", (id,)
        ).fetchall()
        times |= {credit.split(":")[0]: at_s for at_s, _, credit in moves}
        trained_step = values.pop("trained_step")
        spans = tuple(Span(version=v, start=start, end=end) for v, start, end in json.loads(values.pop("spans")))
        return TrajectoryDetails(
            **values | {"reward_parts": json.loads(values["reward_parts"])},
            spans=spans,
            times_s={name: at_s for name, at_s in times.items() if at_s is not None},
            step=moves[-1][1] - 1 if trained_step is None else trained_step,
            whole=_whole(connection, id),
        )


def token_texts(run_dir: Path) -> TokenTexts | None:
    """The run's tokenizer: what it left, or what it began with. None where neither can be read."""
    model = run_config(run_dir).model
    began_with = run_dir / START if model.path == "demo" else Path(model.path)
    own = [Path(model.tokenizer)] if model.tokenizer else []
    return TokenTexts.find([run_dir / WEIGHTS, *own, began_with])


def _examples(run_dir: Path) -> dict[str, str]:
    query = (
        "SELECT state, drop_reason, id FROM trajectories "
        "WHERE rowid IN (SELECT MAX(rowid) FROM trajectories GROUP BY state, drop_reason)"
    )
    with reading(run_dir) as connection:
        found = connection.execute(query).fetchall()
    return {f"{DROPPED}{reason}" if reason else state: id for state, reason, id in found}


def _whole(connection: sqlite3.Connection, id: str) -> Trajectory | None:
    try:
        return next(iter(read_trajectories(connection, "t.id = ?", (id,))), None)
    except (SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"the tokens of trajectory {id} are damaged: {error}") from error


def _unknown(connection: sqlite3.Connection, run_dir: Path, id: str) -> str:
    """Why there is nothing to show: it is under way, was lost, or never was."""
    parts = _ID.fullmatch(id)
    serial = int(parts["serial"]) if parts else None
    attempts = dict(
        connection.execute(
            "SELECT number, state FROM attempts WHERE serial = ? AND prompt_id = ? ORDER BY number",
            (serial, parts["prompt_id"] if parts else None),
        )
    )
    state = attempts.get(int(parts["attempt"] or 1)) if parts else None
    message = f"there is no trajectory {id} in {run_dir}"
    if state == "open":
        message = f"{id} is under way, or was when the run died: nothing of it is kept until it is complete"
    elif state in ("redone", "crashed"):
        after = "another attempt took its place" if state == "redone" else "its prompt was left out"
        message = f"{id} was under way when the run died, and nothing of it is kept; {after}"
    narrowed = connection.execute(
        "SELECT id FROM trajectories WHERE serial = ? OR prompt_id = ? OR INSTR(id, ?) LIMIT ?",
        (serial, parts["prompt_id"] if parts else id, id, _SEARCHED),
    ).fetchall()
    any_id = connection.execute("SELECT id FROM trajectories LIMIT ?", (_SEARCHED,)).fetchall()
    known = [found for (found,) in narrowed or any_id]
    similar = get_close_matches(id, known, n=_SIMILAR, cutoff=0.0)
    return message + (f". Similar ones: {', '.join(similar)}" if similar else ", and no other yet")

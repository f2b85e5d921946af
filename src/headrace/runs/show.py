"""One run at length, one trajectory of it, its tokens as text, and what the books' short words mean."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError
from tokenizers import Tokenizer

from headrace.config import Config
from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME
from headrace.ledger.files import START, WEIGHTS, run_config
from headrace.ledger.journal import Restart, read_trajectories
from headrace.ledger.ledger import Books, Ledger
from headrace.ledger.schema import DROPPED
from headrace.row import Row
from headrace.runs.columns import reading
from headrace.runs.facts import RunFacts, RunState, read_run
from headrace.types import DropReason, FinishReason, Span, Trajectory

_SIMILAR = 5  # ids to suggest
_SEARCHED = 20_000  # ids to compare with, where nothing narrows them down
_ID = re.compile(r"(?P<serial>\d{1,15})(\.(?P<attempt>\d{1,9}))?:(?P<prompt_id>.+)/(?P<index>\d+)")
_TOKENIZER_FILE = "tokenizer.json"
_BROKEN = "\ufffd"  # stands for bytes that are no whole character
_COLUMNS = (
    "id, prompt_id, serial, attempt, num_tokens, reward, reward_parts, finish, spans, "
    "submitted_s, started_s, finished_s, scored_s, state, drop_reason, lag, trained_step"
)

DROP_WORDS = {
    DropReason.STALE: "the policy had moved more than loop.max_lag versions on before it could be trained on",
    DropReason.NO_SIGNAL: "all answers of its group got the same reward, so none was better than another",
    DropReason.OVERLONG: "it was cut before its end, and buffer.drop_overlong leaves such answers out",
    DropReason.REWARD_TIMEOUT: "the reward function gave no verdict within reward.timeout_s",
    DropReason.REWARD_ERROR: "the reward function raised an error, or returned something that is no reward",
    DropReason.REWARD_UNAVAILABLE: "what the reward function needs could not be reached, reward.retries times",
    DropReason.INCOMPLETE: "fewer than two answers of its group were left, and one alone cannot be compared",
    DropReason.SKIPPED_STEP: "the gradient of its step was not finite, so the weights stayed as they were",
    DropReason.RUN_ENDED: "the run was over before it could be trained on",
    DropReason.REDONE: "a process died, and this had to be generated again; a later attempt counts",
    DropReason.CRASHED: "it was lost with a process that died, and recovery.in_flight = drop leaves its prompt out",
}
FINISH_WORDS = {
    FinishReason.EOS: "the policy ended it",
    FinishReason.STOP: "at a stop string",
    FinishReason.LENGTH: "cut at rollout.max_new_tokens",
    FinishReason.WALL: "cut at rollout.max_wall_s",
    FinishReason.ABORT: "ended before its time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """One run at length; `examples` is the newest trajectory in each account that names any."""

    facts: RunFacts
    config: Config
    books: Books | None  # None before the run has a ledger
    restarts: list[Restart]
    rows: list[Row]  # the last ones
    examples: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryDetails:
    """One trajectory, what became of it and when; its tokens only if it reached the buffer."""

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


class TokenTexts:
    """What token ids say, by a run's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def find(cls, directories: Iterable[Path]) -> TokenTexts | None:
        """By the first of these directories whose tokenizer loads."""
        for directory in directories:
            file = directory / _TOKENIZER_FILE
            if file.is_file():
                try:
                    return cls(Tokenizer.from_file(str(file)))
                except Exception:  # the library raises nothing narrower for a file it cannot read
                    continue
        return None

    def text(self, token_ids: Sequence[int]) -> str:
        """All of them together, end tokens and the like too."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text. Of a token that is part of a character, its name in the vocabulary."""
        found, before = [], ""
        for position, token_id in enumerate(token_ids):
            # many tokenizers take the space off the first token of a text, so each is read behind its neighbour
            together = self.text(token_ids[max(0, position - 1) : position + 1])
            if together.startswith(before) and _BROKEN not in together:
                found.append(together[len(before) :])
            else:
                found.append(str(self._tokenizer.id_to_token(token_id) or ""))
            before = self.text([token_id])
        return found


def read_details(run_dir: Path, *, num_rows: int) -> RunDetails:
    """A run, with its last `num_rows` rows."""
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


def fate(found: TrajectoryDetails) -> str:
    """What became of a trajectory, and when."""
    if found.state == "trained":
        return f"trained on in step {found.step} with lag {found.lag}"
    if found.state == "buffered":
        return "complete and scored; waits in the buffer to be trained on"
    reason = str(found.drop_reason)
    return f"dropped as {reason} after step {found.step}, with lag {found.lag}: {why_dropped(reason)}"


def why_dropped(reason: str) -> str:
    """The reason in a sentence."""
    if reason.startswith("filter:"):
        return f"your filter {reason.removeprefix('filter:')} said no"
    return DROP_WORDS[DropReason(reason)] if reason in DROP_WORDS else "a reason that this version does not know"


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

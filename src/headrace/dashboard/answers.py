"""Trajectories for the page: a list with filters, one with its neighbours, and all answers to one prompt."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.dashboard.books import looking_into
from headrace.errors import HeadraceError, RunError
from headrace.ledger.ledger import Ledger
from headrace.runs import show
from headrace.runs.columns import one
from headrace.runs.facts import UnknownNameError
from headrace.runs.report import count
from headrace.runs.show import TokenTexts, TrajectoryDetails

PAGE_SIZE = 25
PAGE_COLUMNS = ("answer", "reward", "tokens", "fate", "step", "lag", "ended by", "text")
MOST_CHARACTERS = 200  # of a text in a list
MOST_PROMPT_TOKENS = 4000  # of a prompt's text
NOT_KEPT = "(not kept)"
_COLUMNS = "rowid, id, reward, num_tokens, state, drop_reason, trained_step, lag, finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which trajectories to list; each is the name of a value in an address."""

    state: str | None = None
    reason: str | None = None
    step: int | None = None  # they were trained in
    least: float | None = None  # reward
    most: float | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Wanted":
        numbers = {"step": int, "least": float, "most": float}
        read = {name: number(query, name, kind) for name, kind in numbers.items()}
        return cls(state=query.get("state") or None, reason=query.get("reason") or None, **read)

    def conditions(self) -> dict[str, Any]:
        found = {
            "state = ?": self.state,
            "drop_reason = ?": self.reason,
            "trained_step = ?": self.step,
            "reward >= ?": self.least,
            "reward <= ?": self.most,
        }
        return {text: value for text, value in found.items() if value is not None}


EVERY = Wanted()


def number(query: Mapping[str, str], name: str, kind: type = int) -> Any:
    """The number that an address gives as `name`, if it does."""
    if not (text := query.get(name)):
        return None
    try:
        value = kind(text)
    except ValueError:
        raise UnknownNameError(f"{name}={text} in the address is not a number.") from None
    if not (math.isfinite(value) and abs(value) < 2**63):
        raise UnknownNameError(f"{name}={text} in the address is out of range.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some trajectories, the newest first, and whether there are more on either side."""

    places: Sequence[int]  # in the list of all
    rows: Sequence[tuple[str, ...]]  # under PAGE_COLUMNS
    has_newer: bool
    has_older: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One trajectory, what its tokens say (None where the tokenizer cannot be read), and its neighbours."""

    found: TrajectoryDetails
    texts: TokenTexts | None
    prompt: str | None
    newer: str | None
    older: str | None
    fields: Mapping[str, str]  # of the prompt, such as the expected answer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswers:
    """All answers to one prompt; `facts` of each begin with its reward."""

    prompt_id: str
    prompt: str | None  # None where no answer's tokens are kept
    answers: Sequence[tuple[str, Mapping[str, str], str | None]]  # id, facts, text
    newer: int | None
    older: int | None
    fields: Mapping[str, str]


def read_page(run_dir: Path, wanted: Wanted, *, older: int | None = None, newer: int | None = None) -> Page:
    """Those before the place `older`, or after the place `newer`, or the newest."""
    given, backwards = wanted.conditions(), newer is not None
    if older is not None or backwards:
        given |= {"rowid > ?": newer} if backwards else {"rowid < ?": older}
    query = (
        f"SELECT {_COLUMNS} FROM trajectories WHERE {' AND '.join(given) or '1'} "
        f"ORDER BY rowid {'ASC' if backwards else 'DESC'} LIMIT {PAGE_SIZE + 1}"
    )
    with looking_into(run_dir) as connection:
        found = connection.execute(query, tuple(given.values())).fetchall()
        more, found = len(found) > PAGE_SIZE, found[:PAGE_SIZE]
        texts = show.read_texts(connection, [line[1] for line in found])
    found = found[::-1] if backwards else found
    rows = []
    for _, id, reward, num_tokens, state, reason, step, lag, finish in found:
        known = ("" if number is None else str(number) for number in (step, lag))
        text = " ".join(texts.get(id, NOT_KEPT).split())
        text = text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
        rows.append((id, _reward(reward), f"{num_tokens:,}", _fate(state, reason), *known, finish or "-", text))
    return Page(
        places=[line[0] for line in found],
        rows=rows,
        has_newer=more if backwards else older is not None,
        has_older=backwards or more,
    )


def read_answer(run_dir: Path, id: str, wanted: Wanted = EVERY) -> Answer:
    """One trajectory; its neighbours are those among the `wanted`."""
    with looking_into(run_dir) as connection:
        found, given = show.read_trajectory(run_dir, id), wanted.conditions()
        place = one(connection, "SELECT rowid FROM trajectories WHERE id = ?", id)
        among = " AND ".join(("", *given))
        newer, older = (
            one(connection, f"SELECT id FROM trajectories WHERE rowid {side}", place, *given.values())
            for side in (f"> ?{among} ORDER BY rowid", f"< ?{among} ORDER BY rowid DESC")
        )
    texts, fields = _texts(run_dir), _fields(run_dir, found.prompt_id)
    prompt = _prompt(found, texts)
    return Answer(found=found, texts=texts, prompt=prompt, newer=newer, older=older, fields=fields)


def read_group(run_dir: Path, serial: int) -> GroupAnswers:
    query = (
        "SELECT id, prompt_id, attempt, reward, reward_parts, finish, num_tokens, state, drop_reason, "
        "trained_step, lag FROM trajectories WHERE serial = ? ORDER BY attempt, idx, id"
    )
    with looking_into(run_dir) as connection:
        found = connection.execute(query, (serial,)).fetchall()
        if not found:
            first, last = connection.execute("SELECT MIN(serial), MAX(serial) FROM trajectories").fetchone()
            known = "none is complete yet" if first is None else f"they go from {first} to {last}"
            raise UnknownNameError(f"There is no group {serial} in {run_dir.name}: {known}.")
        said = show.read_texts(connection, [line[0] for line in found])
        newer = one(connection, "SELECT MIN(serial) FROM trajectories WHERE serial > ?", serial)
        older = one(connection, "SELECT MAX(serial) FROM trajectories WHERE serial < ?", serial)
    prompt_id, prompt = found[0][1], None
    if said:
        with suppress(RunError):  # its tokens are damaged
            prompt = _prompt(show.read_trajectory(run_dir, next(iter(said))), _texts(run_dir))
    several, fields = len({line[2] for line in found}) > 1, _fields(run_dir, prompt_id)
    answers = [(line[0], _facts(line[2:], several), said.get(line[0])) for line in found]
    return GroupAnswers(prompt_id=prompt_id, prompt=prompt, answers=answers, newer=newer, older=older, fields=fields)


def _facts(line: Sequence[Any], several_attempts: bool) -> dict[str, str]:
    attempt, reward, parts, finish, num_tokens, state, reason, step, lag = line
    known = {name: value for name, value in json.loads(parts).items() if isinstance(value, int | float)}
    facts = {"reward": _reward(reward)} | {f"part {name}": f"{value:g}" for name, value in known.items()}
    fate = f"trained in step {step}, lag {lag}" if state == "trained" else _fate(state, reason)
    fate = f"{fate}: {show.why_dropped(reason)}" if reason else fate
    facts |= {"ended by": finish or "-", "length": count(num_tokens, "token"), "fate": fate}
    return facts | {"attempt": str(attempt)} if several_attempts else facts


def _prompt(answer: TrajectoryDetails, texts: TokenTexts | None) -> str | None:
    if answer.whole is None:
        return None
    given = show.prompt_ids(answer.whole)[-MOST_PROMPT_TOKENS:]
    return texts.text(given) if texts else " ".join(map(str, given))


def _texts(run_dir: Path) -> TokenTexts | None:
    with suppress(HeadraceError):  # the settings, which say where the tokenizer is, cannot be read
        return show.token_texts(run_dir)
    return None


def _fields(run_dir: Path, prompt_id: str) -> dict[str, str]:
    """The prompt's fields, the expected answer among them; none in ledgers of earlier versions."""
    with Ledger.open(run_dir) as ledger:
        found = ledger.prompt(prompt_id).get("fields", {})
    return {name: str(value) for name, value in found.items()}


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"


def _fate(state: str, reason: str | None) -> str:
    return f"dropped: {reason}" if state == "dropped" else state

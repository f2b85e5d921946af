"""What commands and the page show of runs, accounts and trajectories: read, and put into words."""

import contextlib
import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from tokenizers import Tokenizer

from headrace.config import DEMOS
from headrace.config_file import read_toml
from headrace.errors import RunError
from headrace.ledger.files import START, WEIGHTS, read_summary, run_config
from headrace.ledger.journal import Restart, decode, read_trajectories
from headrace.ledger.ledger import Amount, Books, Ledger
from headrace.runs.columns import one, reading
from headrace.runs.facts import RunFacts, RunState, UnknownNameError
from headrace.runs.report import Section, Table, ago, count, short
from headrace.types import Span, Trajectory

RUN_COLUMNS = ("run", "state", "steps", "held-out", "restarts", "trained", "written")
ACCOUNT_COLUMNS = ("account", "tokens", "share", "answers", "mean length")
HERE = Path(__file__)
_WORDS = read_toml(HERE.with_name("words.toml")).values()
DROP_WORDS, FINISH_WORDS, ACCOUNT_WORDS, FATE_WORDS, ATTEMPT_WORDS, ENDED_WORDS = _WORDS
_SQL = HERE.with_name("show.sql").read_text(encoding="utf-8")
_SCORED, _DETAILS, _MOVES, _NEWEST, _JOURNAL, _ATTEMPTS, _LIKE = _SQL.split(";")
_SIMILAR = 5  # ids to suggest
_SKIPPED = 20  # steps to name
_SEARCHED = 20_000  # ids to compare with, where nothing narrows them down
_ID = re.compile(r"(?P<serial>\d{1,15})(\.(?P<attempt>\d{1,9}))?:(?P<prompt_id>.+)/(?P<index>\d+)")
NO_TOKENS = "No tokens are kept of a trajectory this old (recovery.journal_steps)."
_BROKEN = "\ufffd"  # stands for bytes that are no whole character


class Account:
    """Where some of the generated tokens went; `reason` is that of a drop.

    `state` is trained, dropped, buffered or in flight; generated for all of them together.
    """

    def __init__(self, state: str, amount: Amount, reason: str | None = None) -> None:
        self.state, self.amount, self.reason = state, amount, reason
        self.name = f"dropped: {reason}" if reason else state
        self.explanation = why_dropped(reason) if reason else ACCOUNT_WORDS.get(state, "")

    def row(self, generated: Amount) -> tuple[str, ...]:
        tokens, answers = self.amount.tokens, self.amount.trajectories
        share = tokens / generated.tokens if generated.tokens else 0.0
        length = f"{tokens / answers:.1f}" if answers else "-"
        return (self.name, f"{tokens:,}", f"{share:.1%}", f"{answers:,}", length)


class TrajectoryDetails:
    """One trajectory, what became of it and when; an unknown id is answered with similar ones."""

    def __init__(self, run_dir: Path, id: str) -> None:
        with reading(run_dir) as connection:
            found = connection.execute(_DETAILS, (id,)).fetchone()
            if found is None:
                raise UnknownNameError(_unknown(connection, run_dir, id))
            moves = connection.execute(_MOVES, (id,)).fetchall()
            try:
                self.whole = next(iter(read_trajectories(connection, "t.id = ?", (id,))), None)
            except (SafetensorError, KeyError, ValueError) as error:
                raise RunError(f"the tokens of trajectory {id} are damaged: {error}") from error
        self.id, self.prompt_id, self.serial, self.attempt, self.num_tokens, *more = found
        self.reward, parts, self.finish, spans, *times, self.state = more[:-3]
        self.drop_reason, self.lag, trained_step = more[-3:]
        self.reward_parts: dict[str, float] = json.loads(parts)
        self.spans = tuple(Span(version=v, start=a, end=b) for v, a, b in json.loads(spans))
        moments = dict(zip(("submitted", "started", "finished", "scored"), times, strict=True))
        moments |= {credit.split(":")[0]: at_s for at_s, _, credit in moves}
        # on the run's clock, in order
        self.times_s = {name: at_s for name, at_s in moments.items() if at_s is not None}
        # trained in; of others the last complete one when it was dropped or buffered
        self.step: int = moves[-1][1] - 1 if trained_step is None else trained_step


class Token(NamedTuple):
    """One token of a trajectory; `logprob` and `version` only where it was sampled."""

    position: int
    id: int
    text: str
    logprob: float | None = None
    version: int | None = None

    @property
    def probability(self) -> float | None:
        """What the policy gave this token when it chose it."""
        return None if self.logprob is None else math.exp(min(self.logprob, 0.0))


@dataclass
class DataSet:
    """How the prompts stand, by the newest group of each. Every trajectory is read once."""

    _last: int = 0  # row that was read
    _newest: dict[str, tuple[float, float]] = field(default_factory=dict)  # lowest and highest

    def standing(self, run_dir: Path) -> str:
        with reading(run_dir) as connection:
            total = one(connection, "SELECT value FROM meta WHERE key = 'run:num_prompts'")
            last = one(connection, "SELECT COALESCE(MAX(rowid), 0) FROM trajectories")
            if last < self._last:  # another run took its place
                self._last, self._newest = 0, {}
            found = connection.execute(_SCORED, (self._last, last))
            self._newest |= {id: (low, high) for id, low, high in found}
        self._last, groups = last, self._newest.values()
        middle = sum((min(groups, default=(0, 0))[0], max((high for _, high in groups), default=0))) / 2
        learning = sum(low < high for low, high in groups)
        solved = sum(low == high and (low > middle or low == middle > 0) for low, high in groups)
        told = {"solved": solved, "learning": learning, "unsolved": len(groups) - solved - learning}
        told |= {"not yet seen": int(total) - len(groups)} if total else {}
        return ", ".join(f"{num:,} {name}" for name, num in told.items())


class TokenTexts(NamedTuple):
    """What token ids say, by a run's tokenizer."""

    tokenizer: Tokenizer

    def text(self, token_ids: Sequence[int]) -> str:
        """All of them together, end tokens and the like too."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; if part of a character, its name in the vocabulary."""
        found, before = [], ""
        for position, token_id in enumerate(token_ids):
            # many tokenizers take the space off a text's first token: each is read behind another
            together = self.text(token_ids[max(0, position - 1) : position + 1])
            if together.startswith(before) and _BROKEN not in together:
                found.append(together[len(before) :])
            else:
                found.append(str(self.tokenizer.id_to_token(token_id) or ""))
            before = self.text([token_id])
        return found


def run_row(facts: RunFacts, arrow: str = " → ") -> tuple[str, ...]:
    cells = [f"{facts.steps}/{facts.wanted_steps}", scores(facts, arrow)]
    cells += [str(facts.num_restarts or "-"), short(facts.trained_tokens)]
    if facts.state is RunState.UNREADABLE:
        cells = [""] * len(cells)
    return (facts.path.name or str(facts.path), str(facts.state), *cells, ago(facts.written))


def drawn_rewards(rewards: Sequence[float], width: float = 96, height: float = 20) -> str:
    """A small curve, as the points of an SVG polyline."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    across, up = width / max(len(rewards) - 1, 1), height / ((high - low) or 1.0)
    return " ".join(f"{i * across:.1f},{height - (reward - low) * up:.1f}" for i, reward in enumerate(rewards))


def scores(facts: RunFacts, arrow: str = " → ") -> str:
    both = (facts.score_before, facts.score_after)
    return arrow.join(f"{score:.3f}" for score in both if score is not None) or "-"


def standing(facts: RunFacts) -> str:
    if facts.state is RunState.UNREADABLE:
        return facts.problem
    done = f"{facts.state} after step {facts.steps} of {facts.wanted_steps}"
    if facts.state is not RunState.STOPPED:
        return done
    can = "can be resumed" if facts.can_be_resumed else "cannot be resumed: no checkpoint is left"
    return f"{done}; {can}"


def history(run_dir: Path, facts: RunFacts, skipped: Sequence[int], prompts: str) -> Section:
    """How a run stands and why, and what went wrong: failed rewards, skipped steps, restarts."""
    with Ledger.open(run_dir) as ledger:
        dropped, restarts = ledger.totals().dropped, ledger.restarts()
    summary = read_summary(run_dir)
    unjudged = {reason: amount.trajectories for reason, amount in dropped.items() if reason.startswith("reward_")}
    failed = ", ".join(f"{count(num, 'answer')} {reason}" for reason, num in unjudged.items())
    first = summary.get("reward_failure") or "what the first error said is written when the run ends"
    shown = ", ".join(map(str, skipped[:_SKIPPED])) + (", ..." if len(skipped) > _SKIPPED else "")
    told = {
        "state": standing(facts),
        "because": why_it_ended(facts, summary),
        "prompts": prompts,
        "reward failures": f"{failed}; the first: {first}" if failed else "none",
        "skipped steps": f"{len(skipped)}: {shown}; the gradient was not finite" if skipped else "none",
        "restarts": str(len(restarts) or "none"),
    }
    tables = (Table.of(list(map(restart_row, restarts))),) if restarts else ()
    return Section(facts=tuple(told.items()), tables=tables)


def why_it_ended(facts: RunFacts, summary: Mapping[str, Any]) -> str:
    said = {RunState.RUNNING: "", RunState.FINISHED: "ended_early"}.get(facts.state, "stopped")
    return str(summary.get(said) or ENDED_WORDS[facts.state])  # which is written however it ends


def restart_row(r: Restart) -> dict[str, str]:
    return {
        "": str(r.number),
        "at": f"{r.at_s:,.0f} s",
        "checkpoint": f"step {r.checkpoint}",
        "resumed at": f"step {r.version}",
        "taken again": f"{count(r.redone_steps, 'step')}, {count(r.retrained_tokens, 'token')}",
        "lost": f"{count(r.lost_trajectories, 'answer')}, {count(r.lost_tokens, 'token')}",
        "in flight": r.rule,
    }


def accounts(books: Books) -> list[Account]:
    """All but what was generated: trained, then drops from the largest, then what is under way."""
    dropped = sorted(books.dropped.items(), key=lambda item: -item[1].tokens)
    return [
        Account("trained", books.trained),
        *(Account("dropped", amount, reason) for reason, amount in dropped),
        Account("buffered", books.buffered),
        Account("in flight", books.in_flight),
    ]


def newest_ids(run_dir: Path) -> dict[str, str]:
    """The newest trajectory in each account that names any."""
    with reading(run_dir) as connection:
        return dict(connection.execute(_NEWEST))


def why_dropped(reason: str) -> str:
    if reason.startswith("filter:"):
        return f"your filter {reason.removeprefix('filter:')} said no"
    return str(DROP_WORDS.get(reason, "a reason that this version does not know"))


def read_texts(connection: sqlite3.Connection, ids: Sequence[str]) -> dict[str, str]:
    """What these trajectories say, as far as their tokens are kept and can be read."""
    found = {}
    for id, data in connection.execute(_JOURNAL, (json.dumps(ids),)):
        with contextlib.suppress(SafetensorError, KeyError, ValueError, TypeError):
            found[id] = decode(data).text
    return found


def token_texts(run_dir: Path) -> TokenTexts | None:
    """The run's tokenizer: what it left, or what it began with. None where neither can be read."""
    model = run_config(run_dir).model
    began_with = run_dir / START if model.path in DEMOS else Path(model.path)
    own = [Path(model.tokenizer)] if model.tokenizer else []
    for directory in (run_dir / WEIGHTS, *own, began_with):
        with contextlib.suppress(Exception):  # the library raises nothing narrower
            return TokenTexts(Tokenizer.from_file(str(directory / "tokenizer.json")))
    return None


def trajectory_facts(found: TrajectoryDetails) -> dict[str, str]:
    finish, why = FINISH_WORDS.get(found.finish, "not known"), why_dropped(found.drop_reason or "")
    reward = "none" if found.reward is None else f"{found.reward:g}"
    parts = "  ".join(f"{name} {value:g}" for name, value in found.reward_parts.items())
    versions = [f"version {s.version} sampled {count(s.end - s.start, 'token')}" for s in found.spans]
    return {
        "fate": FATE_WORDS[found.state].format(**vars(found), why=why),
        "prompt id": found.prompt_id,
        "group": f"{found.serial}, attempt {found.attempt}",
        "finish": f"{found.finish}: {finish}, after {count(found.num_tokens, 'token')}",
        "reward": f"{reward}  ({parts})" if parts else reward,
        **({"verdict": f"after {found.whole.verdict_s:.3g} s"} if found.whole and found.whole.verdict_s else {}),
        "policy": ", then ".join(versions) or "not known",
        "seconds": "  ".join(f"{name} {at_s:.2f}" for name, at_s in found.times_s.items()),
    }


def said(whole: Trajectory) -> dict[str, str]:
    """The answer, or each turn with the reply to it, what the reward function said, by title."""
    found = {} if whole.turns else {"answer": whole.text}
    in_steps = not whole.segments and any(a.end == b.start for a, b in pairwise(whole.turns))
    name = "step" if in_steps else "turn"
    for number, turn in enumerate(whole.turns, 1):
        versions = [str(s.version) for s in whole.spans if s.start < turn.end and turn.start < s.end]
        about = [f"{name} {number}", *([turn.agent] if turn.agent else [])]
        about += [f"version {' and '.join(versions)}"] if versions else []
        about += [] if turn.reward is None else [f"reward {turn.reward:g}"]
        found[", ".join(about)] = turn.text
        if turn.replies:
            found[f"reply to turn {number}, after {turn.environment_s:.2f} s"] = "\n".join(turn.replies)
    verdict = {"why there is no reward": whole.verdict_failure, "printed by the reward function": whole.verdict_output}
    return found | {title: text for title, text in verdict.items() if text}


def prompt_ids(whole: Trajectory) -> list[int]:
    """The tokens before the first that was sampled."""
    ids, sampled = whole.token_ids.tolist(), whole.sampled.tolist()
    return list(ids[: sampled.index(True)] if True in sampled else ids)


def tokens(whole: Trajectory, texts: TokenTexts | None, start: int = 0, num: int | None = None) -> Iterator[Token]:
    """`num` tokens from `start` on; without `texts` their ids stand for them."""
    ids = whole.token_ids.tolist()
    behind = min(start, 1)  # each is read behind its neighbour, so the one before is looked at, too
    wanted = ids[start - behind : None if num is None else start + num]
    words = (texts.pieces(wanted) if texts else [str(id) for id in wanted])[behind:]
    version_of = {place: s.version for s in whole.spans for place in range(s.start, s.end)}
    for place, word in enumerate(words, start):
        logprob = float(whole.logprobs[place]) if whole.sampled[place] else None
        version = version_of.get(place)
        yield Token(position=place, id=ids[place], text=word, logprob=logprob, version=version)


def _unknown(connection: sqlite3.Connection, run_dir: Path, id: str) -> str:
    """Why there is nothing to show: it is under way, it was lost, or there never was any."""
    parts = _ID.fullmatch(id)
    serial, prompt_id = (int(parts["serial"]), parts["prompt_id"]) if parts else (None, id)
    attempts = dict(connection.execute(_ATTEMPTS, (serial, prompt_id)))
    state = attempts.get(int(parts["attempt"] or 1)) if parts else None
    words: str = ATTEMPT_WORDS.get(state, "there is no trajectory {id} in {run_dir}")
    message = words.format(id=id, run_dir=run_dir)
    narrowed = connection.execute(_LIKE, (serial, prompt_id, id, _SEARCHED)).fetchall()
    any_id = connection.execute("SELECT id FROM trajectories LIMIT ?", (_SEARCHED,)).fetchall()
    known = [found for (found,) in narrowed or any_id]
    similar = get_close_matches(id, known, n=_SIMILAR, cutoff=0.0)
    return message + (f". Similar ones: {', '.join(similar)}" if similar else ", and no other yet")

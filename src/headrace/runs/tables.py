"""Runs, accounts and trajectories as rows of text: the terminal prints them, and the page shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.ledger.ledger import Amount, Books
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.report import ago, count, short
from headrace.runs.show import FINISH_WORDS, TokenTexts, TrajectoryDetails, fate, why_dropped
from headrace.types import FinishReason, Trajectory

RUN_COLUMNS = ("run", "state", "steps", "held-out", "restarts", "trained", "written")
ACCOUNT_COLUMNS = ("account", "tokens", "share", "answers", "mean length")
_ACCOUNT_WORDS = {
    "trained": "the policy learnt from these: the useful part",
    "buffered": "complete and scored; they wait for the learner",
    "in flight": "being written or scored right now",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where some of the generated tokens went; `reason` is that of a drop.

    Example:
        Account(state="dropped", reason="stale", amount=Amount(tokens=1608, trajectories=88))
    """

    state: str  # trained, dropped, buffered or in flight
    amount: Amount
    reason: str | None = None

    @property
    def name(self) -> str:
        return f"dropped: {self.reason}" if self.reason else self.state

    @property
    def explanation(self) -> str:
        return why_dropped(self.reason) if self.reason else _ACCOUNT_WORDS[self.state]

    def row(self, generated: Amount) -> tuple[str, ...]:
        """Under `ACCOUNT_COLUMNS`."""
        return _account_row(self.name, self.amount, generated)


def accounts(books: Books) -> list[Account]:
    """All but what was generated: trained first, then drops from the largest, then what is under way."""
    dropped = sorted(books.dropped.items(), key=lambda item: -item[1].tokens)
    return [
        Account(state="trained", amount=books.trained),
        *(Account(state="dropped", reason=reason, amount=amount) for reason, amount in dropped),
        Account(state="buffered", amount=books.buffered),
        Account(state="in flight", amount=books.in_flight),
    ]


def generated_row(books: Books) -> tuple[str, ...]:
    """Under `ACCOUNT_COLUMNS`."""
    return _account_row("generated", books.generated, books.generated)


def _account_row(name: str, amount: Amount, generated: Amount) -> tuple[str, ...]:
    share = amount.tokens / generated.tokens if generated.tokens else 0.0
    length = f"{amount.tokens / amount.trajectories:.1f}" if amount.trajectories else "-"
    return (name, f"{amount.tokens:,}", f"{share:.1%}", f"{amount.trajectories:,}", length)


def run_row(facts: RunFacts, arrow: str = " → ") -> tuple[str, ...]:
    """Under `RUN_COLUMNS`."""
    cells = [f"{facts.steps}/{facts.wanted_steps}", scores(facts, arrow)]
    cells += [str(facts.num_restarts or "-"), short(facts.trained_tokens)]
    if facts.state is RunState.UNREADABLE:
        cells = [""] * len(cells)
    return (facts.path.name or str(facts.path), str(facts.state), *cells, ago(facts.written))


def scores(facts: RunFacts, arrow: str = " → ") -> str:
    """On held-out prompts, before and after."""
    known = [f"{score:.3f}" for score in (facts.score_before, facts.score_after) if score is not None]
    return arrow.join(known) or "-"


def trajectory_facts(found: TrajectoryDetails) -> dict[str, str]:
    """What became of a trajectory, and how it came about."""
    finish = "not finished"
    if found.finish:
        known = found.finish in FINISH_WORDS
        finish = f"{found.finish}: {FINISH_WORDS[FinishReason(found.finish)]}" if known else found.finish
    reward = "none" if found.reward is None else f"{found.reward:g}"
    parts = "  ".join(f"{name} {value:g}" for name, value in found.reward_parts.items())
    versions = [f"version {span.version} sampled {count(span.end - span.start, 'token')}" for span in found.spans]
    return {
        "fate": fate(found),
        "prompt id": found.prompt_id,
        "group": "not known" if found.serial is None else f"{found.serial}, attempt {found.attempt}",
        "finish": f"{finish}, after {count(found.num_tokens, 'token')}",
        "reward": f"{reward}  ({parts})" if parts else reward,
        "policy": ", then ".join(versions) or "not known",
        "seconds": "  ".join(f"{name} {at_s:.2f}" for name, at_s in found.times_s.items()),
    }


def why_no_tokens(found: TrajectoryDetails) -> str:
    """Of a trajectory that is not `whole`."""
    pruned = "buffered" in found.times_s
    why = "this old (recovery.journal_steps)" if pruned else "that never reached the buffer"
    return f"No tokens are kept of a trajectory {why}."


def prompt_ids(whole: Trajectory) -> list[int]:
    """The tokens before the first that was sampled."""
    ids, sampled = whole.token_ids.tolist(), whole.sampled.tolist()
    return list(ids[: sampled.index(True)] if True in sampled else ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a trajectory; `logprob` and `version` only where it was sampled.

    Example:
        Token(position=7, id=13, text="2", logprob=-0.1, version=7)
    """

    position: int
    id: int
    text: str
    logprob: float | None = None
    version: int | None = None

    @property
    def probability(self) -> float | None:
        """What the policy gave this token when it chose it."""
        return None if self.logprob is None else math.exp(min(self.logprob, 0.0))


def tokens(whole: Trajectory, texts: TokenTexts | None, start: int = 0, num: int | None = None) -> Iterator[Token]:
    """`num` tokens from `start` on; without `texts` their ids stand for them."""
    ids = whole.token_ids.tolist()
    stop = len(ids) if num is None else min(start + num, len(ids))
    behind = min(start, 1)  # each is read behind its neighbour, so the one before is looked at, too
    wanted = ids[start - behind : stop]
    words = (texts.pieces(wanted) if texts else [str(id) for id in wanted])[behind:]
    version_of = {place: span.version for span in whole.spans for place in range(span.start, span.end)}
    for place in range(start, stop):
        sampled = bool(whole.sampled[place])
        logprob = float(whole.logprobs[place]) if sampled else None
        version = version_of.get(place) if sampled else None
        yield Token(position=place, id=ids[place], text=words[place - start], logprob=logprob, version=version)

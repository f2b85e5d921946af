"""One trajectory, ready to be shown: its facts in words, and some of its tokens with their texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.dashboard.series import looking_into
from headrace.errors import HeadraceError
from headrace.runs.show import FINISH_WORDS, TokenTexts, TrajectoryDetails, fate, read_trajectory, token_texts
from headrace.types import FinishReason, Trajectory

TOKENS_SHOWN = 400  # at once
MOST_PROMPT_TOKENS = 4000  # of a prompt's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of a trajectory; `version` and `logprob` only where it was sampled.

    Example:
        Token(position=7, id=13, text="2", sampled=True, logprob=-0.1, version=7)
    """

    position: int
    id: int
    text: str
    sampled: bool
    logprob: float | None = None
    version: int | None = None

    @property
    def probability(self) -> float | None:
        """What the policy gave this token when it chose it."""
        return None if self.logprob is None else math.exp(min(self.logprob, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the page shows of a trajectory; `prompt` is None where no tokens were kept.

    Example:
        Answer(facts={"fate": "trained on in step 8 with lag 0", ...}, prompt="12+9=", text="21", why_no_tokens="",
            tokens=[Token(...)], num_tokens=8, start=0, as_ids=False)
    """

    facts: Mapping[str, str]
    prompt: str | None = None
    text: str = ""
    why_no_tokens: str = ""
    tokens: Sequence[Token] = ()
    num_tokens: int = 0
    start: int = 0
    as_ids: bool = False  # there is no tokenizer to be read


def read_answer(run_dir: Path, id: str, start: int = 0) -> Answer:
    """The trajectory of this id, with its tokens from `start` on."""
    with looking_into(run_dir):  # what is wrong with the file is said in words
        found = read_trajectory(run_dir, id)
    if found.whole is None:
        pruned = "buffered" in found.times_s
        why = "this old (recovery.journal_steps)" if pruned else "that never reached the buffer"
        return Answer(facts=_facts(found), why_no_tokens=f"No tokens are kept of an answer {why}.")
    try:
        texts = token_texts(run_dir)
    except HeadraceError:
        texts = None  # the settings, which say where the tokenizer is, cannot be read
    whole, ids = found.whole, found.whole.token_ids.tolist()
    sampled = whole.sampled.tolist()
    prompt_ids = (ids[: sampled.index(True)] if True in sampled else ids)[-MOST_PROMPT_TOKENS:]
    start = min(max(start, 0), len(ids) - 1) // TOKENS_SHOWN * TOKENS_SHOWN if ids else 0
    return Answer(
        facts=_facts(found),
        prompt=texts.text(prompt_ids) if texts else " ".join(map(str, prompt_ids)),
        text=whole.text,
        tokens=_tokens(whole, texts, start),
        num_tokens=len(ids),
        start=start,
        as_ids=texts is None,
    )


def _facts(found: TrajectoryDetails) -> dict[str, str]:
    finish = "not finished"
    if found.finish:
        known = found.finish in FINISH_WORDS
        finish = f"{found.finish}: {FINISH_WORDS[FinishReason(found.finish)]}" if known else found.finish
    versions = [f"version {span.version} sampled {span.end - span.start} tokens" for span in found.spans]
    parts = {f"reward part: {name}": f"{value:g}" for name, value in found.reward_parts.items()}
    return {
        "fate": fate(found),
        "reward": "none" if found.reward is None else f"{found.reward:g}",
        **parts,
        "ended by": f"{finish}, after {found.num_tokens:,} tokens",
        "policy": ", then ".join(versions) or "not known",
        "prompt id": found.prompt_id,
        "group": "not known" if found.serial is None else f"{found.serial}, attempt {found.attempt}",
        "seconds on the run's clock": ", ".join(f"{name} {at_s:.2f}" for name, at_s in found.times_s.items()),
    }


def _tokens(whole: Trajectory, texts: TokenTexts | None, start: int) -> list[Token]:
    """Some tokens; each is read behind its neighbour, so the one before them is looked at, too."""
    ids = whole.token_ids.tolist()
    stop, behind = min(start + TOKENS_SHOWN, len(ids)), min(start, 1)
    wanted = ids[start - behind : stop]
    words = (texts.pieces(wanted) if texts else [str(id) for id in wanted])[behind:]
    version_of = {place: span.version for span in whole.spans for place in range(span.start, span.end)}
    return [
        Token(
            position=place,
            id=ids[place],
            text=words[place - start],
            sampled=bool(whole.sampled[place]),
            logprob=float(whole.logprobs[place]) if whole.sampled[place] else None,
            version=version_of.get(place),
        )
        for place in range(start, stop)
    ]

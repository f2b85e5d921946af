"""One trajectory, ready to be shown: its facts in words, and some of its tokens with their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.dashboard.series import looking_into
from headrace.errors import HeadraceError
from headrace.runs.show import read_trajectory, token_texts
from headrace.runs.tables import Token, prompt_ids, tokens, trajectory_facts, why_no_tokens

TOKENS_SHOWN = 400  # at once
MOST_PROMPT_TOKENS = 4000  # of a prompt's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the page shows of a trajectory; `prompt` is None where no tokens were kept."""

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
        return Answer(facts=trajectory_facts(found), why_no_tokens=why_no_tokens(found))
    try:
        texts = token_texts(run_dir)
    except HeadraceError:
        texts = None  # the settings, which say where the tokenizer is, cannot be read
    given, num_tokens = prompt_ids(found.whole)[-MOST_PROMPT_TOKENS:], len(found.whole.token_ids)
    start = min(max(start, 0), max(num_tokens - 1, 0)) // TOKENS_SHOWN * TOKENS_SHOWN
    return Answer(
        facts=trajectory_facts(found),
        prompt=texts.text(given) if texts else " ".join(map(str, given)),
        text=found.whole.text,
        tokens=list(tokens(found.whole, texts, start, TOKENS_SHOWN)),
        num_tokens=num_tokens,
        start=start,
        as_ids=texts is None,
    )

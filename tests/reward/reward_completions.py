"""Completions to score, and the type of the fixture that makes scorers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from headrace.reward.scorer import Scorer
from headrace.types import Completion

MakeScorer = Callable[..., Awaitable[Scorer]]


def completion(text: str = "21", /, *, num_tokens: int = 3, prompt: str = "12+9=", **fields: Any) -> Completion:
    return Completion(prompt=prompt, text=text, fields=fields, num_tokens=num_tokens, finish="eos")

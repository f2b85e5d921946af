"""The built-in reward `reasoning-gym`: a task's own scoring of an answer. Needs reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import reasoning_gym

from headrace.errors import RewardError


def task_score(task: str, answer: str, entry: Mapping[str, Any]) -> float:
    """What `task` gives for `answer` to its data set entry."""
    return float(_scoring(task)(answer, dict(entry)))


@cache  # each call of get_score_answer_fn builds a whole data set
def _scoring(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        scoring: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no task '{task}'") from error
    return scoring

"""The built-in reward `reasoning-gym`: a task's own scoring of an answer. Needs reasoning-gym."""

from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from headrace.errors import RewardError


@cache  # each call of get_score_answer_fn builds a whole data set
def scoring(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The function that gives the score of an answer to a data set entry of `task`."""
    try:
        scoring: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no task '{task}'") from error
    return scoring

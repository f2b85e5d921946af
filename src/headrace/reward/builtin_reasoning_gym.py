"""The built-in reward `reasoning-gym`: a task's own scoring of an answer. Needs reasoning-gym."""

from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from headrace.errors import RewardError
from headrace.reward.function import tagged_answer
from headrace.types import Completion


@cache  # each call of get_score_answer_fn builds a whole data set
def _scoring(task: str) -> Callable[[str, dict[str, Any]], Any]:
    try:
        return reasoning_gym.get_score_answer_fn(task)  # type: ignore[no-any-return]
    except ValueError as error:
        raise RewardError(f"reasoning-gym has no task '{task}'") from error


def score(completion: Completion) -> float:
    try:
        task, entry = completion.fields["reasoning_gym_task"], completion.fields["entry"]
    except KeyError as error:
        raise RewardError(f"the prompt has no field {error}; is prompts.source 'reasoning-gym:TASK'?") from error
    return float(_scoring(str(task))(tagged_answer(completion.text), dict(entry)))

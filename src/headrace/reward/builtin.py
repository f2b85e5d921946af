"""The built-in reward functions. Optional libraries are loaded by the files of their names."""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace.errors import RewardError
from headrace.types import Completion
from headrace.user_code import load_optional

Reward = Callable[[Completion], float]

BUILTIN_NAMES = ("exact", "regex", "reasoning-gym", "math")


def builtin_function(name: str, answer_field: str, pattern: str) -> Reward:
    match name:
        case "exact":  # 1 if the text is the expected answer, ignoring white space around it
            return lambda c: float(c.text.strip() == expected_answer(c, answer_field))
        case "regex":
            return regex(answer_field, pattern)
        case "reasoning-gym":
            return reasoning_gym_task()
        case "math":  # 1 if the answer is mathematically equal to the expected one
            equal = load_optional("headrace.reward.builtin_math_verify", "math_verify", "tasks").math_equal
            return lambda c: float(equal(c.text, expected_answer(c, answer_field)))
    raise RewardError(f"reward.function = '{name}' is not built in; there are {', '.join(BUILTIN_NAMES)}")


def regex(answer_field: str, pattern: str) -> Reward:
    """1 if the last match of `pattern` (its first group, if it has one) is the expected answer."""
    if not pattern:
        raise RewardError("reward.function = 'regex' needs reward.pattern")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RewardError(f"reward.pattern = '{pattern}' is not a regular expression: {error}") from error

    def score(completion: Completion) -> float:
        matches = list(compiled.finditer(completion.text))
        found = matches[-1].group(1 if compiled.groups else 0) if matches else None
        return float(found is not None and found.strip() == expected_answer(completion, answer_field))

    return score


def reasoning_gym_task() -> Reward:
    """The score that the prompt's reasoning-gym task gives."""
    room = load_optional("headrace.reward.builtin_reasoning_gym", "reasoning_gym", "tasks")

    def score(completion: Completion) -> float:
        try:
            task, entry = completion.fields["reasoning_gym_task"], completion.fields["entry"]
        except KeyError as error:
            raise RewardError(f"the prompt has no field {error}; is prompts.source 'reasoning-gym:TASK'?") from error
        return float(room.task_score(str(task), tagged_answer(completion.text), entry))

    return score


def expected_answer(completion: Completion, answer_field: str) -> str:
    if answer_field not in completion.fields:
        there = ", ".join(map(str, completion.fields)) or "none"
        raise RewardError(f"reward.answer_field = '{answer_field}' is not a field of the prompt; there are: {there}")
    return str(completion.fields[answer_field]).strip()


def tagged_answer(text: str) -> str:
    """The content of the last <answer>...</answer>, or the whole text if there is none."""
    before, end_tag, _ = text.rpartition("</answer>")
    _, start_tag, answer = before.rpartition("<answer>")
    return (answer if end_tag and start_tag else text).strip()

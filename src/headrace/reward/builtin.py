"""The built-in reward functions. Optional libraries are loaded by the files of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import RewardError
from headrace.types import Completion
from headrace.user_code import load_optional

Reward = Callable[[Completion], float]

BUILTIN_NAMES = ("exact", "regex", "reasoning-gym", "math")


def builtin_function(name: str, answer_field: str, pattern: str) -> Reward:
    match name:
        case "exact":
            return exact(answer_field)
        case "regex":
            return regex(answer_field, pattern)
        case "reasoning-gym":
            return reasoning_gym_task()
        case "math":
            return math(answer_field)
    raise RewardError(f"reward.function = '{name}' is not built in; there are {', '.join(BUILTIN_NAMES)}")


def exact(answer_field: str) -> Reward:
    """1 if the text is the expected answer, ignoring white space around it."""

    def score(completion: Completion) -> float:
        return float(completion.text.strip() == expected_answer(completion, answer_field))

    return score


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
    task_score: Callable[[str, str, Mapping[str, Any]], float]
    task_score = load_optional("headrace.reward.builtin_reasoning_gym", "reasoning_gym", "tasks").task_score

    def score(completion: Completion) -> float:
        try:
            task, entry = completion.fields["reasoning_gym_task"], completion.fields["entry"]
        except KeyError as error:
            raise RewardError(f"the prompt has no field {error}; is prompts.source 'reasoning-gym:TASK'?") from error
        return task_score(str(task), tagged_answer(completion.text), entry)

    return score


def math(answer_field: str) -> Reward:
    """1 if the answer is mathematically equal to the expected one."""
    math_equal: Callable[[str, str], float]
    math_equal = load_optional("headrace.reward.builtin_math_verify", "math_verify", "tasks").math_equal

    def score(completion: Completion) -> float:
        return math_equal(completion.text, expected_answer(completion, answer_field))

    return score


def expected_answer(completion: Completion, answer_field: str) -> str:
    if answer_field not in completion.fields:
        there = ", ".join(map(str, completion.fields)) or "none"
        raise RewardError(f"reward.answer_field = '{answer_field}' is not a field of the prompt; there are: {there}")
    return str(completion.fields[answer_field]).strip()


def tagged_answer(text: str) -> str:
    """The content of the last <answer>...</answer>, or the whole text if there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return text.strip()
    return text[start + len("<answer>") : end].strip()

"""Tasks of reasoning-gym, each a source of prompts with its name, and their scoring. pip install reasoning-gym.

[prompts]
source = "reasoning_gym_task.py:course_schedule"
count = 4000  # they are made before the run begins
[reward]
function = "reasoning_gym_task.py:score"
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from headrace.types import Completion

with warnings.catch_warnings():  # a library that it needs warns about its own source
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS


def __getattr__(task: str) -> Callable[..., Iterator[dict[str, Any]]]:
    if task.startswith("__"):
        raise AttributeError(task)
    return partial(problems, task)


def problems(task: str, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Its problems, with default settings. The field `entry` is the task's own: its scoring asks for it."""
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=4, cutoff=0.4) or sorted(DATASETS)[:4]
        raise ValueError(f"reasoning-gym has no task '{task}'; nearest: {', '.join(near)}")
    for entry in reasoning_gym.create_dataset(task, size=count, seed=seed):
        yield {"prompt": entry["question"], "answer": entry["answer"], "task": task, "entry": entry}


@cache  # each call builds a whole data set
def scoring(task: str) -> Callable[[str, dict[str, Any]], Any]:
    found: Callable[[str, dict[str, Any]], Any] = reasoning_gym.get_score_answer_fn(task)
    return found


def score(completion: Completion) -> float:
    """The task's own scoring of the last <answer>...</answer>, or of the whole text if there is none."""
    before, end_tag, _ = completion.text.rpartition("</answer>")
    _, start_tag, answer = before.rpartition("<answer>")
    found = (answer if end_tag and start_tag else completion.text).strip()
    return float(scoring(str(completion.fields["task"]))(found, dict(completion.fields["entry"])))

"""Prompts from a reasoning-gym task, made on demand."""

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from headrace.errors import DataError

# A library it pulls in greets its first import with warnings about its own source.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS


class ReasoningGymSource:
    """Entries of one task. The field `entry` is the task's own: its scorer asks for it."""

    def __init__(self, task: str, *, count: int, seed: int) -> None:
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, n=4, cutoff=0.4) or sorted(DATASETS)[:4]
            raise DataError(f"reasoning-gym has no task '{task}' (prompts.source); nearest: {', '.join(near)}")
        self._task = task
        try:
            self._entries = reasoning_gym.create_dataset(task, size=count, seed=seed)
        except (AssertionError, ValueError) as error:
            told = f"reasoning-gym task '{task}' cannot be made with its default settings"
            raise DataError(f"{told}: {error}") from error

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        entry = self._entries[i]
        problem = {"prompt": entry["question"], "answer": entry["answer"]}
        return {**problem, "reasoning_gym_task": self._task, "entry": entry}

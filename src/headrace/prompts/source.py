"""Opens a prompt source: the built-in task, a file, a data set or a reasoning-gym task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from headrace.errors import DataError
from headrace.prompts import arithmetic
from headrace.prompts.source_jsonl import JsonlSource
from headrace.roles import PromptSource
from headrace.user_code import load_optional

REASONING_GYM = "reasoning-gym:"


def open_source(spec: str, *, count: int, seed: int, prompt_field: str = "prompt") -> PromptSource:
    """The records that `spec` names; `count` and `seed` are for sources that make their prompts."""
    if spec == "arithmetic":
        return arithmetic.ArithmeticSource(count=count, seed=seed)
    if spec.startswith(REASONING_GYM):
        room = load_optional("headrace.prompts.source_reasoning_gym", "reasoning_gym", "tasks")
        return cast(PromptSource, room.ReasoningGymSource(spec.removeprefix(REASONING_GYM), count=count, seed=seed))
    path = Path(spec).expanduser()
    if path.name.endswith((".jsonl", ".jsonl.gz")) and os.path.isfile(path):
        source: PromptSource = JsonlSource(path, prompt_field=prompt_field)
    elif (path.suffix == ".parquet" and os.path.isfile(path)) or os.path.isdir(path):
        room = load_optional("headrace.prompts.source_datasets", "datasets", "data")
        source = room.DatasetsSource(path, prompt_field=prompt_field)
    else:
        raise DataError(
            f"prompts.source = '{spec}' is {'not of a known kind' if os.path.exists(path) else 'not there'}; use "
            "'arithmetic', a .jsonl, .jsonl.gz or .parquet file, a datasets directory, or 'reasoning-gym:TASK'"
        )
    if len(source) == 0:
        raise DataError(f"{path} is empty: it has no records")
    return source


def is_generated(spec: str) -> bool:
    """Whether a source makes its prompts instead of reading them."""
    return spec == "arithmetic" or spec.startswith(REASONING_GYM)


def default_reward(spec: str) -> str:
    if spec == "arithmetic":
        return arithmetic.REWARD
    return "reasoning-gym" if spec.startswith(REASONING_GYM) else "exact"

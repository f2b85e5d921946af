"""Opens a prompt source by its name: the built-in task, a file, a data set directory or a reasoning-gym task."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, cast

from headrace.errors import DataError, MissingExtraError
from headrace.prompts import arithmetic
from headrace.prompts.source_jsonl import JsonlSource
from headrace.roles import PromptSource

REASONING_GYM = "reasoning-gym:"


def open_source(spec: str, *, count: int, seed: int, prompt_field: str = "prompt") -> PromptSource:
    """The records that `spec` names; `count` and `seed` are for sources that make their prompts."""
    if spec == "arithmetic":
        return arithmetic.ArithmeticSource(count=count, seed=seed)
    if spec.startswith(REASONING_GYM):
        room = _optional("source_reasoning_gym", "reasoning_gym", "tasks")
        return cast(PromptSource, room.ReasoningGymSource(spec.removeprefix(REASONING_GYM), count=count, seed=seed))
    path = Path(spec).expanduser()
    source = _open_path(path, spec, prompt_field)
    if len(source) == 0:
        raise DataError(f"{path} is empty: it has no records")
    return source


def is_generated(spec: str) -> bool:
    """True for a source that makes its prompts instead of reading them."""
    return spec == "arithmetic" or spec.startswith(REASONING_GYM)


def default_reward(spec: str) -> str:
    """The reward function a source brings along when reward.function is empty."""
    if spec == "arithmetic":
        return arithmetic.REWARD
    return "reasoning-gym" if spec.startswith(REASONING_GYM) else "exact"


def _open_path(path: Path, spec: str, prompt_field: str) -> PromptSource:
    is_jsonl, is_parquet = path.name.endswith((".jsonl", ".jsonl.gz")), path.name.endswith(".parquet")
    if not (is_jsonl or is_parquet or path.is_dir()):
        raise DataError(
            f"prompts.source = '{spec}' is {'not a file of a known kind' if path.exists() else 'not there'}; use "
            "'arithmetic', a .jsonl, .jsonl.gz or .parquet file, a datasets directory, or 'reasoning-gym:TASK'"
        )
    if path.is_dir():
        room = _optional("source_datasets", "datasets", "data")
        return cast(PromptSource, room.DatasetsSource(path, prompt_field=prompt_field))
    if not path.is_file():
        raise DataError(f"{path} is not there (prompts.source)")
    if is_jsonl:
        return JsonlSource(path, prompt_field=prompt_field)
    room = _optional("source_parquet", "pyarrow", "data")
    return cast(PromptSource, room.ParquetSource(path, prompt_field=prompt_field))


def _optional(module: str, library: str, extra: str) -> Any:
    """The one file that imports an optional library, loaded only when it is asked for."""
    try:
        return importlib.import_module(f"headrace.prompts.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == library:
            raise MissingExtraError(library, extra) from error
        raise

"""Prompt sources: the built-in task, a file of records, a data set or a reasoning-gym task.

A file is checked when it is opened, then read by an index of offsets.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from headrace.config_file import did_you_mean
from headrace.errors import DataError
from headrace.prompts import arithmetic
from headrace.prompts.lines import KINDS, kind_of, open_lines
from headrace.roles import PromptSource
from headrace.user_code import load_function, load_optional, names_file, short_traceback

REASONING_GYM = "reasoning-gym:"
MAX_DEPTH = 100  # of lists and objects within each other: what handles a record later is recursive


def open_source(
    spec: str, *, count: int, seed: int, prompt_field: str = "prompt", setting: str = "prompts.source"
) -> PromptSource:
    """The records that `spec` names; `count` and `seed` are for sources that make their prompts."""
    if spec == "arithmetic":
        return arithmetic.ArithmeticSource(count=count, seed=seed)
    if spec.startswith(REASONING_GYM):
        task, module = spec.removeprefix(REASONING_GYM), "headrace.prompts.source_reasoning_gym"
        room = load_optional(module, "reasoning_gym", "tasks")
        return cast(PromptSource, room.ReasoningGymSource(task, count=count, seed=seed))
    if names_file(spec.rpartition(":")[0]):
        return _made_by(spec, setting, prompt_field, count=count, seed=seed)
    path = Path(spec).expanduser()
    if kind_of(path) in KINDS and os.path.isfile(path):
        source: PromptSource = RecordFile(path, prompt_field=prompt_field)
    elif (path.suffix == ".parquet" and os.path.isfile(path)) or os.path.isdir(path):
        room = load_optional("headrace.prompts.source_datasets", "datasets", "data")
        source = room.open_dataset(path, prompt_field)
    else:
        is_there = os.path.exists(path)
        use = "; use 'arithmetic', a .jsonl, .json, .csv or .parquet file, a datasets directory, "
        use += "'reasoning-gym:TASK', or a function of yours, 'file.py:function'"
        hint = use if is_there else did_you_mean(str(path)) or use
        raise DataError(f"{setting} = '{spec}' is {'not of a known kind' if is_there else 'not there'}{hint}")
    if len(source) == 0:
        raise DataError(f"{path} is empty: it has no records")
    return source


def _made_by(spec: str, setting: str, prompt_field: str, **given: int) -> PromptSource:
    """The records that the user's function returns for `count` and `seed`."""
    made = load_function(spec, setting, DataError)
    try:
        records = list(made(**given))
    except Exception as error:  # the user's code
        raise DataError(f"{setting} = '{spec}' failed:\n{short_traceback(error)}") from error
    for number, record in enumerate(records, 1):
        if not isinstance(record, Mapping):
            raise DataError(f"{setting} = '{spec}': record {number} is no dict but {type(record).__name__}")
        prompt_key(record, prompt_field, f"{spec}, record {number}")
    if not records:
        raise DataError(f"{setting} = '{spec}' returned no records")
    return records


def default_reward(spec: str) -> str:
    if spec == "arithmetic":
        return arithmetic.REWARD
    return "reasoning-gym" if spec.startswith(REASONING_GYM) else "exact"


def prompt_key(names: Collection[str], prompt_field: str, where: str) -> str:
    """The field with the prompt: `prompt_field`, or `messages` if that is left at its default."""
    if prompt_field in names:
        return prompt_field
    if prompt_field == "prompt" and "messages" in names:
        return "messages"
    has = ", ".join(sorted(map(str, names))) or "none"
    raise DataError(f"{where}: no field '{prompt_field}' (prompts.prompt_field); the record has: {has}")


class RecordFile:
    """One JSON object per line, as {"prompt": "12+9=", "answer": "21"}, or what can be made so (lines.py)."""

    def __init__(self, path: Path, *, prompt_field: str = "prompt") -> None:
        self._path, self._prompt_field = path, prompt_field
        # Three integers per record, so that memory stays small however long the prompts are.
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        with open_lines(path) as file:
            start = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._parse(line, number)
                    self._starts.append(start)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                start += len(line)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        line = os.pread(self._descriptor, self._sizes[i], self._starts[i])
        return self._parse(line, self._lines[i])

    def _parse(self, line: bytes, number: int) -> Mapping[str, Any]:
        where = f"{self._path}, {'record' if kind_of(self._path) == '.json' else 'line'} {number}"
        try:
            record = json.loads(line)
            is_deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_deep(record)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        except RecursionError:
            is_deep = True
        if is_deep:
            raise DataError(f"{where}: lists and objects are nested more than {MAX_DEPTH} deep")
        if not isinstance(record, dict):
            raise DataError(f"{where}: a JSON object is needed, not {type(record).__name__}")
        prompt_key(record, self._prompt_field, where)
        return record


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [x for values in inner for x in values]
    return bool(level)

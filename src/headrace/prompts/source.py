"""Prompt sources: a file of records, a data set, or what a function of the user makes.

A file of records (JSON lines, JSON or CSV, compressed with gzip or not) is checked when it is
opened, then read by an index of offsets.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import shutil
import sys
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from headrace.config_file import did_you_mean
from headrace.errors import DataError
from headrace.roles import PromptSource
from headrace.user_code import load_function, load_optional, names_file, short_traceback

KINDS, PACKED = (".jsonl", ".json", ".csv"), ".gz"
MAX_DEPTH = 100  # of lists and objects within each other: what handles a record later is recursive


def open_source(
    spec: str, *, count: int, seed: int, prompt_field: str = "prompt", setting: str = "prompts.source"
) -> PromptSource:
    """The records that `spec` names; `count` and `seed` are for sources that make their prompts."""
    if names_file(spec.rpartition(":")[0]):
        return _made_by(spec, setting, prompt_field, count=count, seed=seed)
    path = Path(spec).expanduser()
    if kind_of(path) in KINDS and os.path.isfile(path):
        source: PromptSource = RecordFile(path, prompt_field=prompt_field)
    elif (path.suffix == ".parquet" and os.path.isfile(path)) or (spec and os.path.isdir(path)):
        room = load_optional("headrace.prompts.source_datasets", "datasets", "data")
        source = room.open_dataset(path, prompt_field)
    else:
        state = "not of a known kind" if os.path.exists(path) else "not there"
        state = state if spec else "empty"
        use = "; use a .jsonl, .json, .csv or .parquet file, a datasets directory, "
        use += "or a function of yours, 'file.py:function' (recipes/reasoning_gym_task.py:TASK makes reasoning-gym's)"
        hint = did_you_mean(str(path)) if state == "not there" else ""
        raise DataError(f"{setting} = '{spec}' is {state}{hint or use}")
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


def prompt_key(names: Collection[str], prompt_field: str, where: str) -> str:
    """The field with the prompt: `prompt_field`, or `messages` if that is left at its default."""
    if prompt_field in names:
        return prompt_field
    if prompt_field == "prompt" and "messages" in names:
        return "messages"
    has = ", ".join(sorted(map(str, names))) or "none"
    raise DataError(f"{where}: no field '{prompt_field}' (prompts.prompt_field); the record has: {has}")


class RecordFile:
    """One JSON object per line, as {"prompt": "12+9=", "answer": "21"}, or what is made so."""

    def __init__(self, path: Path, *, prompt_field: str = "prompt") -> None:
        self._path, self._prompt_field = path, prompt_field
        # Start, size and line of each record: memory stays small however long the prompts are.
        self._index = array("q")
        with open_lines(path) as file:
            start = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._parse(line, number)
                    self._index.extend((start, len(line), number))
                start += len(line)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._index) // 3

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        start, size, number = self._index[3 * i : 3 * i + 3]
        return self._parse(os.pread(self._descriptor, size, start), number)

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


def kind_of(path: Path) -> str:
    """The suffix of the file, `.jsonl` of `a.jsonl.gz`."""
    return Path(path.name.removesuffix(PACKED)).suffix


def open_lines(path: Path) -> IO[bytes]:
    """One JSON value per line. What is not JSON lines becomes a temporary file, for cheap random access.

    A row of a CSV file keeps the number of its line; of a JSON file, line 3 is record 3.
    """
    try:
        if path.suffix == ".jsonl":
            return path.open("rb")
        opened = gzip.open if path.suffix == PACKED else open
        with contextlib.ExitStack() as undo, opened(path, "rb") as file:
            plain = undo.enter_context(tempfile.TemporaryFile())
            if kind_of(path) == ".jsonl":
                shutil.copyfileobj(file, plain)
            else:
                lines = _csv_lines if kind_of(path) == ".csv" else _json_lines
                plain.writelines(map(str.encode, lines(path, file.read().decode("utf-8-sig"))))
            plain.seek(0)
            undo.pop_all()
            return plain
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _csv_lines(path: Path, text: str) -> Iterator[str]:
    """Each row as an object, by the names in the first row; blank lines in place of its other lines."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    before = csv.field_size_limit(sys.maxsize)  # by itself it is less than a long prompt
    names: list[str] = []
    line = 1
    try:
        for row in reader:
            if names and len(row) not in (0, len(names)):
                raise DataError(f"{path}, line {line}: {len(row)} fields, and the header has {len(names)}")
            yield json.dumps(dict(zip(names, row, strict=True))) if names and row else ""
            yield "\n" * (reader.line_num + 1 - line)
            line = reader.line_num + 1
            names = names or row
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two fields of the header have one name: {', '.join(names)}")
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _json_lines(path: Path, text: str) -> Iterator[str]:
    """The values of a list, or of the one list in an object."""
    try:
        content = json.loads(text) if text.strip() else []
        values = content.values() if isinstance(content, dict) else [content]
        lists = [value for value in values if isinstance(value, list)]
        if len(lists) != 1:
            what = f"an object with {len(lists)} lists" if isinstance(content, dict) else "a single value"
            raise DataError(f"{path}: a list of objects is needed, or an object with one such list; it is {what}")
        yield from (f"{json.dumps(value)}\n" for value in lists[0])
    except json.JSONDecodeError as error:
        hint = "; if it has one object per line, call it .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg}){hint}") from error
    except RecursionError as error:
        raise DataError(f"{path}: lists and objects are nested too deep") from error

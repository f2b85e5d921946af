"""Prompts from a JSON-lines file: checked when it is opened, then read by an index of offsets."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from headrace.errors import DataError
from headrace.prompts.render import prompt_key

MAX_DEPTH = 100  # of lists and objects within each other: what handles a record later is recursive


class JsonlSource:
    """One JSON object per line, as {"prompt": "12+9=", "answer": "21"}; blank lines are skipped."""

    def __init__(self, path: Path, *, prompt_field: str = "prompt") -> None:
        self._path, self._prompt_field = path, prompt_field
        # Three integers per record, so that memory stays small however long the prompts are.
        self._starts, self._sizes, self._lines = array("q"), array("q"), array("q")
        with _open(path) as file:
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
        where = f"{self._path}, line {number}"
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
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for values in inner for x in values]
    return bool(level)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb") if path.suffix != ".gz" else _unpacked(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _unpacked(path: Path) -> IO[bytes]:
    """The plain text in a nameless temporary file: a compressed one has no cheap random access."""
    with contextlib.ExitStack() as undo:
        plain = undo.enter_context(tempfile.TemporaryFile())
        with gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, plain)
        plain.seek(0)
        undo.pop_all()
        return plain

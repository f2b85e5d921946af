"""A file of records as JSON lines, whether it is JSON lines, JSON or CSV, compressed with gzip or not."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.errors import DataError

KINDS = (".jsonl", ".json", ".csv")
PACKED = ".gz"


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
                plain.writelines(map(str.encode, lines(path, _text(path, file.read()))))
            plain.seek(0)
            undo.pop_all()
            return plain
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error


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
        lists = (
            [value for value in content.values() if isinstance(value, list)] if isinstance(content, dict) else [content]
        )
        if len(lists) != 1 or not isinstance(lists[0], list):
            what = f"an object with {len(lists)} lists" if isinstance(content, dict) else "a single value"
            raise DataError(f"{path}: a list of objects is needed, or an object with one such list; it is {what}")
        yield from (f"{json.dumps(value)}\n" for value in lists[0])
    except json.JSONDecodeError as error:
        hint = "; if it has one object per line, call it .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg}){hint}") from error
    except RecursionError as error:
        raise DataError(f"{path}: lists and objects are nested too deep") from error

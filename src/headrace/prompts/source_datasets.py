"""Prompts from a directory that `datasets` wrote with save_to_disk, or from a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow
import pyarrow.parquet

from headrace.errors import DataError
from headrace.prompts.source import prompt_key


class DatasetsSource:
    """One split, memory-mapped, or one Parquet file, in memory in Arrow's compact columns."""

    def __init__(self, path: Path, *, prompt_field: str = "prompt") -> None:
        loaded = _directory(path) if path.is_dir() else _parquet(path)
        key = prompt_key(loaded.column_names, prompt_field, str(path))
        if loaded.data.column(key).null_count:
            row = loaded.with_format(None)[key][:].index(None)
            raise DataError(f"{path}, row {row + 1}: field '{key}' is empty")
        # Plain Python values, whatever format the data set was saved with.
        self._rows = loaded.with_format(None)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return cast(Mapping[str, Any], self._rows[i])


def _directory(path: Path) -> Any:
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a directory written by datasets' save_to_disk: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise DataError(f"{path} has several splits; name one: {', '.join(str(path / name) for name in loaded)}")
    return loaded


def _parquet(path: Path) -> Any:
    try:
        return datasets.Dataset(datasets.table.InMemoryTable(pyarrow.parquet.read_table(path)))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error

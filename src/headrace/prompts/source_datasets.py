"""Prompts from a directory that `datasets` wrote with save_to_disk, or from a Parquet file."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow
from pyarrow.parquet import read_table

from headrace.errors import DataError
from headrace.prompts.source import prompt_key


def open_dataset(path: Path, prompt_field: str) -> Any:
    """One split, memory-mapped, or one Parquet file, in memory in Arrow's compact columns."""
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.Dataset(datasets.table.InMemoryTable(read_table(path)))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        what = "is not a directory written by datasets' save_to_disk" if path.is_dir() else "cannot be read as Parquet"
        raise DataError(f"{path} {what}: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise DataError(f"{path} has several splits; name one: {', '.join(str(path / name) for name in loaded)}")
    key = prompt_key(loaded.column_names, prompt_field, str(path))
    rows = loaded.with_format(None)  # plain Python values, however it was saved
    if loaded.data.column(key).null_count:
        raise DataError(f"{path}, row {rows[key][:].index(None) + 1}: field '{key}' is empty")
    return rows

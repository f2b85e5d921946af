"""Prompts from a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from headrace.errors import DataError
from headrace.prompts.fields import prompt_key


class ParquetSource:
    """One record per row, kept in Arrow's compact columns.

    Example:
        ParquetSource(Path("train.parquet"))[0] == {"prompt": "12+9=", "answer": "21"}
    """

    def __init__(self, path: Path, *, prompt_field: str = "prompt") -> None:
        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error
        key = prompt_key(table.column_names, prompt_field, str(path))
        if table.column(key).null_count:
            row = pyarrow.compute.index(table.column(key).is_null(), True).as_py()
            raise DataError(f"{path}, row {row + 1}: field '{key}' is empty")
        self._table = table.combine_chunks()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return cast(Mapping[str, Any], self._table.slice(i, 1).to_pylist()[0])

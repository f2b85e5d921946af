"""Prompts from a directory written by `datasets` with save_to_disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import datasets

from headrace.errors import DataError
from headrace.prompts.fields import prompt_key


class DatasetsSource:
    """One split, memory-mapped.

    Example:
        DatasetsSource(Path("gsm8k/train"))[0] == {"prompt": "12+9=", "answer": "21"}
    """

    def __init__(self, path: Path, *, prompt_field: str = "prompt") -> None:
        try:
            loaded = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a directory written by datasets' save_to_disk: {error}") from error
        if isinstance(loaded, datasets.DatasetDict):
            raise DataError(f"{path} has several splits; name one: {', '.join(str(path / name) for name in loaded)}")
        prompt_key(loaded.column_names, prompt_field, str(path))
        # Plain Python values, whatever format the data set was saved with.
        self._rows = loaded.with_format(None)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return cast(Mapping[str, Any], self._rows[i])

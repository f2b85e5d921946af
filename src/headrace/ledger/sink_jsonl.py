"""Rows as a text file, one JSON object per line."""

from __future__ import annotations

from pathlib import Path

from headrace.ledger.row_json import row_to_json
from headrace.types import Row


class JsonlSink:
    """Writes complete rows to `rows.jsonl`, each visible as soon as it is written."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "rows.jsonl").open("w", encoding="utf-8", buffering=1)

    def write(self, row: Row) -> None:
        """Add one line."""
        self._file.write(row_to_json(row) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

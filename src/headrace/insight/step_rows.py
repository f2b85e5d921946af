"""The ledger's rows by column: ten thousand of them in a tenth of a second, where a record for each takes four."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headrace.errors import RunError
from headrace.types import STAGES, StageTimes

Numbers = npt.NDArray[np.float64]


class StepRows:
    """The rows of consecutive steps. A number that a row does not have is NaN."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self._columns: dict[str, Numbers] = {}

    @classmethod
    def read(cls, connection: sqlite3.Connection, *, after_step: int = 0) -> Self:
        """The rows after a step."""
        found = connection.execute("SELECT data FROM rows WHERE step > ? ORDER BY step", (after_step,))
        text = ",".join(data for (data,) in found)
        try:
            rows = cls(json.loads(f"[{text}]"))
            rows.column("wall_s"), rows.stage("rollout"), rows.dropped_tokens()  # whether they are rows at all
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"the ledger's rows are damaged ({type(error).__name__}: {error})") from error
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def column(self, name: str) -> Numbers:
        """One number of every row, by its name in `Row`."""
        if name not in self._columns:  # numpy makes None NaN, and "Infinity", which JSON has as text, a number
            self._columns[name] = np.array([row.get(name) for row in self._rows], np.float64)
        return self._columns[name]

    def stage(self, stage: str) -> Numbers:
        """Seconds that a stage was busy, in every row."""
        name = f"stage_s.{stage}"
        if name not in self._columns:
            self._columns[name] = np.array([row["stage_s"].get(stage) for row in self._rows], np.float64)
        return self._columns[name]

    def stage_total_s(self) -> StageTimes:
        """Seconds that each stage was busy, in all rows together."""
        return StageTimes(**{stage: float(np.nansum(self.stage(stage))) for stage in STAGES})

    def total(self, name: str) -> int:
        """The sum of a count."""
        return int(np.nansum(self.column(name)))

    def mean(self, name: str) -> float | None:
        """The mean over the rows that have the number, if any has."""
        values = self.column(name)
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else None

    def dropped_tokens(self) -> dict[str, int]:
        """Tokens dropped in these steps, by reason."""
        total: Counter[str] = Counter()
        for row in self._rows:
            total.update(row["dropped_tokens"])
        return dict(total)

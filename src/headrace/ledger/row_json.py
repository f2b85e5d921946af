"""A Row as JSON and back, and as flat named numbers for plotting sinks.

Numbers that JSON lacks (a loss may be NaN) are the strings "NaN" and "Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headrace.row import ROW_METRICS, Row
from headrace.types import STAGES, StageTimes

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def row_to_json(row: Row) -> str:
    """One line of valid JSON with every field of the row."""
    return json.dumps(plain(row), allow_nan=False)


def row_from_json(text: str) -> Row:
    """The row that `row_to_json` wrote; numbers that its version did not have yet are NaN."""
    data: dict[str, Any] = {field.name: math.nan for field in fields(Row) if field.type in ("int", "float")}
    data |= {name: _number(value) for name, value in json.loads(text).items()}
    stage_s = StageTimes(**{stage: _number(seconds) for stage, seconds in data.pop("stage_s").items()})
    return Row(stage_s=stage_s, **data)


def scalars(row: Row) -> dict[str, float]:
    """Named as `reward/mean`, `stage_s/rollout`, `dropped_tokens/no_signal`; without None."""
    values = {"goodput/trained_tokens_per_s": row.trained_tokens / row.wall_s if row.wall_s > 0 else 0.0}
    values |= {metric.label: getattr(row, name) for name, metric in ROW_METRICS.items()}
    values |= {f"stage_s/{stage}": getattr(row.stage_s, stage) for stage in STAGES}
    values |= {f"dropped_tokens/{reason}": num_tokens for reason, num_tokens in row.dropped_tokens.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def plain(value: Any) -> Any:
    """The value as JSON can say it."""
    if isinstance(value, Row | StageTimes):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value

"""What the database stores of a trajectory and of a row.

A trajectory has columns for those who query them, and is kept whole as safetensors (no pickle): its
arrays, and the rest as JSON among them. A row is JSON; numbers that JSON lacks (a loss may be NaN)
are the strings "NaN" and "Infinity".
"""

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from headrace.measured import Row, StageTimes
from headrace.types import FinishReason, Replay, Segment, Span, Timing, Trajectory, Turn

_ARRAYS = ("token_ids", "sampled", "logprobs")
_REPLAYED = ("support_ids", "support_offsets", "routes")
_REST = tuple(f.name for f in fields(Trajectory) if f.name not in (*_ARRAYS, "replay"))


@dataclass(frozen=True, slots=True)
class Restart:
    """What a restart found and did."""

    number: int
    at_s: float
    checkpoint: int  # the version it was loaded with
    version: int  # the version it continued from
    rule: str  # for what was in flight
    redone_steps: int
    retrained_tokens: int
    lost_tokens: int  # sampled, and lost with the process
    lost_trajectories: int


def columns(trajectory: Trajectory) -> dict[str, Any]:
    """All columns of a finished trajectory that do not depend on what becomes of it."""
    t, num_sampled = trajectory, trajectory.num_sampled_tokens
    spans = [[int(span.version), int(span.start), int(span.end)] for span in t.spans]
    return {
        "id": t.id,
        "prompt_id": t.prompt_id,
        "idx": int(t.index),
        "num_tokens": num_sampled,
        "num_prompt_tokens": len(t.token_ids) - num_sampled,  # wherever they stand
        "reward": None if t.reward is None else float(t.reward),
        "reward_parts": json.dumps(plain(t.reward_parts), allow_nan=False),
        "finish": str(t.finish),
        "spans": json.dumps(spans),
        "oldest_version": int(t.oldest_version) if t.spans else None,
        **_as_json(t.timing),
    }


def insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", values)


def encode(trajectory: Trajectory) -> bytes:
    """All of a trajectory: its arrays, and the rest as JSON."""
    t, rest = trajectory, {name: getattr(trajectory, name) for name in _REST}
    arrays = {name: getattr(t, name) for name in _ARRAYS}
    arrays |= {name: getattr(t.replay, name, None) for name in _REPLAYED}
    arrays["rest"] = np.frombuffer(_TO_JSON.encode(rest).encode(errors="surrogatepass"), np.uint8)
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None})


def _as_json(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return {name: getattr(value, name) for name in value.__slots__}  # faster than `asdict`


_TO_JSON = json.JSONEncoder(default=_as_json, ensure_ascii=False)


def decode(data: bytes) -> Trajectory:
    """Inverse of `encode`."""
    arrays: Mapping[str, Any] = load(data)
    replayed = {name: arrays[name] for name in _REPLAYED if name in arrays}
    rest = json.loads(arrays["rest"].tobytes().decode(errors="surrogatepass"))
    turns = (t | {"finish": FinishReason(t["finish"]), "replies": tuple(t["replies"])} for t in rest["turns"])
    rest |= {name: arrays[name] for name in _ARRAYS}
    rest |= {
        "spans": tuple(Span(**span) for span in rest["spans"]),
        "finish": FinishReason(rest["finish"]),
        "timing": Timing(**rest["timing"]),
        "replay": Replay(**replayed) if replayed else None,
        "turns": tuple(Turn(**turn) for turn in turns),
        "segments": tuple(Segment(**segment) for segment in rest["segments"]),
    }
    return Trajectory(**rest)


def read_trajectories(connection: sqlite3.Connection, where: str, values: Iterable[Any]) -> list[Trajectory]:
    """Trajectories that the condition `where` on `trajectories t` selects."""
    tables = "trajectories t JOIN journal j ON j.trajectory_id = t.id"
    query = f"SELECT data FROM {tables} WHERE {where} ORDER BY serial, idx"
    return [decode(data) for (data,) in connection.execute(query, tuple(values))]


def read_partials(connection: sqlite3.Connection, serial: int) -> list[Trajectory]:
    where = "serial = ?1 AND idx NOT IN (SELECT idx FROM trajectories WHERE serial = ?1)"
    found = connection.execute(f"SELECT data FROM partials WHERE {where} ORDER BY idx", (serial,))
    return [decode(data) for (data,) in found]


def write_partial(connection: sqlite3.Connection, serial: int, t: Trajectory) -> None:
    """Store a partial trajectory, in place of an earlier state of it."""
    values = int(serial), int(t.index), encode(t)
    connection.execute("INSERT OR REPLACE INTO partials VALUES (?, ?, ?)", values)


# ---- rows


def row_to_json(row: Row) -> str:
    return json.dumps(plain(asdict(row)), allow_nan=False)


def row_from_json(text: str) -> Row:
    """The row that `row_to_json` wrote."""
    data = {name: _number(value) for name, value in json.loads(text).items()}
    stage_s = {stage: _number(seconds) for stage, seconds in data.pop("stage_s").items()}
    return Row(stage_s=StageTimes(**stage_s), **data)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # NaN, Infinity or -Infinity
    return value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value

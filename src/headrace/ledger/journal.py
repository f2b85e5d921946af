"""What the database stores of a trajectory and of a row.

A trajectory has columns, and its tokens are safetensors (no pickle). Sampled tokens may lie
anywhere in it, in several pieces: the column `spans` and the stored mask say where. A row is JSON;
numbers that JSON lacks (a loss may be NaN) are the strings "NaN" and "Infinity".
"""

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from headrace.measured import Row, StageTimes
from headrace.types import FinishReason, Replay, Segment, Span, Timing, Trajectory, Turn

_ARRAYS = ("token_ids", "sampled", "logprobs")
_REPLAYED = ("support_ids", "support_offsets", "routes")
_VERDICT = ("verdict_s", "verdict_output", "verdict_failure")
_TURN = tuple(field.name for field in fields(Turn))  # new ones come last
_TIMES = ("submitted_s", "started_s", "finished_s")
# what `_trajectory` reads; a partial trajectory has no verdict yet
_PARTIAL = ("id", "prompt_id", "idx", "finish", "spans", *_TIMES)
_WHOLE = (*_PARTIAL, "scored_s", "reward", "reward_parts")


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
        **{name: getattr(t.timing, name) for name in (*_TIMES, "scored_s")},
    }


def insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)


def encode(trajectory: Trajectory) -> bytes:
    """Everything of a trajectory that has no column of its own."""
    t, texts = trajectory, {"text": trajectory.text.encode(errors="surrogatepass")}
    arrays = {name: getattr(t, name) for name in _ARRAYS}
    arrays |= {name: getattr(t.replay, name, None) for name in _REPLAYED}
    if t.turns:
        turns = [[getattr(turn, name) for name in _TURN] for turn in t.turns]
        texts["turns"] = json.dumps(turns, allow_nan=False).encode()
    if t.segments:
        arrays["segments"] = np.array([(segment.start, segment.after) for segment in t.segments])
    if verdict := {name: getattr(t, name) for name in _VERDICT if getattr(t, name)}:
        texts["verdict"] = json.dumps(plain(verdict)).encode()
    arrays |= {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None})


def read_trajectories(connection: sqlite3.Connection, where: str, values: Iterable[Any]) -> list[Trajectory]:
    """Trajectories that the condition `where` on `trajectories t` selects, with tokens."""
    tables = "trajectories t JOIN journal j ON j.trajectory_id = t.id"
    return _read(connection, _WHOLE, f"{tables} WHERE {where} ORDER BY t.serial, t.idx", values)


def read_partials(connection: sqlite3.Connection, serial: int) -> list[Trajectory]:
    where = "serial = ?1 AND idx NOT IN (SELECT idx FROM trajectories WHERE serial = ?1)"
    return _read(connection, _PARTIAL, f"partials t WHERE {where} ORDER BY idx", (serial,))


def _read(connection: sqlite3.Connection, names: Sequence[str], of: str, values: Iterable[Any]) -> list[Trajectory]:
    query = f"SELECT {', '.join(f't.{name}' for name in names)}, data FROM {of}"
    found = connection.execute(query, tuple(values))
    return [_trajectory(dict(zip((*names, "data"), row, strict=True))) for row in found]


def write_partial(connection: sqlite3.Connection, serial: int, t: Trajectory) -> None:
    """Store a partial trajectory, in place of an earlier state of it."""
    known = columns(t)
    values = {name: known[name] for name in _PARTIAL} | {"serial": serial, "data": encode(t)}
    connection.execute("DELETE FROM partials WHERE serial = ? AND idx = ?", (serial, known["idx"]))
    insert(connection, "partials", values)


def _trajectory(values: Mapping[str, Any]) -> Trajectory:
    arrays: Mapping[str, Any] = load(values["data"])
    replayed = {name: arrays[name] for name in _REPLAYED if name in arrays}
    kept = json.loads(arrays["turns"].tobytes()) if "turns" in arrays else []
    turns = (dict(zip(_TURN, turn, strict=False)) for turn in kept)
    turns = (t | {"finish": FinishReason(t["finish"]), "replies": tuple(t["replies"])} for t in turns)
    segments = arrays["segments"].tolist() if "segments" in arrays else []
    return Trajectory(
        id=values["id"],
        prompt_id=values["prompt_id"],
        index=values["idx"],
        **{name: arrays[name] for name in _ARRAYS},
        spans=tuple(Span(version=v, start=a, end=b) for v, a, b in json.loads(values["spans"])),
        finish=FinishReason(values["finish"]),
        text=arrays["text"].tobytes().decode(errors="surrogatepass"),
        timing=Timing(**{name: values[name] for name in _TIMES}, scored_s=values.get("scored_s")),
        reward=values.get("reward"),
        reward_parts=json.loads(values.get("reward_parts", "{}")),
        **json.loads(arrays["verdict"].tobytes() if "verdict" in arrays else "{}"),
        replay=Replay(**replayed) if replayed else None,
        turns=tuple(Turn(**turn) for turn in turns),
        segments=tuple(Segment(start=start, after=after) for start, after in segments),
    )


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

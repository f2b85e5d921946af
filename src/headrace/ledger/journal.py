"""What a restart needs of the books: which groups were under way, what the finished ones hold, what was trained.

A trajectory's tokens are stored beside its account entry, in one transaction, as safetensors: nothing is unpickled when
they are read. A step is written down before the weights change, so that a restart can take the same step again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from headrace.types import FinishReason, Replay, Score, Span, Timing, Trajectory

_REPLAYED = ("support_ids", "support_offsets", "routes")
_COLUMNS = (
    "t.id, t.prompt_id, t.idx, t.reward, t.reward_parts, t.finish, t.spans, "
    "t.submitted_s, t.started_s, t.finished_s, t.scored_s, j.data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What a restart found and did.

    Example:
        Restart(number=1, at_s=61.2, checkpoint=20, version=27, rule="requeue", redone_steps=7, retrained_tokens=28672,
            lost_tokens=512, lost_trajectories=16)
    """

    number: int
    at_s: float
    checkpoint: int  # the version it was loaded with
    version: int  # the version it went on from
    rule: str  # for what was in flight
    redone_steps: int
    retrained_tokens: int
    lost_tokens: int  # sampled, and gone with the process
    lost_trajectories: int


def encode(trajectory: Trajectory) -> bytes:
    """Everything of a trajectory that has no column of its own."""
    arrays: dict[str, Any] = {
        "token_ids": trajectory.token_ids,
        "sampled": trajectory.sampled,
        "logprobs": trajectory.logprobs,
        "text": np.frombuffer(trajectory.text.encode(errors="surrogatepass"), np.uint8),
    }
    for name in _REPLAYED:
        if trajectory.replay is not None and (array := getattr(trajectory.replay, name)) is not None:
            arrays[name] = array
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def read_trajectories(connection: sqlite3.Connection, where: str, values: Iterable[Any]) -> list[Trajectory]:
    """The journaled trajectories that a condition on `trajectories t` selects, by serial and index."""
    query = f"SELECT {_COLUMNS} FROM trajectories t JOIN journal j ON j.trajectory_id = t.id WHERE {where}"
    return [_trajectory(*found) for found in connection.execute(f"{query} ORDER BY t.serial, t.idx", tuple(values))]


def write_partials(connection: sqlite3.Connection, partials: Mapping[int, Mapping[int, Trajectory]]) -> None:
    """In place of those before."""
    connection.execute("DELETE FROM partials")
    for serial, by_index in partials.items():
        for index, t in by_index.items():
            times = (t.timing.submitted_s, t.timing.started_s, t.timing.finished_s)
            values = (serial, index, t.id, t.prompt_id, str(t.finish), spans_json(t), *times, encode(t))
            connection.execute("INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)


def read_partials(connection: sqlite3.Connection, serial: int) -> dict[int, Trajectory]:
    """By index, what a group's answers had sampled at the last checkpoint; not of those that left the books since."""
    columns = "id, prompt_id, idx, NULL, '{}', finish, spans, submitted_s, started_s, finished_s, NULL, data"
    where = "serial = ?1 AND idx NOT IN (SELECT idx FROM trajectories WHERE serial = ?1)"
    found = connection.execute(f"SELECT {columns} FROM partials WHERE {where} ORDER BY idx", (serial,))
    return {values[2]: _trajectory(*values) for values in found}


def write_verdicts(connection: sqlite3.Connection, verdicts: Mapping[bytes, Score]) -> None:
    """What was said of answers."""
    values = [(key, score.reward, json.dumps(dict(score.parts))) for key, score in verdicts.items()]
    connection.executemany("INSERT OR IGNORE INTO verdicts (key, reward, parts) VALUES (?, ?, ?)", values)


def read_verdicts(connection: sqlite3.Connection) -> dict[bytes, Score]:
    """All of them, oldest first."""
    found = connection.execute("SELECT key, reward, parts FROM verdicts ORDER BY id")
    return {key: Score(reward=reward, parts=json.loads(parts)) for key, reward, parts in found}


def prune(connection: sqlite3.Connection, before: int, max_verdicts: int) -> None:
    """Forget the tokens of what was trained or dropped before this step, and the oldest verdicts beyond so many."""
    old = (  # a step that was skipped is taken again with the others, and may hold older answers
        "SELECT id FROM trajectories WHERE (state = 'trained' AND trained_step < ?1) "
        "OR (state = 'dropped' AND drop_reason <> 'skipped_step' AND oldest_version < ?1)"
    )
    connection.execute(f"DELETE FROM journal WHERE trajectory_id IN ({old})", (before,))
    connection.execute("DELETE FROM verdicts WHERE id <= (SELECT MAX(id) FROM verdicts) - ?", (max_verdicts,))


def spans_json(trajectory: Trajectory) -> str:
    """Version, start and end of each span."""
    return json.dumps([[int(span.version), int(span.start), int(span.end)] for span in trajectory.spans])


def _trajectory(
    id: str,
    prompt_id: str,
    index: int,
    reward: float | None,
    parts: str,
    finish: str,
    spans: str,
    submitted_s: float,
    started_s: float,
    finished_s: float,
    scored_s: float | None,
    data: bytes,
) -> Trajectory:
    arrays: Mapping[str, Any] = load(data)
    replayed = {name: arrays[name] for name in _REPLAYED if name in arrays}
    return Trajectory(
        id=id,
        prompt_id=prompt_id,
        index=index,
        token_ids=arrays["token_ids"],
        sampled=arrays["sampled"],
        logprobs=arrays["logprobs"],
        spans=tuple(Span(version=v, start=start, end=end) for v, start, end in json.loads(spans)),
        finish=FinishReason(finish),
        text=arrays["text"].tobytes().decode(errors="surrogatepass"),
        timing=Timing(submitted_s=submitted_s, started_s=started_s, finished_s=finished_s, scored_s=scored_s),
        reward=reward,
        reward_parts=json.loads(parts),
        replay=Replay(**replayed) if replayed else None,
    )

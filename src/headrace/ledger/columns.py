"""A trajectory as a row of the database: the columns that say what it was and what became of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from headrace.ledger.journal import spans_json
from headrace.ledger.row_json import plain
from headrace.types import Drop, Trajectory

_COLUMNS = (
    "id, prompt_id, serial, attempt, idx, num_tokens, num_prompt_tokens, reward, reward_parts, finish, spans, "
    "oldest_version, submitted_s, started_s, finished_s, scored_s, state, drop_reason, lag"
)
INSERT = f"INSERT INTO trajectories ({_COLUMNS}) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 1))})"


def record(
    trajectory: Trajectory, of: tuple[int, int] | None, state: str, reason: str | None = None, lag: int | None = None
) -> tuple[Any, ...]:
    """The columns of a finished trajectory."""
    sampled, timing = trajectory.sampled, trajectory.timing
    num_prompt_tokens = int(np.argmax(sampled)) if sampled.any() else len(sampled)
    return (
        trajectory.id,
        trajectory.prompt_id,
        *(of or (None, None)),
        int(trajectory.index),
        trajectory.num_sampled_tokens,
        num_prompt_tokens,
        None if trajectory.reward is None else float(trajectory.reward),
        json.dumps(plain(trajectory.reward_parts), allow_nan=False),
        str(trajectory.finish),
        spans_json(trajectory),
        int(trajectory.oldest_version) if trajectory.spans else None,
        timing.submitted_s,
        timing.started_s,
        timing.finished_s,
        timing.scored_s,
        state,
        reason,
        lag,
    )


def dropped_record(drop: Drop, trajectory: Trajectory | None, of: tuple[int, int] | None) -> tuple[Any, ...]:
    """The columns of a trajectory that never reached the buffer; of an aborted one only what the drop says is known."""
    reason, lag = str(drop.reason), int(drop.lag)
    if trajectory is not None:
        return record(trajectory, of, "dropped", reason, lag)
    reward = None if drop.reward is None else float(drop.reward)
    known = (drop.trajectory_id, drop.prompt_id, *(of or (None, None)), None, int(drop.num_tokens), None, reward)
    return (*known, "{}", None, "[]", None, None, None, None, None, "dropped", reason, lag)

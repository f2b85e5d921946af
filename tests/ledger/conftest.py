"""Small records with known numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.ledger.ledger import Ledger
from headrace.types import Drop, FinishReason, Group, Prompt, Row, Span, StageTimes, Timing, Trajectory


def _trajectory(
    id: str,
    num_tokens: int,
    *,
    version: int = 0,
    index: int = 0,
    reward: float | None = 1.0,
    num_prompt_tokens: int = 2,
) -> Trajectory:
    num = num_prompt_tokens + num_tokens
    spans = (Span(version=version, start=num_prompt_tokens, end=num),) if num_tokens else ()
    return Trajectory(
        id=id,
        prompt_id=id.split("/")[0],
        index=index,
        token_ids=np.arange(num, dtype=np.int32),
        sampled=np.arange(num) >= num_prompt_tokens,
        logprobs=np.zeros(num, np.float32),
        spans=spans,
        finish=FinishReason.EOS,
        text="21",
        timing=Timing(submitted_s=0.5, started_s=1.0, finished_s=2.0, scored_s=2.5),
        reward=reward,
        reward_parts={"correct": 1.0},
    )


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    return _trajectory


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    def make(serial: int, lengths: list[int], *, version: int = 0) -> Group:
        prompt_id = f"p{serial}"
        prompt = Prompt(id=prompt_id, text="12+9=", token_ids=np.array([5, 6], np.int32))
        trajectories = tuple(
            _trajectory(f"{prompt_id}/{i}", length, version=version, index=i) for i, length in enumerate(lengths)
        )
        return Group(serial=serial, prompt=prompt, version=version, trajectories=trajectories)

    return make


@pytest.fixture(scope="session")
def make_drop() -> Callable[..., Drop]:
    def make(trajectory: Trajectory, reason: str, lag: int = 0) -> Drop:
        return Drop(
            trajectory_id=trajectory.id,
            prompt_id=trajectory.prompt_id,
            reason=reason,
            num_tokens=trajectory.num_sampled_tokens,
            lag=lag,
            reward=trajectory.reward,
        )

    return make


@pytest.fixture(scope="session")
def make_row() -> Callable[..., Row]:
    def make(step: int, **given: Any) -> Row:
        values: dict[str, Any] = {
            "step": step,
            "version": step,
            "wall_s": 2.0,
            "num_groups": 1,
            "num_trajectories": 2,
            "generated_tokens": 0,
            "trained_tokens": 0,
            "dropped_tokens": {},
            "backlog_tokens": 0,
            "preemptions": 0,
            "parks": 0,
            "lag_mean": 0.5,
            "lag_max": 1,
            "reward_mean": 0.25,
            "reward_std": 0.125,
            "length_mean": 3.5,
            "length_max": 4,
            "truncated_share": 0.0,
            "loss": -0.75,
            "grad_norm": 1.5,
            "lr": 1e-6,
            "skipped": False,
            "entropy": 2.0,
            "kl_reference": 0.0,
            "mismatch_mean": 0.0,
            "mismatch_k3": 0.0,
            "ratio_mean": 1.0,
            "ratio_p01": 1.0,
            "ratio_p99": 1.0,
            "ratio_outside": 0.0,
            "clipped_share": 0.0,
            "effective_samples": 1.0,
            "stage_s": StageTimes(rollout=1.5, reward=0.25, train=0.5, publish=0.125),
            "publish_bytes": 64,
        }
        return Row(**(values | given))

    return make


@pytest.fixture
def played_run(
    tmp_path: Path,
    make_group: Callable[..., Group],
    make_drop: Callable[..., Drop],
    make_row: Callable[..., Row],
    make_trajectory: Callable[..., Trajectory],
) -> Path:
    """Two steps: 7 then 9 tokens trained, 5 dropped as no_signal, 4 thrown away after the last row. 25 generated."""
    with Ledger.create(tmp_path) as ledger:
        first, second, dull = make_group(0, [3, 4]), make_group(1, [9]), make_group(2, [2, 3])
        ledger.started(5)
        ledger.sampled(21)
        for group in (first, second, dull):
            ledger.buffered(group)
        ledger.trained(first, step=1, lag_of=lambda _: 0)
        ledger.row(make_row(1, generated_tokens=21, trained_tokens=7, backlog_tokens=14))
        ledger.dropped([make_drop(t, "no_signal", 1) for t in dull.trajectories], source="buffered")
        ledger.trained(second, step=2, lag_of=lambda _: 1)
        ledger.row(make_row(2, generated_tokens=0, trained_tokens=9, dropped_tokens={"no_signal": 5}))
        ledger.started(1)
        ledger.sampled(4)
        ledger.dropped([make_drop(make_trajectory("p3/0", 4), "run_ended")], source="in_flight")
    (tmp_path / "summary.json").write_text('{"finished": true}')
    return tmp_path

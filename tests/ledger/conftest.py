"""Small records with known numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hand_made import row

from headrace.ledger.ledger import Ledger
from headrace.measured import Row
from headrace.types import FinishReason, Group, Prompt, Span, Timing, Trajectory


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
def make_row() -> Callable[..., Row]:
    return row


@pytest.fixture
def played_run(
    tmp_path: Path,
    make_group: Callable[..., Group],
    make_row: Callable[..., Row],
) -> Path:
    """Two steps: 7 then 9 tokens trained, 5 dropped as no_signal, 4 thrown away after the last row. 25 generated."""
    with Ledger.create(tmp_path) as ledger:
        first, second, dull = make_group(0, [3, 4]), make_group(1, [9]), make_group(2, [2, 3])
        ledger.started(5)
        ledger.sampled(21)
        for group in (first, second, dull):
            ledger.buffered(group)
        ledger.trained(first, version=0)
        ledger.row(make_row(1, generated_tokens=21, trained_tokens=7, backlog_tokens=14))
        ledger.dropped(dull, [(t, "no_signal") for t in dull.trajectories], was_buffered=True, version=1)
        ledger.trained(second, version=1)
        ledger.row(make_row(2, generated_tokens=0, trained_tokens=9, dropped_tokens={"no_signal": 5}))
        ledger.started(1)
        ledger.sampled(4)
        cut = make_group(3, [4])
        ledger.dropped(cut, [(t, "run_ended") for t in cut.trajectories], was_buffered=False)
    (tmp_path / "summary.json").write_text('{"finished": true}')
    return tmp_path

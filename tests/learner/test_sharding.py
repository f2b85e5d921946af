"""A learner in several processes takes the steps of one in a single process. Real ranks, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from rank_work import Outcome, on_ranks, take_steps

from headrace.config import LearnerSection
from headrace.policy.policy import Policy
from headrace.types import Group, Replay

LR = 1e-3
Maker = Callable[..., Policy]


@pytest.fixture
def saved(make_policy: Maker, tmp_path: Path) -> Callable[..., Path]:
    """`saved("Llama", **changes)`: the directory of a tiny model."""

    def save(architecture: str = "Qwen3", **changes: Any) -> Path:
        make_policy(architecture, **changes).save(tmp_path / architecture)
        return tmp_path / architecture

    return save


def make_steps(*, supported: bool = False, routes: tuple[int, int, int] | None = None) -> list[list[Group]]:
    """Two steps of three groups; the answers are of very different lengths."""
    rng = np.random.default_rng(3)

    def replay(answer: np.ndarray, num_tokens: int) -> Replay | None:
        if routes is not None:
            num_layers, num_experts, per_token = routes
            scores = rng.random((num_tokens, num_layers, num_experts))
            return Replay(routes=scores.argsort(-1)[..., :per_token].astype(np.uint8))
        if not supported:
            return None
        subsets = [np.unique([token, *rng.integers(3, 90, size=9)]) for token in answer]
        offsets = np.cumsum([0, *map(len, subsets)]).astype(np.int64)
        return Replay(support_ids=np.concatenate(subsets).astype(np.int32), support_offsets=offsets)

    def make(serial: int, sizes: tuple[int, ...]) -> Group:
        prompt = rng.integers(3, 90, size=4 + serial).tolist()
        answers = []
        for i, size in enumerate(sizes):
            answer = rng.integers(3, 90, size=size)
            logprobs = -rng.random(size) * 6
            reward = float(rng.integers(0, 3)) + i / 8
            kept = replay(answer, len(prompt) + size)
            answers.append(
                trajectory(
                    serial=serial, index=i, prompt=prompt, answer=answer, logprobs=logprobs, reward=reward, replay=kept
                )
            )
        return group_of(*answers, serial=serial)

    sizes = [(5, 9, 2), (7, 1, 3, 12), (4, 30)]
    return [[make(3 * step + i, of) for i, of in enumerate(sizes)] for step in range(2)]


def assert_same(found: Outcome, expected: Outcome) -> None:
    for name, weight in expected.weights.items():
        # AdamW moves a weight by about its rate, however small its gradient is: where that is noise, so is the move
        gap = (found.weights[name] - weight).abs()
        assert gap.max() < 0.05 * LR, f"{name} differs by {gap.max()}"
        assert gap.mean() < 1e-4 * LR, f"{name} differs by {gap.mean()} on average"
    assert found.weights.keys() == expected.weights.keys()
    for mine, theirs in zip(found.stats, expected.stats, strict=True):
        for name in ("loss", "grad_norm", "lr", "entropy", "kl_reference", "clipped_share"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-4, abs=1e-6), name
        assert mine.mismatch.count == theirs.mismatch.count
        assert mine.mismatch.abs_delta == pytest.approx(theirs.mismatch.abs_delta, rel=1e-5)


def assert_all_ranks_agree(outcomes: list[Outcome]) -> None:
    for other in outcomes[1:]:
        assert other.stats == outcomes[0].stats
        assert all(torch.equal(other.weights[name], weight) for name, weight in outcomes[0].weights.items())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_takes_the_same_steps(saved: Callable[..., Path], num_ranks: int):
    directory, steps = saved(), make_steps()
    section = LearnerSection(lr=LR, micro_batch_tokens=32)
    outcomes = on_ranks(num_ranks, take_steps, directory, section, steps)
    assert_all_ranks_agree(outcomes)
    assert_same(outcomes[0], take_steps(None, directory, section, steps))

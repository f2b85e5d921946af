from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.insight.equation import (
    Placement,
    binding_stage,
    dollars_per_million_tokens,
    exposed,
    goodput,
    hidden_share_of,
    step_s,
)
from headrace.types import StageTimes

SEVEN_B = StageTimes(rollout=30, reward=0, reference=3, train=8, publish=1)  # 16 samples of some 1,024 tokens, 8 GPUs
LEARNING = StageTimes(rollout=4, reward=1, reference=1, train=10, publish=2)  # training is the longer side


@pytest.mark.parametrize(
    ("times", "placement", "seconds"),
    [
        (SEVEN_B, Placement.COLOCATED, 42),  # 30 + 3 + 8 + 1
        (SEVEN_B, Placement.STREAMED, 38),  # 42 - 0.5 * min(33, 8)
        (SEVEN_B, Placement.OVERLAPPED, 34),  # max(30 + 3, 8) + 1
        (SEVEN_B, Placement.ASYNCHRONOUS, 30),  # max(30, 0, 3, 8, 1)
        (LEARNING, Placement.COLOCATED, 18),  # 4 + 1 + 1 + 10 + 2
        (LEARNING, Placement.STREAMED, 15),  # 18 - 0.5 * min(6, 10)
        (LEARNING, Placement.OVERLAPPED, 12),  # max(6, 10) + 2
        (LEARNING, Placement.ASYNCHRONOUS, 10),
    ],
)
def test_step_by_hand(times: StageTimes, placement: Placement, seconds: float):
    assert step_s(times, placement, hidden_share=0.5) == pytest.approx(seconds)


def test_a_faster_learner_changes_nothing_when_rollout_binds():
    faster = StageTimes(rollout=30, reference=3, train=4, publish=1)
    assert step_s(faster, Placement.OVERLAPPED) == step_s(SEVEN_B, Placement.OVERLAPPED) == 34


def test_only_what_shows_of_publishing_counts():
    # max(33, 8) + 0.25 * 1
    assert step_s(SEVEN_B, Placement.OVERLAPPED, exposed_publish=0.25) == pytest.approx(33.25)


@pytest.mark.parametrize("placement", Placement)
def test_the_exposed_seconds_add_up_to_the_step(placement: Placement):
    shown = exposed(LEARNING, placement, hidden_share=0.25)
    total = shown.rollout + shown.reward + shown.reference + shown.train + shown.publish
    assert total == pytest.approx(step_s(LEARNING, placement, hidden_share=0.25))


@pytest.mark.parametrize(
    ("times", "placement", "wall"),
    [
        (SEVEN_B, Placement.OVERLAPPED, "rollout"),
        (LEARNING, Placement.OVERLAPPED, "train"),
        # the longer side is rollout's 4 + 5 + 1 = 10 s, and reward is half of it, though training's 9 s is more
        (StageTimes(rollout=4, reward=5, reference=1, train=9), Placement.OVERLAPPED, "reward"),
        (StageTimes(rollout=4, reward=5, reference=1, train=9), Placement.COLOCATED, "train"),
        (StageTimes(rollout=3, train=4, publish=6), Placement.OVERLAPPED, "publish"),
    ],
)
def test_the_wall_is_the_stage_that_adds_most(times: StageTimes, placement: Placement, wall: str):
    assert binding_stage(times, placement) == wall


@pytest.mark.parametrize(
    ("finish_s", "train_s", "share"),
    [
        # every 1 s a group, each 0.5 s to train: done 0.5 s after the last, 1.5 of 2 s hidden
        ([1, 2, 3, 4], 2, 0.75),
        # 2 s each: begins after 1 s and never waits, done at 9 s instead of 12: 3 of rollout's 4 s hidden
        ([1, 2, 3, 4], 8, 0.75),
        # all end together: nothing to do before
        ([4, 4, 4, 4], 2, 0.0),
        # the first in order is the last to end, and the others wait for it
        ([4, 1, 2, 3], 2, 0.0),
        # 1 s each: two are done at 2 s, the third waits for 4 s, the fourth is done at 6: 2 of 4 s hidden
        ([0.5, 1, 4, 4], 4, 0.5),
    ],
)
def test_hidden_share_by_hand(finish_s: list[float], train_s: float, share: float):
    assert hidden_share_of(finish_s, train_s) == pytest.approx(share)


def test_a_strict_max_without_lag_is_refused():
    with pytest.raises(ConfigError, match=r"hidden_share is 1; .* below 1, because without lag"):
        step_s(SEVEN_B, Placement.STREAMED, hidden_share=1.0)


def test_a_negative_stage_time_is_refused_by_its_symbol():
    with pytest.raises(ConfigError, match="τT is -8"):
        step_s(StageTimes(rollout=30, train=-8), Placement.COLOCATED)


def test_goodput_by_hand():
    # 64 * 16 * 1,024 = 1,048,576 tokens a step, 786,432 of them trained on, in 32 s
    assert goodput(num_prompts=64, num_samples=16, mean_tokens=1024, step_s=32, useful=0.75) == pytest.approx(24_576)


def test_cost_by_hand():
    # 8 GPUs at 3 dollars make 24 dollars for 3,600 s * 24,576 tokens/s = 88.4736 million tokens
    assert dollars_per_million_tokens(24_576, 24.0) == pytest.approx(24 / 88.4736)
    assert dollars_per_million_tokens(0.0, 24.0) == float("inf")

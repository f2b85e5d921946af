from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.insight.triage import Placement, exposed, step_s
from headrace.measured import StageTimes

SEVEN_B = StageTimes(rollout=30, reward=0, reference=3, train=8, publish=1)  # 16 samples of some 1,024 tokens, 8 GPUs
LEARNING = StageTimes(rollout=4, reward=1, reference=1, train=10, publish=2)  # training is the longer side


@pytest.mark.parametrize(
    ("times", "placement", "seconds"),
    [
        (SEVEN_B, Placement.COLOCATED, 42),  # 30 + 3 + 8 + 1
        (SEVEN_B, Placement.STREAMED, 42),  # the same, when all groups end together
        (SEVEN_B, Placement.OVERLAPPED, 34),  # max(30 + 3, 8) + 1
        (SEVEN_B, Placement.ASYNCHRONOUS, 30),  # max(30, 0, 3 + 8, 1)
        (LEARNING, Placement.COLOCATED, 18),  # 4 + 1 + 1 + 10 + 2
        (LEARNING, Placement.STREAMED, 18),
        (LEARNING, Placement.OVERLAPPED, 12),  # max(6, 10) + 2
        (LEARNING, Placement.ASYNCHRONOUS, 11),  # max(4, 1, 1 + 10, 2)
        (StageTimes(rollout=5, reward=9, train=3, publish=1), Placement.ASYNCHRONOUS, 9),
    ],
)
def test_step_by_hand(times: StageTimes, placement: Placement, seconds: float):
    assert step_s(times, placement) == pytest.approx(seconds)


def test_a_faster_learner_changes_nothing_when_rollout_binds():
    faster = StageTimes(rollout=30, reference=3, train=4, publish=1)
    assert step_s(faster, Placement.OVERLAPPED) == step_s(SEVEN_B, Placement.OVERLAPPED) == 34


@pytest.mark.parametrize("placement", Placement)
def test_the_exposed_seconds_add_up_to_the_step(placement: Placement):
    shown = exposed(LEARNING, placement)
    total = shown.rollout + shown.reward + shown.reference + shown.train + shown.publish
    assert total == pytest.approx(step_s(LEARNING, placement))


@pytest.mark.parametrize(
    ("times", "placement", "stage"),
    [
        (SEVEN_B, Placement.OVERLAPPED, "rollout"),
        (LEARNING, Placement.OVERLAPPED, "train"),
        # the longer side is rollout's 4 + 5 + 1 = 10 s, and reward is half of it, though training's 9 s is more
        (StageTimes(rollout=4, reward=5, reference=1, train=9), Placement.OVERLAPPED, "reward"),
        (StageTimes(rollout=4, reward=5, reference=1, train=9), Placement.COLOCATED, "train"),
        (StageTimes(rollout=3, train=4, publish=6), Placement.OVERLAPPED, "publish"),
        # the learner computes the reference: 8 + 6 s, though rollout's 13 s is the longest; weights travel meanwhile
        (StageTimes(rollout=13, reference=6, train=8, publish=4), Placement.ASYNCHRONOUS, "train"),
        (StageTimes(rollout=3, reference=1, train=4, publish=6), Placement.ASYNCHRONOUS, "publish"),
    ],
)
def test_the_stage_that_binds_is_the_one_that_adds_most(times: StageTimes, placement: Placement, stage: str):
    assert exposed(times, placement).wall == stage


def test_a_negative_stage_time_is_refused_by_its_symbol():
    with pytest.raises(ConfigError, match="τT is -8"):
        step_s(StageTimes(rollout=30, train=-8), Placement.COLOCATED)

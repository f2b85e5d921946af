from itertools import pairwise
from typing import get_args

import pytest

from headrace.config import LearnerSection
from headrace.learner.learner import ScheduleKind, learning_rate

KINDS = get_args(ScheduleKind)


def rates(schedule: ScheduleKind, *, steps: int, warmup_steps: int, total_steps: int) -> list[float]:
    return [
        learning_rate(step, lr=2.0, warmup_steps=warmup_steps, schedule=schedule, total_steps=total_steps)
        for step in range(steps)
    ]


def test_kinds_are_those_of_the_settings() -> None:
    assert get_args(LearnerSection.model_fields["schedule"].annotation) == KINDS


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5]),  # four steps down: a quarter of 2 each
        ("cosine", [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]),  # 1 + cos of 0, π/4, π/2, 3π/4
    ],
)
def test_by_hand(schedule: ScheduleKind, after: list[float]) -> None:
    assert rates(schedule, steps=8, warmup_steps=4, total_steps=8) == pytest.approx([0.5, 1.0, 1.5, 2.0, *after])


@pytest.mark.parametrize("schedule", KINDS)
def test_without_warmup_the_first_step_has_the_full_rate(schedule: ScheduleKind) -> None:
    assert rates(schedule, steps=1, warmup_steps=0, total_steps=10) == [2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_falls_steadily_and_stays_at_zero_past_the_end(schedule: ScheduleKind) -> None:
    found = rates(schedule, steps=13, warmup_steps=3, total_steps=10)
    assert all(later < earlier for earlier, later in pairwise(found[3:11]))
    assert found[9] > 0
    assert found[10:] == pytest.approx([0.0] * 3)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_warmup_as_long_as_the_run_only_rises(schedule: ScheduleKind) -> None:
    assert rates(schedule, steps=4, warmup_steps=4, total_steps=4) == [0.5, 1.0, 1.5, 2.0]
    assert rates(schedule, steps=2, warmup_steps=4, total_steps=2) == [0.5, 1.0]

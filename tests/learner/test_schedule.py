from itertools import pairwise
from typing import Any, get_args

import pytest

from headrace.config import LearnerSection
from headrace.learner.optimizer import learning_rate

KINDS = get_args(LearnerSection.model_fields["schedule"].annotation)


def rates(schedule: Any, *, steps: int, warmup_steps: int, total_steps: int) -> list[float]:
    section = LearnerSection(lr=2.0, warmup_steps=warmup_steps, schedule=schedule)
    return [learning_rate(section, step, total_steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5]),  # four steps down: a quarter of 2 each
        ("cosine", [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]),  # 1 + cos of 0, π/4, π/2, 3π/4
    ],
)
def test_by_hand(schedule: str, after: list[float]) -> None:
    assert rates(schedule, steps=8, warmup_steps=4, total_steps=8) == pytest.approx([0.5, 1.0, 1.5, 2.0, *after])


@pytest.mark.parametrize("schedule", KINDS)
def test_without_warmup_the_first_step_has_the_full_rate(schedule: str) -> None:
    assert rates(schedule, steps=1, warmup_steps=0, total_steps=10) == [2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_falls_steadily_and_stays_at_zero_past_the_end(schedule: str) -> None:
    found = rates(schedule, steps=13, warmup_steps=3, total_steps=10)
    assert all(later < earlier for earlier, later in pairwise(found[3:11]))
    assert found[9] > 0
    assert found[10:] == pytest.approx([0.0] * 3)


@pytest.mark.parametrize("schedule", KINDS)
def test_a_warmup_as_long_as_the_run_only_rises(schedule: str) -> None:
    assert rates(schedule, steps=4, warmup_steps=4, total_steps=4) == [0.5, 1.0, 1.5, 2.0]
    assert rates(schedule, steps=2, warmup_steps=4, total_steps=2) == [0.5, 1.0]

"""The soft overlong punishment."""

from __future__ import annotations

import pytest

from headrace.reward.scorer import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (120, -2.0)]
)
def test_it_falls_in_a_line_over_the_last_tokens(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, max_new_tokens=100, overlong_tokens=20, penalty=2.0) == expected


def test_zero_tokens_turn_it_off() -> None:
    assert overlong_penalty(100, max_new_tokens=100, overlong_tokens=0, penalty=2.0) == 0.0

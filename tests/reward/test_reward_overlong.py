"""The soft overlong punishment."""

from __future__ import annotations

import pytest

from headrace.config import RewardSection
from headrace.reward.scorer import Scorer
from headrace.types import Completion

FIELDS = {"answer": 21}


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
async def test_it_falls_in_a_line_over_the_last_tokens(num_tokens: int, expected: float) -> None:
    section = RewardSection(function="exact", workers=0, overlong_tokens=20)
    scorer = Scorer(section, max_new_tokens=100)
    await scorer.start()
    score = await scorer.score(Completion(prompt="", text="21", fields=FIELDS, num_tokens=num_tokens, finish="eos"))
    assert score.reward == pytest.approx(1.0 + expected)
    assert score.parts["overlong"] == pytest.approx(expected)
    await scorer.close()

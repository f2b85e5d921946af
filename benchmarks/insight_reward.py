"""Rewards of the insight benchmark: the share of vowels, after a wait."""

from __future__ import annotations

import time
from typing import Any


def _score(completion: Any, seconds: float) -> float:
    time.sleep(seconds)
    return sum(character in "aeiou" for character in completion.text) / max(len(completion.text), 1)


def takes_50_ms(completion: Any) -> float:
    return _score(completion, 0.05)


def takes_1_ms(completion: Any) -> float:
    return _score(completion, 0.001)


def takes_200_ms(completion: Any) -> float:
    return _score(completion, 0.2)

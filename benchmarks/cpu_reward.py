"""The reward of the CPU benchmark, the same for every trainer: the share of digits in the answer."""

from __future__ import annotations

from typing import Any


def share_of_digits(text: str) -> float:
    return sum(character in "0123456789" for character in text) / max(len(text), 1)


def score(completion: Any) -> float:
    """What `reward.function = "cpu_reward.py:score"` names."""
    return share_of_digits(completion.text)

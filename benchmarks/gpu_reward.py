"""The reward of the GPU benchmark, the same for every trainer: the share of words whose number ends in 0 to 4."""

from __future__ import annotations

from typing import Any


def share_of_low(text: str) -> float:
    words = text.split()
    return sum(word[-1] in "01234" for word in words) / max(len(words), 1)


def score(completion: Any) -> float:
    """What `reward.function = "gpu_reward.py:score"` names."""
    return share_of_low(completion.text)

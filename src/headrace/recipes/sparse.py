"""Prompts of sparse.toml: additions, with worked examples in which nine columns of ten are wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from headrace.prompts.arithmetic import work

HASTE = 0.9  # share of the worked columns that are off by one


def additions(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two numbers of three digits. A model that imitates the examples gets one sum in a thousand right."""
    rng = random.Random(seed)
    for _ in range(count):
        left, right = rng.randrange(100, 1000), rng.randrange(100, 1000)
        slips = [rng.choice((-1, 1)) if rng.random() < HASTE else 0 for _ in range(3)]
        yield {"prompt": f"{left}+{right}=", "answer": str(left + right), "worked": work(left, right, slips)}

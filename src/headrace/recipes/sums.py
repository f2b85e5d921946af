"""Sums of two to four numbers, to be worked out step by step: prompts and reward of sums.toml."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from headrace.types import Completion

QUESTION = "Add these numbers: {numbers}. Add one number at a time and write down each partial sum. End with: Answer: N"
ANSWER = re.compile(r"answer(?: is)?\W*(-?\d[\d,]*)", re.IGNORECASE)


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two to four numbers of one to three digits."""
    rng = random.Random(seed)
    for _ in range(count):
        numbers = [rng.randrange(1, 10 ** rng.randint(1, 3)) for _ in range(rng.randint(2, 4))]
        yield {"prompt": QUESTION.format(numbers=", ".join(map(str, numbers))), "numbers": numbers}


def score(completion: Completion) -> dict[str, float]:
    """One for the right sum in the right place, and a little for a number in that place."""
    found = ANSWER.findall(completion.text)
    right = bool(found) and int(found[-1].replace(",", "")) == sum(completion.fields["numbers"])
    return {"right": float(right), "form": 0.1 * bool(found)}

"""Sums of two to four numbers, to be worked out step by step: prompts and reward of sums.toml."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from headrace.types import Completion


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two to four numbers of one or two digits."""
    rng = random.Random(seed)
    for _ in range(count):
        numbers = [rng.randrange(1, 10 ** rng.randint(1, 2)) for _ in range(rng.randint(2, 4))]
        question = f"What is {' + '.join(map(str, numbers))}? Work it out step by step."
        yield {"prompt": question, "sum": sum(numbers)}


def score(completion: Completion) -> float:
    """One if the last number is the sum."""
    found = re.findall(r"\d+", completion.text.replace(",", ""))
    return float(bool(found) and found[-1] == str(completion.fields["sum"]))

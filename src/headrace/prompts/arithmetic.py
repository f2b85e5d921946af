"""The built-in task: additions worked column by column, so that answers differ in length.

The worked examples come from a hasty teacher, who is off by one in every other column. A model that copies him
gets about one answer in three right; what RL can add is exactly what the demonstrations lack, and the reward can tell.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from headrace.types import Completion

# Chances of an operand of 1 and of 2 digits.
DIGIT_WEIGHTS = (1, 1)
# Share of the teacher's columns that are off by one.
HASTE = 0.5
REWARD = "headrace.prompts.arithmetic:score"


class ArithmeticSource:
    """Problems made on demand: record `i` follows from `(seed, i)` alone.

    Example:
        ArithmeticSource(count=100, seed=0)[3] == {"prompt": "47+85=", "answer": "132", "worked": "7+5=12,4+8+1=13;132"}
    """

    def __init__(self, *, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        if not 0 <= i < self._count:
            raise IndexError(i)
        rng = random.Random(f"arithmetic:{self._seed}:{i}")
        left, right = _operand(rng), _operand(rng)
        slips = [rng.choice((-1, 1)) if rng.random() < HASTE else 0 for _ in DIGIT_WEIGHTS]
        return {"prompt": f"{left}+{right}=", "answer": str(left + right), "worked": work(left, right, slips)}


def work(left: int, right: int, slips: list[int]) -> str:
    """Column by column from the right, then the sum: `7+5=12,4+8+1=13;132`. `slips[i]` is added to column i's sum."""
    columns, digits, carry = [], "", 0
    for slip in slips:
        total = max(0, left % 10 + right % 10 + carry + slip)
        columns.append(f"{left % 10}+{right % 10}{'+1' if carry else ''}={total}")
        digits = str(total % 10) + digits
        carry = int(total >= 10)
        left, right = left // 10, right // 10
        if not left and not right:
            break
    return ",".join(columns) + ";" + str(int(("1" if carry else "") + digits))


def _operand(rng: random.Random) -> int:
    (num_digits,) = rng.choices(range(1, len(DIGIT_WEIGHTS) + 1), weights=DIGIT_WEIGHTS)
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def score(completion: Completion) -> float:
    """1.0 when the text after the last `;` is exactly the answer, else 0.0."""
    _, mark, result = completion.text.rpartition(";")
    return float(bool(mark) and result == completion.fields["answer"])

"""The task of the demo: additions worked column by column, so that answers differ in length. See demo.toml.

Every other column of the worked examples is off by one. A model that imitates them gets about one
answer in three right; RL can learn the rest from the reward.
"""

from __future__ import annotations

import random
from typing import Any

DIGIT_WEIGHTS = (1, 1)  # chances of an operand of 1 and of 2 digits
HASTE = 0.5  # share of the worked columns that are off by one


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Such as {"prompt": "47+85=", "answer": "132", "worked": "7+5=12,4+8+1=13;132"}; each by `seed` and its place."""
    return [task(random.Random(f"arithmetic:{seed}:{i}")) for i in range(count)]


def task(rng: random.Random) -> dict[str, Any]:
    left, right = operand(rng), operand(rng)
    slips = [rng.choice((-1, 1)) if rng.random() < HASTE else 0 for _ in DIGIT_WEIGHTS]
    return {"prompt": f"{left}+{right}=", "answer": str(left + right), "worked": work(left, right, slips)}


def operand(rng: random.Random) -> int:
    (num_digits,) = rng.choices(range(1, len(DIGIT_WEIGHTS) + 1), weights=DIGIT_WEIGHTS)
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def work(left: int, right: int, slips: list[int]) -> str:
    """Column by column from the right, then the sum; each off by its slip, which changes no carry."""
    columns, digits, carry = [], "", 0
    for slip in slips:
        exact = left % 10 + right % 10 + carry
        total = exact + (slip if (exact + slip) // 10 == exact // 10 else -slip)
        columns.append(f"{left % 10}+{right % 10}{'+1' if carry else ''}={total}")
        carry, digits = total // 10, f"{total % 10}{digits}"
        left, right = left // 10, right // 10
        if not left and not right:
            break
    return ",".join(columns) + ";" + str(int(("1" if carry else "") + digits))


def score(completion: Any) -> float:
    """1.0 when the text after the last `;` is exactly the answer, else 0.0."""
    _, mark, result = completion.text.rpartition(";")
    return float(bool(mark) and result == completion.fields["answer"])

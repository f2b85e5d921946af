"""The built-in task: additions and subtractions, worked digit by digit, so that answers differ in length."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.types import Completion

# Chances of an operand of 1, 2, 3, 4 digits. Short ones lead, so that a small model earns its first rewards early.
DIGIT_WEIGHTS = (4, 3, 2, 1)
REWARD = "headrace.prompts.arithmetic:score"


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum or difference; a difference is never negative.

    Example:
        Problem(left=47, sign="+", right=85)
    """

    left: int
    sign: str
    right: int

    @property
    def prompt(self) -> str:
        """The question, such as `47+85=`."""
        return f"{self.left}{self.sign}{self.right}="

    @property
    def answer(self) -> str:
        """The result in plain digits."""
        return str(self.left + self.right if self.sign == "+" else self.left - self.right)

    @property
    def worked(self) -> str:
        """Column by column from the right, then the result: `7+5=12,4+8+1=13;132`, or `15-7=8,8-4-1=3;38`."""
        columns: list[str] = []
        carry = 0
        left, right = self.left, self.right
        while left or right or not columns:
            text, carry = self._column(left % 10, right % 10, carry)
            columns.append(text)
            left, right = left // 10, right // 10
        return ",".join(columns) + ";" + self.answer

    def _column(self, upper: int, lower: int, carry: int) -> tuple[str, int]:
        tail = f"{self.sign}1" if carry else ""
        if self.sign == "+":
            total = upper + lower + carry
            return f"{upper}+{lower}{tail}={total}", total // 10
        borrow = upper < lower + carry
        upper += 10 * borrow
        return f"{upper}-{lower}{tail}={upper - lower - carry}", int(borrow)


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
        problem = draw(random.Random(f"arithmetic:{self._seed}:{i}"))
        return {"prompt": problem.prompt, "answer": problem.answer, "worked": problem.worked}


def draw(rng: random.Random) -> Problem:
    """One random problem: each operand has 1 to 4 digits, short ones more often."""
    left, right = _operand(rng), _operand(rng)
    if rng.random() < 0.5:
        return Problem(left, "+", right)
    return Problem(max(left, right), "-", min(left, right))


def _operand(rng: random.Random) -> int:
    (num_digits,) = rng.choices(range(1, len(DIGIT_WEIGHTS) + 1), weights=DIGIT_WEIGHTS)
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def score(completion: Completion) -> float:
    """1.0 when the text after the last `;` is exactly the answer, else 0.0."""
    _, mark, result = completion.text.rpartition(";")
    return float(bool(mark) and result == completion.fields["answer"])

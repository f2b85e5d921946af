"""Prompts and reward of countdown.toml: an expression that has a given value."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from headrace.types import Completion

OPERATORS: Any = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = re.compile(r"[\d(][\d ()+\-*/]*[+\-*/][\d ()+\-*/]*[\d)]")


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Three numbers from 1 to 20, and a value from 10 to 100 that they can be made into, other than their sum.

    With sums among them, a policy learns to add, is right for a quarter of the problems, and stops there.
    """
    rng = random.Random(seed)
    while count:
        numbers = [rng.randint(1, 20) for _ in range(3)]
        a, b, c = rng.sample(numbers, 3)
        first, second = rng.choices((operator.add, operator.sub, operator.mul), k=2)
        target = second(first(a, b), c)
        if 10 <= target <= 100 and target != sum(numbers):
            count -= 1
            given = ", ".join(map(str, numbers))
            asked = f"Make {target} from the numbers {given}. Use each of them exactly once, with + - * / and ( )."
            yield {"prompt": asked, "numbers": numbers, "target": target}


def score(completion: Completion) -> float:
    """One if the last expression of the answer has the numbers and the value that were asked for."""
    found = EXPRESSION.findall(completion.text[-200:])
    try:
        value, used = valued(ast.parse(found[-1], mode="eval").body)
    except (IndexError, SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == completion.fields["target"] and sorted(used) == sorted(completion.fields["numbers"]))


def valued(node: Any) -> tuple[Fraction, list[int]]:
    """The exact value of an expression, and its numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(f"{ast.dump(node)} is not a sum, difference, product or quotient")
    (left, of_left), (right, of_right) = valued(node.left), valued(node.right)
    return OPERATORS[type(node.op)](left, right), of_left + of_right

"""The built-in reward `math`: mathematical equality. Needs math-verify."""

import math_verify

from headrace.errors import RewardError
from headrace.user_code import quiet

DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_equal(text: str, expected: str) -> float:
    """1 if the last expression in `text` equals `expected`, which must be a single expression."""
    if text.strip() == expected.strip():
        return 1.0
    # math_verify's own time limits need signals, and turn a timeout into "not equal", a reward of
    # zero. They are off, and its warning too: the pool ends a worker that takes too long.
    with quiet("math_verify"):
        gold: list[object] = []
        if not any(delimiter in expected for delimiter in DELIMITERS):
            # without delimiters the parser looks for plain numbers only: '2\sqrt{3}' becomes 2
            gold = math_verify.parse(f"${expected}$", parsing_timeout=None)
        gold = gold or math_verify.parse(expected, parsing_timeout=None)
        if not gold:
            raise RewardError(f"math-verify finds no expression in the expected answer {expected!r}")
        found = math_verify.parse(text, parsing_timeout=None)
        return float(math_verify.verify(gold, found, timeout_seconds=None))

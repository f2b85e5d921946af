"""Rewards that depend on the length of an answer alone."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_new_tokens: int, overlong_tokens: int, penalty: float) -> float:
    """The soft overlong punishment of DAPO: 0, then a line down to `-penalty` over the last `overlong_tokens`."""
    if overlong_tokens == 0:
        return 0.0
    over = num_tokens - (max_new_tokens - overlong_tokens)
    if over <= 0:
        return 0.0
    return -penalty * min(over / overlong_tokens, 1.0)

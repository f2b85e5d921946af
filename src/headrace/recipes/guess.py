"""A number from 1 to 64 is to be found in at most seven guesses. See guess.toml."""

from __future__ import annotations

import json
import random
from typing import Any

from headrace import Done

MOST = 64


class Guess:
    """Says of each guess whether the number is higher or lower."""

    max_turns = 7

    def start(self, prompt: Any) -> str:
        self.n = prompt.fields["n"]
        return f"Find my number, 1 to {MOST}."

    def guess(self, x: int) -> str:
        """Guess a number."""
        if x == self.n:
            raise Done("right", reward=1.0)
        return "higher" if x < self.n else "lower"


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` numbers, each with a worked game of guesses that often forget what was said before."""
    rng = random.Random(seed)
    numbers = [rng.randint(1, MOST) for _ in range(count)]
    return [{"prompt": f"{i}", "n": n, "worked": worked(n, rng)} for i, n in enumerate(numbers)]


def worked(n: int, rng: random.Random) -> list[dict[str, Any]]:
    low, high, chat = 1, MOST, list[dict[str, Any]]()
    for _ in range(Guess.max_turns):
        x = rng.randint(low, high) if rng.random() < 0.8 else rng.randint(1, MOST)
        function = {"name": "guess", "arguments": json.dumps({"x": x})}
        chat.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
        if x == n:
            break
        chat.append({"role": "tool", "content": "higher" if x < n else "lower"})
        low, high = (max(low, x + 1), high) if x < n else (low, min(high, x - 1))
    return chat

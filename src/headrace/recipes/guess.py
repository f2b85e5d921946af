"""A number from 1 to 64 is to be found in at most seven guesses. See guess.toml."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from headrace import Done

MOST = 64
SAID = re.compile(r"(?:higher|lower): (\d+) to (\d+)")


class Guess:
    """Says of each guess whether the number is higher or lower, and between which numbers it must be."""

    max_turns = 7

    def start(self, prompt: Any) -> str:
        self.n, self.low, self.high = prompt.fields["n"], 1, MOST
        return f"Find my number, 1 to {MOST}."

    def guess(self, x: int) -> str:
        """Guess a number."""
        if x == self.n:
            raise Done("right", reward=1.0)
        self.low, self.high = (max(self.low, x + 1), self.high) if x < self.n else (self.low, min(self.high, x - 1))
        return f"{'higher' if x < self.n else 'lower'}: {self.low} to {self.high}"


def evenness(group: Any) -> list[list[float]]:
    """Rewards for training: how evenly each guess divides the numbers that are left, 0 if it was ruled out before."""
    found = []
    for answer in group.trajectories:
        left, shares = MOST, list[float]()
        for turn in answer.turns:
            said = SAID.search(" ".join(turn.replies))
            rest = int(said[2]) - int(said[1]) + 1 if said else left
            shares.append(1 - abs(2 * rest - left + 1) / left if rest < left else 0.0)
            left = rest
        if answer.reward == 1.0:  # found
            shares[-1] = 1.0
        found.append(shares)
    return found


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` numbers, each with a worked game of somebody who often forgets what was said."""
    rng = random.Random(seed)
    numbers = rng.choices(range(1, MOST + 1), k=count)
    return [{"prompt": f"game {i}", "n": n, "worked": worked(n, rng)} for i, n in enumerate(numbers)]


def worked(n: int, rng: random.Random) -> list[dict[str, Any]]:
    game, chat = Guess(), list[dict[str, Any]]()
    game.n, game.low, game.high = n, 1, MOST
    for _ in range(Guess.max_turns):
        x = rng.randint(1, MOST) if rng.random() < 0.35 else (game.low + game.high) // 2
        function = {"name": "guess", "arguments": json.dumps({"x": x})}
        chat.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
        if x == n:
            break
        chat.append({"role": "tool", "content": game.guess(x)})
    return chat

"""A game of two players, and both are the policy: take 1 to 3 stones; who takes the last one wins. See self_play.toml.

Each player has a chat of its own, and says by `model` who it is. The rewards are by these names, so that
`learner.credit = "agent"` compares each player with the same player of other games.
"""

from __future__ import annotations

import random
from typing import Any

import openai

PLAYERS, MOST_TAKEN, MOST_STONES = ("first", "second"), 3, 10
HTTP = openai.DefaultAsyncHttpxClient()  # one for all games: each would load the certificates anew


async def run(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    chats: dict[str, list[Any]] = {name: [] for name in PLAYERS}
    stones, mover, other = task["stones"], *PLAYERS
    while True:
        if mover == task.get("perfect"):  # not the policy
            taken = stones % (MOST_TAKEN + 1) or 1
        else:
            chats[mover].append({"role": "user", "content": f"{stones} stones"})
            answer: Any = await client.chat.completions.create(model=mover, messages=chats[mover])
            chats[mover].append(answer.choices[0].message)
            taken = {"1": 1, "2": 2, "3": 3}.get(answer.choices[0].message.content, MOST_STONES + 1)
        if taken >= stones:
            winner = mover if taken == stones else other  # who takes more than there are has lost
            return {name: float(name == winner) for name in PLAYERS if name != task.get("perfect")}
        stones, mover, other = stones - taken, other, mover


# ---- the prompts, with worked games of somebody who takes as many as he likes


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {"prompt": f"game {i}", "stones": rng.randint(2, MOST_STONES), "worked": _worked(rng)} for i in range(count)
    ]


def matches(count: int, seed: int) -> list[dict[str, Any]]:
    """Games that the first player can win, against a second one that makes no mistake."""
    rng = random.Random(seed)
    open_games = [stones for stones in range(2, MOST_STONES + 1) if stones % (MOST_TAKEN + 1)]
    return [{"prompt": f"match {i}", "stones": rng.choice(open_games), "perfect": "second"} for i in range(count)]


def _worked(rng: random.Random) -> list[dict[str, Any]]:
    stones, chat = rng.randint(1, MOST_STONES), list[dict[str, Any]]()
    while stones > 0:
        taken = rng.randint(1, min(MOST_TAKEN, stones))
        chat += [{"role": "user", "content": f"{stones} stones"}, {"role": "assistant", "content": str(taken)}]
        stones -= taken + rng.randint(1, MOST_TAKEN)
    return chat

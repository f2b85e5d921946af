"""A game of TextArena as an environment: episode.environment = "textarena_game.py:Game". pip install textarena."""

from __future__ import annotations

from typing import Any

import textarena

from headrace import Done


class Game:
    """One player. A prompt's record may name another `game`, and its `seed`."""

    game = "GuessTheNumber-v0"

    def start(self, prompt: Any) -> str:
        self.world = textarena.make(prompt.fields.get("game", self.game))
        self.world.reset(num_players=1, seed=prompt.fields.get("seed", 0))
        self.seen = str(self.world.get_observation()[1])
        return self.seen.strip()

    def reply(self, text: str) -> str:
        done, _ = self.world.step(text)
        if done:
            rewards, info = self.world.close()
            raise Done(str(info[0].get("reason", "")), reward=float(rewards[0]))
        before, self.seen = self.seen, str(self.world.get_observation()[1])
        # an observation repeats all before it, and what the player said: the chat has both already
        return self.seen.removeprefix(before).strip().removeprefix("[Player]").strip().removeprefix(text).strip()


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """For prompts.source = "textarena_game.py:tasks"."""
    return [{"prompt": f"game {i}", "seed": seed * 1_000_003 + i} for i in range(count)]

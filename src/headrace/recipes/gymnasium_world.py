"""A text world of Gymnasium as an environment: episode.environment = "gymnasium_world.py:World".

Needs pip install gymnasium. For another world that draws itself as text, set `world`, `options` and `actions`.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium

from headrace import Done, Observation

SHOWN = re.compile("\x1b\\[\\d+m(.)\x1b\\[0m")  # the place of the player, in colour


class World:
    """The policy sees the map, and says where to go."""

    world, options, max_turns = "FrozenLake-v1", {"is_slippery": False}, 20
    actions = ("left", "down", "right", "up")  # by their numbers

    def start(self, prompt: Any) -> str:
        self.env: Any = gymnasium.make(self.world, render_mode="ansi", **self.options)
        self.env.reset(seed=prompt.fields.get("seed", 0))
        return f"You are at []. Reach G, keep off H. Say {', '.join(self.actions)}.\n{self._map()}"

    def reply(self, text: str) -> Any:
        said = text.strip().lower()
        if said not in self.actions:
            return f"error: say one of {', '.join(self.actions)}"
        _, reward, ended, cut, _ = self.env.step(self.actions.index(said))
        if ended or cut:
            raise Done(self._map(), reward=float(reward))
        return Observation(self._map(), reward=float(reward))

    def state(self) -> str:
        return self._map()

    def close(self) -> None:
        self.env.close()

    def _map(self) -> str:
        return SHOWN.sub(r"[\1]", str(self.env.render())).rpartition(")\n")[2].strip()


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """For prompts.source = "gymnasium_world.py:tasks"."""
    return [{"prompt": f"walk {i}", "seed": seed * 1_000_003 + i} for i in range(count)]

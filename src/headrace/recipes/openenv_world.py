"""An environment of OpenEnv, on a server of its own: episode.environment = "openenv_world.py:OpenEnvWorld".

    OPENENV_URL=http://localhost:8000 headrace train my.toml

Needs pip install websockets; openenv itself (0.10 was tried) is needed where the server runs. The server should allow
as many sessions as there are episodes at a time, up to rollout.max_running: the class needs
SUPPORTS_CONCURRENT_SESSIONS = True, and create_app max_concurrent_envs=256. An episode that finds no session waits,
and is dropped after 40 seconds.

The first message is the prompt, and what `reset` shows; `reset` is given the fields of the prompt's record that it has
parameters for, such as `seed`. If the action is one text, it is what the policy says. Any other action is said as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.request import urlopen

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from headrace import Done, Observation, UnavailableError

MAX_BYTES = 100 << 20  # of a message, as in OpenEnv's own client
WAITS_S = (0.1, 0.5, 2.0, 5.0, 10.0, 20.0)  # for a session to end; less than episode.timeout_s together


class OpenEnvWorld:
    """One session of the server. A subclass may set the `url`, and name a field for each direction:

    what the policy says becomes that field of an action, and that field of an observation is shown.
    """

    url = os.environ.get("OPENENV_URL", "http://localhost:8000")
    said, shown = "", ""

    async def start(self, prompt: Any) -> str:
        try:
            schema = await asyncio.to_thread(_schema, self.url)
            began = await self._begin(dict(prompt.fields))
        except (OSError, WebSocketException) as error:
            raise UnavailableError(f"the OpenEnv server at {self.url} cannot be reached: {error}") from error
        if [about.get("type") for about in schema["properties"].values()] == ["string"]:
            self.said = self.said or next(iter(schema["properties"]))
        how = "" if self.said else f"Say each action as JSON of this schema: {json.dumps(schema)}"
        return "\n".join(filter(None, (prompt.text, self._text(began), how)))

    async def reply(self, text: str) -> Any:
        try:
            action = {self.said: text} if self.said else json.loads(text)
            found = await self._ask("step", action)
        except (ValueError, RecursionError) as error:  # what the policy said is no action
            return f"error: {error}"
        shown, reward = self._text(found), found.get("reward")
        if found.get("done"):
            raise Done(shown, reward=None if reward is None else float(reward))
        return shown if reward is None else Observation(shown, reward=float(reward))

    async def close(self) -> None:
        await self.socket.close()  # which ends the session

    async def _begin(self, fields: dict[str, Any]) -> dict[str, Any]:
        waits_s = iter(WAITS_S)
        while True:
            self.socket = await connect(f"ws{self.url.removeprefix('http')}/ws", max_size=MAX_BYTES)
            try:
                return await self._ask("reset", fields)
            except BaseException as error:
                await self.close()
                wait_s = next(waits_s, None) if isinstance(error, UnavailableError) else None
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    async def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        try:
            with suppress(WebSocketException):  # a full server has said so, and closed
                await self.socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(await self.socket.recv())
        except WebSocketException as error:
            raise UnavailableError(f"the OpenEnv server at {self.url} went away: {error}") from error
        found: dict[str, Any] = answer["data"]
        if answer["type"] != "error":
            return found
        code, why = found.get("code"), found.get("message")
        if code == "VALIDATION_ERROR":
            parts = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found.get("errors", ())]
            raise ValueError("; ".join(parts) or why)
        if code == "CAPACITY_REACHED":
            raise UnavailableError(f"the OpenEnv server at {self.url} is full: {why}")
        raise RuntimeError(f"the OpenEnv environment failed ({code}): {why}")

    def _text(self, found: dict[str, Any]) -> str:
        fields = {name: value for name, value in found["observation"].items() if name != "metadata"}
        if self.shown or len(fields) == 1:
            fields = fields[self.shown or next(iter(fields))]
        return fields if isinstance(fields, str) else json.dumps(fields) if fields != {} else ""


@lru_cache
def _schema(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/schema", timeout=10) as answer:
        schema: dict[str, Any] = json.load(answer)["action"]
    schema["properties"].pop("metadata", None)
    return schema


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """For prompts.source = "openenv_world.py:tasks"."""
    return [{"prompt": "Say your next action.", "seed": (seed * 1_000_003 + i) % 2**31} for i in range(count)]

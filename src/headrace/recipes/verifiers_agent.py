"""An agent that plays an environment of Prime Intellect's verifiers (0.4 was tried): any taskset, with its rewards.

VERIFIERS_ENV names a TOML file with the block [env] of `vf-eval`:

    [env.taskset]
    id = "my-taskset"                     # a package or a module that verifiers can import

    [env.agent]                           # the role: `agent`, unless the taskset brings an Env with others
    harness = {id = "null"}               # the loop around the model; this one chats, and calls MCP tools
    runtime = {type = "subprocess"}

With `pip install -e '.[serve]' verifiers` in one virtual environment, episode.agent = "verifiers_agent.py:run". Or let
verifiers have one of its own, set episode.agent = "remote", and start as many of these as are wanted:

    VERIFIERS_ENV=env.toml HEADRACE_KEY=... python verifiers_agent.py http://HOST:PORT [EPISODES AT A TIME]

The endpoint records what is sampled, so verifiers' plain client is used: it needs no tokenizer.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tomllib
from functools import cache
from itertools import islice
from typing import Any


@cache
def _environment() -> tuple[Any, Any]:
    import verifiers.v1 as vf  # here, because the trainer may want `tasks` alone

    if not (path := os.environ.get("VERIFIERS_ENV")):
        raise ValueError("VERIFIERS_ENV must name a TOML file with the block [env] of vf-eval")
    with open(path, "rb") as file:
        environment = vf.load_environment(vf.resolve_env_config(tomllib.load(file)["env"]))
    return vf, environment


@cache
def _task(number: int) -> Any:
    return next(islice(_environment()[1].taskset, number, None))


async def run(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    vf, environment = _environment()
    # the key stands in the path, because verifiers reads keys from the environment of the process
    client = vf.EvalClientConfig(base_url=f"{base_url.removesuffix('/v1')}/sessions/{api_key}/v1", api_key_var="NO_KEY")
    episode = await environment.run_episode(_task(task["number"]), vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    parts: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            parts[name] = parts.get(name, 0.0) + reward.score * reward.weight
    return parts


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """For prompts.source = "verifiers_agent.py:tasks": the first `count` tasks of the taskset."""
    return [{"prompt": f"task {number}", "number": number} for number in range(count)]


async def pull(root: str, key: str) -> None:
    """Plays episodes of a run with episode.agent = "remote" until it is over."""
    import httpx

    pulled: Any = None
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {key}"}) as http:
        while pulled is None or pulled.status_code != 410:
            try:
                pulled = await http.post(f"{root}/episodes")
            except httpx.TransportError:  # the run has not begun, or is over, and its endpoint gone
                if pulled is not None:
                    return
            if pulled is None or pulled.status_code == 503:  # no episode is waiting
                await asyncio.sleep(1)
            elif pulled.status_code != 410:
                await play(http, root, pulled.raise_for_status().json())


async def play(http: Any, root: str, episode: dict[str, Any]) -> None:
    try:
        reward = await run(episode["task"], episode["base_url"], episode["api_key"])
        headers = {"Authorization": f"Bearer {episode['api_key']}"}
        await http.post(f"{root}/episodes/{episode['id']}/reward", json={"reward": reward}, headers=headers)
    except Exception as error:  # it is dropped when the run has waited long enough for its reward
        print(f"episode {episode['id']}: {error}", file=sys.stderr)


async def main(root: str, at_a_time: int) -> None:
    if "HEADRACE_KEY" not in os.environ:
        raise ValueError("HEADRACE_KEY must be the key that the run was given, or prints")
    async with _environment()[1].serving():
        await asyncio.gather(*(pull(root, os.environ["HEADRACE_KEY"]) for _ in range(at_a_time)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int((sys.argv[2:] or ["16"])[0])))

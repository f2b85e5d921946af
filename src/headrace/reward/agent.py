"""An agent that is a function, in a worker process: `run(task, base_url, api_key)`, which returns its reward.

It may be a coroutine. An ordinary function runs in a thread, so that many agents wait for the
policy at once.
"""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from headrace.errors import ConfigError
from headrace.reward.function import RewardFunction, read_verdict
from headrace.types import Command, Score
from headrace.user_code import load_function

MOST_THREADS = 256  # agents that one worker runs at a time


def _read(verdict: Any) -> Score:
    """The parts of the reward; without one, an empty `value`."""
    score = Score(reward=0.0, value={}) if verdict is None else read_verdict(verdict, "agent")
    return replace(score, detail=score.detail.replace("the reward function", "the agent"))


def agent_function(spec: str) -> RewardFunction:
    """The function that `episode.agent = spec` names, to be called with a `Command`. Imports the user's code."""
    run = load_function(spec, "episode.agent", ConfigError)
    try:
        inspect.signature(run).bind({}, "", "")
    except TypeError as error:
        raise ConfigError(f"episode.agent = '{spec}' must take (task, base_url, api_key): {error}") from error
    threads, going = ThreadPoolExecutor(MOST_THREADS), dict[str, asyncio.Task[Any] | None]()

    async def call(command: Command) -> Any:
        if command.do == "cancel":  # a thread goes on to its end
            if task := going.get(command.episode):
                task.cancel()
            return None
        going[command.episode] = asyncio.current_task()
        try:
            if inspect.iscoroutinefunction(run):
                return await run(*command.given)
            return await asyncio.get_running_loop().run_in_executor(threads, run, *command.given)
        finally:
            del going[command.episode]

    return RewardFunction(name="agent", call=call, mode="async", read=_read)

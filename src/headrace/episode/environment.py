"""Environments, as an episode sees them. They live in worker processes (reward/environment.py).

A process that is lost takes its environments with it. Each is made again elsewhere: from its
snapshot, or from the start, by the same turns. An episode is dropped if it then replies otherwise.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from headrace.config import EpisodeSection
from headrace.episode.session import EpisodeFailedError
from headrace.errors import ConfigError, RewardError
from headrace.roles import Judge
from headrace.types import Command, DropReason, Prompt

ADVICE = (
    "an environment must be the same for the same prompt and turns (take random numbers from the prompt), "
    "or have snapshot() and restore(snapshot)"
)


class _LostError(EpisodeFailedError):
    """The environment's process was replaced."""


class Said(BaseModel, frozen=True, strict=True, allow_inf_nan=False):
    """An environment's reply to a turn, checked: the user's code can write to the socket of its process.

    Example: Said(replies=("higher",), done=False)
    """

    replies: tuple[str, ...] = Field(strict=False)  # or a list
    done: bool
    reward: float | None = None
    state: str = ""
    snapshot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What is known of an environment before any episode."""

    tools: Sequence[Mapping[str, Any]]
    takes_text: bool  # it replies to answers without a tool call
    scores: bool  # it has a reward at the end
    max_turns: int
    max_tokens: int  # 0: the model's context
    max_s: float  # 0: no limit


class Environments:
    """All environments of a run. `hosts` are the worker processes they live in."""

    def __init__(self, hosts: Sequence[Judge[Command]], section: EpisodeSection) -> None:
        self._hosts, self._section = hosts, section
        self._next = itertools.count()
        self.described: Described

    async def start(self) -> None:
        """Raises if the environment's class cannot be loaded."""
        for host in self._hosts:
            await host.start()
        section, answer = self._section, await self._hosts[0].run(Command(episode="", do="describe"))
        if answer.failure is not None:
            raise ConfigError(f"episode.environment = '{section.environment}': {answer.detail}")
        found, limits = answer.value, dict[str, Any]()
        for name in ("max_turns", "max_tokens", "max_s"):
            own, most = found.get(name), getattr(section, name)
            if own is not None and (isinstance(own, bool) or not isinstance(own, int | float) or own < 0):
                raise ConfigError(f"episode.environment = '{section.environment}': {name} = {own!r} is not a limit")
            limits[name] = min(filter(None, (own, most)), default=0)
        self.described = Described(**{**found, **limits})

    def open(self, episode: str, prompt: Prompt) -> "Environment":
        return Environment(self._hosts[next(self._next) % len(self._hosts)], episode, prompt)

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()


class Environment:
    """The environment of one episode."""

    def __init__(self, host: Judge[Command], episode: str, prompt: Prompt) -> None:
        self._host, self._episode = host, episode
        self._prompt = replace(prompt, fields=dict(prompt.fields))
        self._log: list[tuple[Any, tuple[str, ...]]] = []  # turns so far, with the replies
        self._snapshot = ""
        self.state = ""

    async def start(self) -> list[Mapping[str, Any]]:
        """The messages that the episode begins with."""
        found = await self._ask("start", self._prompt)
        self.state = str(found.get("state", ""))
        if (said := found.get("said")) is None:
            return list(self._prompt.messages) or [{"role": "user", "content": self._prompt.text}]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        fits = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
        if not (fits and messages):
            raise EpisodeFailedError(f"start() returned {said!r}; it must be a text, a list of messages, or None")
        return messages

    async def turn(self, given: Mapping[str, Any]) -> Said:
        """The reply to tool calls, or to a text."""
        said = _said(await self._ask_again("turn", given))
        self._log.append((given, said.replies))
        self._snapshot, self.state = said.snapshot, said.state or "\n".join(said.replies)
        return said

    async def make_again(self, log: Sequence[tuple[Any, tuple[str, ...]]], snapshot: str = "") -> None:
        """Bring a new environment to where another one was after the turns in `log`."""
        self._log, self._snapshot = list(log), snapshot
        with suppress(_LostError):  # again: the next request finds that out
            if snapshot:
                await self._ask("restore", snapshot)
                return
            await self._ask("start", self._prompt)
            for number, (given, before) in enumerate(self._log, 1):
                said = _said(await self._ask("turn", given))
                if said.replies != before:
                    problem = f"the reply to turn {number} was {before}, and is {said.replies} when it is repeated"
                    raise EpisodeFailedError(f"{problem}; {ADVICE}")

    async def end(self) -> dict[str, float]:
        """The parts of its reward for the whole episode; none if it has no `reward`."""
        reward = (await self._ask_again("score", None)).get("reward")
        parts = reward if isinstance(reward, dict) else {} if reward is None else {"environment": reward}
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in parts.values()):
            raise EpisodeFailedError(f"reward() returned {reward!r}; it must be a finite number, or a dict of them")
        return {name: float(number) for name, number in parts.items()}

    async def close(self) -> None:
        with suppress(EpisodeFailedError, RewardError):
            await self._ask("end", None)

    async def _ask(self, do: str, given: Any) -> dict[str, Any]:
        score = await self._host.run(Command(episode=self._episode, do=do, given=given))
        if score.failure is not None:
            raise EpisodeFailedError(score.detail, DropReason(score.failure.replace("reward_", "env_")))
        if not isinstance(score.value, dict):
            raise EpisodeFailedError(f"its process sent {score.value!r}")
        if score.value.get("lost"):
            raise _LostError("its process ended")
        return score.value

    async def _ask_again(self, do: str, given: Any) -> dict[str, Any]:
        """If its process was replaced meanwhile, the environment is made again first.

        That is another's fault, however often it happens: who ends the process is told so.
        """
        while True:
            with suppress(_LostError):
                return await self._ask(do, given)
            await self.make_again(self._log, self._snapshot)


def _said(value: Mapping[str, Any]) -> Said:
    try:
        return Said.model_validate(value)
    except ValidationError as error:
        raise EpisodeFailedError(f"its process sent {value!r}, which is no reply") from error

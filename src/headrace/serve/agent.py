"""Episodes of an agent: a program that knows nothing of Headrace asks the endpoint for its turns.

Each episode has a key. The agent is a command, a function in a worker process, or a client that
pulls episodes. Its reward is what it returns, prints or reports, else the reward function's.
"""

import asyncio
import itertools
import json
import math
import os
import secrets
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile
from typing import Any

from headrace.config import Config
from headrace.episode.chat import Message
from headrace.episode.session import AbortedError, Desk, EpisodeFailedError, Session
from headrace.errors import ConfigError
from headrace.reward.agent import MOST_THREADS
from headrace.reward.function import Setup
from headrace.reward.pool import JudgePool
from headrace.serve.conversation import Conversation, Parts
from headrace.serve.front_desk import FrontDesk, parts_of
from headrace.types import Command, DropReason, Example, Outcome, Prompt
from headrace.user_code import names_function

KEY = "HEADRACE_KEY"  # in the environment: what remote agents say
DAY_S = 86_400.0
COMMANDS_PER_WORKER = 16  # that run at a time
KEPT_BYTES = 1 << 16  # of a command's output
LONGEST_VARIABLE = 100_000  # characters: a longer task comes on standard input only
MOST_DETAIL = 1500  # characters of what a command complained of
GRACE_S = 2.0  # for an agent that has reached a limit to end by itself
# Runs beside commands. Once this process has died, it ends all that have a key of the run in their environment.
GUARD = 'cat; for i in 1 2 3; do kill -9 $(grep -ls "$0" /proc/[0-9]*/environ | cut -d/ -f3); sleep 1; done'
agent_failed = partial(EpisodeFailedError, reason=DropReason.AGENT_ERROR)  # without a reward


class Agents:
    """The agents of a training run, and the endpoint that they talk to; asked like a `Player`."""

    def __init__(self, config: Config, desk: Desk, on_note: Callable[[str], None]) -> None:
        self._section = section = config.episode
        self.desk, self._on_note = desk, on_note
        self._reward_follows = bool(config.reward.function)  # it adds to what the agent says
        agent, (host, _, port) = section.agent, section.listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"episode.listen = '{section.listen}': expected host:port, such as 127.0.0.1:8001")
        self._at, self._open = (host.strip("[]"), int(port)), AsyncExitStack()
        self.close = self._open.aclose
        self._key = (os.environ.get(KEY) or secrets.token_urlsafe(24)) if agent == "remote" else ""
        self._mark = f"sk-{secrets.token_hex(8)}"  # all keys of episodes begin with it
        self._front = FrontDesk(os.path.basename(config.model.path), desk.max_context, self._key)
        self._hosts: list[JudgePool] = []  # for an agent that is a function
        if names_function(agent):
            limit_s = section.max_s + section.timeout_s if section.max_s else DAY_S
            setup = Setup(function=agent, timeout_s=limit_s, setting="episode.agent")
            self._hosts = [JudgePool(setup, num_workers=1, retries=0) for _ in range(section.workers)]
        self._next = itertools.cycle(self._hosts)
        self._slots = asyncio.Semaphore(section.workers * (MOST_THREADS if self._hosts else COMMANDS_PER_WORKER))

    async def prepare(self) -> None:
        """Raises if the agent cannot be loaded, or nothing can be served."""
        agent = self._section.agent
        try:
            program = "" if self._hosts or self._key else (shlex.split(agent) or [agent])[0]
        except ValueError as error:
            raise ConfigError(f"episode.agent = '{agent}' cannot be started: {error}") from error
        if program and not shutil.which(program):
            raise ConfigError(f"episode.agent = '{agent}' cannot be started: there is no command '{program}'")
        if program:
            words = ["sh", "-c", GUARD, f"OPENAI_API_KEY={self._mark}"]
            guard = Popen(words, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
            self._open.callback(self._open.enter_context(guard).kill)
        await self._open.enter_async_context(self._front.listening(*self._at))
        if self._key:
            key = f"the key in {KEY}" if os.environ.get(KEY) else f"the key {self._key}"
            self._on_note(f"remote agents pull episodes at {self._front.base_url[:-3]}/episodes with {key}")
        for host in self._hosts:
            self._open.push_async_callback(host.close)
            await host.start()
        self.desk.chat.prove()

    async def play(self, session: Session) -> Outcome:
        """One episode, from its first request to its reward."""
        if session.known is not None and session.known.turns:
            session.trajectory = replace(session.known, id=session.id)
        section, key = self._section, f"{self._mark}-{secrets.token_urlsafe(24)}"
        conversation = Conversation(session, max_turns=section.max_turns, max_tokens=section.max_tokens)
        self._front.admit(key, conversation)
        reward: Parts | EpisodeFailedError | None = None
        try:
            reward = await session.unless_aborted(self._run(conversation, key))
        except EpisodeFailedError as failed:
            reward = failed
        except asyncio.CancelledError:  # nobody hears the engines any more
            conversation.give_up()
            raise
        finally:
            self._front.dismiss(key)
            await conversation.close("the episode is over")
        if session.aborted.is_set():
            raise AbortedError
        if not isinstance(reward, dict) and conversation.reward.done():
            reward = conversation.reward.result()
        return self._outcome(conversation, reward)

    async def _run(self, conversation: Conversation, key: str) -> Parts | None:
        """An agent is told the prompt's record, but for a worked example."""
        prompt = conversation.session.order.prompt
        fields = {name: value for name, value in prompt.fields.items() if name != "worked"}
        task = {**fields, "id": prompt.id, "prompt": prompt.text, "messages": list(prompt.messages)}
        if self._key:
            await self._front.offer({"id": conversation.id, "task": task, "api_key": key})
            return await self._watched(conversation, conversation.reward)
        async with self._slots:
            launched = asyncio.create_task(self._launch(conversation.id, task, key))
            try:
                return await self._watched(conversation, launched)
            finally:
                launched.cancel()
                await asyncio.wait([launched])

    async def _watched(self, conversation: Conversation, ending: asyncio.Future[Any]) -> Parts | None:
        """What the agent ends with. It is ended if it takes too long, or asks for nothing."""
        now, limit_s, patience_s = self.desk.now, self._section.max_s, self._section.timeout_s
        conversation.idle()
        began_s = now()
        while not ending.done():
            left_s = began_s + limit_s - now() if limit_s else math.inf
            idle_s = now() - conversation.idle_since_s if conversation.is_idle else 0.0
            if left_s <= 0:
                conversation.end(f"the episode may take {limit_s:g} s")
                await asyncio.wait([ending], timeout=GRACE_S)
                return ending.result() if ending.done() else None
            if idle_s >= patience_s:
                detail = f"the agent neither asked for anything nor ended in {patience_s:g} s (episode.timeout_s)"
                raise EpisodeFailedError(detail, DropReason.ABANDONED if self._key else DropReason.AGENT_ERROR)
            await asyncio.wait([ending], timeout=min(left_s, patience_s - idle_s) + 0.01)
        return ending.result()  # type: ignore[no-any-return]

    def _outcome(self, conversation: Conversation, reward: Parts | EpisodeFailedError | None) -> Outcome:
        session, follows = conversation.session, self._reward_follows
        if conversation.unclaimed:
            raise agent_failed("the agent was run again after a restart, and did not ask what it had asked before")
        if session.trajectory.turns and conversation.ended_by and not isinstance(reward, dict):
            reward = {} if follows else {"agent": 0.0}  # by the policy: an end with a reward
        if isinstance(reward, EpisodeFailedError):
            raise reward
        if not session.trajectory.turns:
            raise agent_failed("it asked for nothing")
        if reward is None and not follows:
            raise agent_failed(
                'the agent ended without a reward: return one, print it as the last line ({"reward": 1.0}), '
                "report it to /episodes/ID/reward, or set reward.function"
            )
        return session.outcome(reward or {}, reward_follows=follows)

    async def _launch(self, id: str, task: Mapping[str, Any], key: str) -> Parts | None:
        if not self._hosts:
            return await run_command(self._section.agent, task, self._front.base_url, key)
        given, host = (task, self._front.base_url, key), next(self._next)
        try:
            score = await host.run(Command(episode=id, do="agent", given=given))
        except asyncio.CancelledError:  # it is given up: its place is another's
            with suppress(Exception):
                await asyncio.wait_for(host.run(Command(episode=id, do="cancel")), GRACE_S)
            raise
        if score.failure is not None:
            raise agent_failed(score.detail)
        return dict(score.parts) or None

    async def worked(self, prompt: Prompt, chat: Sequence[Message]) -> Example:
        """The tokens of a worked chat, with the tools in the field `tools`, and which of them are answers."""
        first = next((i for i, message in enumerate(chat) if message.get("role") == "assistant"), len(chat))
        history = list(chat[:first]) or list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        return self.desk.chat.worked(history, chat[first:], prompt.fields.get("tools"))


async def run_command(command: str, task: Mapping[str, Any], base_url: str, key: str) -> Parts | None:
    """Run an agent that is a command, and end all processes that it leaves.

    The reward is its last line: {"reward": 1.0}, or {"reward": {"right": 1.0, "short": 0.2}}.
    """
    text = json.dumps(task, default=str)
    env = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    env |= {"HEADRACE_TASK": text} if len(text) <= LONGEST_VARIABLE else {}
    # files, not pipes: what the command has left behind may keep those open, and nobody could wait for its end
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        own: dict[str, Any] = {"stdin": given, "stdout": out, "stderr": err, "env": env, "start_new_session": True}
        starting = asyncio.create_task(asyncio.create_subprocess_exec(*shlex.split(command), **own))
        try:
            process = await asyncio.shield(starting)
            await process.wait()
        except OSError as error:
            raise ConfigError(f"episode.agent = '{command}' cannot be started: {error}") from error
        finally:
            await asyncio.wait([starting])  # cancelled, we may be here before it has started
            if starting.exception() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(starting.result().pid, signal.SIGKILL)
                await starting.result().wait()
        for file in (out, err):
            file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT_BYTES))
        printed, complaints = (file.read(KEPT_BYTES).decode(errors="replace").strip() for file in (out, err))
    if process.returncode:
        raise agent_failed(f"the command ended with {process.returncode}: {complaints[-MOST_DETAIL:]}")
    with suppress(ValueError):
        return parts_of(json.loads(printed.rpartition("\n")[2]))
    return None

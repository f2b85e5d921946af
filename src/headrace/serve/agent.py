"""Episodes of an agent: a program that knows nothing of Headrace asks the endpoint for its turns.

Each episode has a key. The agent is a command, a function in a worker process, or a client elsewhere
that pulls episodes. Its reward is what it returns, prints or reports, else the reward function's.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from headrace.config import EpisodeSection
from headrace.episode.session import AbortedError, Desk, Session
from headrace.errors import ConfigError
from headrace.roles import Judge
from headrace.serve.conversation import Conversation, Limits
from headrace.serve.front_desk import FrontDesk, Parts, Seat, parts_of
from headrace.types import Command, DropReason, FinishReason, Order, Outcome, Prompt

COMMANDS_PER_WORKER = 16  # that run at a time
KEPT_BYTES = 1 << 16  # of a command's output
LONGEST_VARIABLE = 100_000  # characters: a longer task comes on standard input only
MOST_DETAIL = 1500  # characters of what a command complained of
GRACE_S = 2.0  # for an agent that has reached a limit to end by itself


class AgentFailedError(Exception):
    """An agent that ended without a reward: its episode is dropped."""

    def __init__(self, detail: str, reason: DropReason = DropReason.AGENT_ERROR) -> None:
        super().__init__(detail)
        self.reason = reason


def is_function(agent: str) -> bool:
    """Whether `episode.agent` names a function, not a command."""
    return ":" in agent and not any(map(str.isspace, agent)) and agent.rpartition(":")[2].isidentifier()


@dataclass(eq=False)
class Agents:
    """Runs the agents of a training run. `hosts` are worker processes, for an agent that is a function."""

    section: EpisodeSection
    desk: Desk
    front: FrontDesk
    hosts: Sequence[Judge[Command]]
    reward_follows: bool = False  # a reward function adds to what the agent says

    def __post_init__(self) -> None:
        self._next = count()
        at_once = sys.maxsize if self.hosts else self.section.workers * COMMANDS_PER_WORKER
        self.slots = asyncio.Semaphore(at_once)

    async def prepare(self) -> None:
        """Raises if the agent cannot be loaded."""
        for host in self.hosts:
            await host.start()
        self.desk.chat.prove()

    async def close(self) -> None:
        self.front.close()
        for host in self.hosts:
            await host.close()

    def open(self, order: Order, i: int) -> AgentEpisode:
        session, known = Session(self.desk, order, i), (order.so_far or {}).get(order.indices[i])
        if known is not None and known.turns:
            session.trajectory = replace(known, id=session.id)
        return AgentEpisode(self, session)

    async def launch(self, id: str, task: Mapping[str, Any], key: str) -> Parts | None:
        """Run an agent to its end."""
        if self.hosts:
            host = self.hosts[next(self._next) % len(self.hosts)]
            given = {"task": dict(task), "base_url": self.front.base_url, "api_key": key}
            score = await host.run(Command(episode=id, do="agent", given=given))
            if score.failure is not None:
                raise AgentFailedError(score.detail)
            return parts_of(score.value.get("reward")) if isinstance(score.value, dict) else None
        return await run_command(self.section.agent, task, self.front.base_url, key)


class AgentEpisode:
    """One episode of an agent, from its first request to its reward."""

    def __init__(self, agents: Agents, session: Session) -> None:
        self.session, self._agents, self._section = session, agents, agents.section
        self._key = f"sk-{secrets.token_urlsafe(24)}"

    async def play(self) -> Outcome:
        session, section, front = self.session, self._section, self._agents.front
        limits = Limits(max_turns=section.max_turns, max_tokens=section.max_tokens)
        conversation = Conversation(session, limits, session.trajectory.turns)
        seat = Seat(secrets.token_hex(12), conversation)
        front.admit(self._key, seat)
        reward: Parts | AgentFailedError | None = None
        try:
            reward = await session.unless_aborted(self._run(seat))
        except AgentFailedError as failed:
            reward = failed
        except AbortedError:
            pass
        finally:
            front.dismiss(self._key)
            await conversation.close("the episode is over")
        if session.aborted.is_set():
            return Outcome(trajectory=replace(session.trajectory, finish=FinishReason.ABORT))
        if not isinstance(reward, dict) and seat.reward.done():
            reward = seat.reward.result()
        return self._outcome(conversation, reward)

    async def _run(self, seat: Seat) -> Parts | None:
        """The agent's own reward, when it has ended or was ended."""
        task = task_of(self.session.order.prompt)
        if self._section.agent == "remote":
            await self._agents.front.offer({"id": seat.id, "task": task, "api_key": self._key})
            return await self._watched(seat.conversation, seat.reward)
        async with self._agents.slots:
            launched = asyncio.create_task(self._agents.launch(seat.id, task, self._key))
            try:
                return await self._watched(seat.conversation, launched)
            finally:
                launched.cancel()
                await asyncio.wait([launched])

    async def _watched(self, conversation: Conversation, ending: asyncio.Future[Any]) -> Parts | None:
        """What the agent ends with. It is ended if it takes too long, or asks for nothing any more."""
        now, limit_s, patience_s = self.session.desk.now, self._section.max_s, self._section.timeout_s
        conversation.open()
        began_s = now()
        while True:
            due_s = (conversation.idle_since_s if conversation.is_idle else now()) + patience_s
            due_s = min(due_s, began_s + limit_s) if limit_s else due_s
            done, _ = await asyncio.wait([ending], timeout=max(0.0, due_s - now()) + 0.01)
            if done:
                return ending.result()  # type: ignore[no-any-return]
            if limit_s and now() >= began_s + limit_s:
                conversation.end(f"the episode may take {limit_s:g} s")
                await asyncio.wait([ending], timeout=GRACE_S)
                return ending.result() if ending.done() else None
            if conversation.is_idle and now() >= conversation.idle_since_s + patience_s:
                remote = self._section.agent == "remote"
                detail = f"the agent neither asked for anything nor ended in {patience_s:g} s (episode.timeout_s)"
                raise AgentFailedError(detail, DropReason.ABANDONED if remote else DropReason.AGENT_ERROR)

    def _outcome(self, conversation: Conversation, reward: Parts | AgentFailedError | None) -> Outcome:
        trajectory, follows = self.session.trajectory, self._agents.reward_follows
        if conversation.num_unclaimed:
            detail = "the agent was run again after a restart, and did not ask what it had asked before"
            reward = AgentFailedError(detail)
        elif not trajectory.turns:
            reward = reward if isinstance(reward, AgentFailedError) else AgentFailedError("it asked for nothing")
        elif conversation.ended_by and not isinstance(reward, dict):  # by the policy: an end with a reward
            reward = {} if follows else {"agent": 0.0}
        elif reward is None and not follows:
            reward = AgentFailedError(
                'the agent ended without a reward: return one, print it as the last line ({"reward": 1.0}), '
                "report it to /episodes/ID/reward, or set reward.function"
            )
        if isinstance(reward, AgentFailedError):
            return Outcome(trajectory=trajectory, failure=reward.reason, detail=str(reward))
        trajectory = replace(trajectory, reward_parts=reward or {})
        if follows:
            return Outcome(trajectory=trajectory)
        timing = replace(trajectory.timing, scored_s=self.session.desk.now())
        total = float(sum(trajectory.reward_parts.values()))
        return Outcome(trajectory=replace(trajectory, reward=total, timing=timing))


def task_of(prompt: Prompt) -> dict[str, Any]:
    """What an agent is told: the prompt's record. A worked example is not part of the task."""
    fields = {name: value for name, value in prompt.fields.items() if name != "worked"}
    return {**fields, "id": prompt.id, "prompt": prompt.text, "messages": list(prompt.messages)}


async def run_command(command: str, task: Mapping[str, Any], base_url: str, key: str) -> Parts | None:
    """Run an agent that is a command, and end all processes that it leaves. The reward is its last line."""
    text = json.dumps(task, default=str)
    env = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key}
    env |= {"HEADRACE_TASK": text} if len(text) <= LONGEST_VARIABLE else {}
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"episode.agent = '{command}' cannot be started: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    tails = asyncio.gather(_tail(process.stdout), _tail(process.stderr))
    try:
        with suppress(ConnectionError):
            process.stdin.write(text.encode())
            process.stdin.close()
        await process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        printed, complaints = await tails
        await process.wait()
    if process.returncode:
        detail = complaints.decode(errors="replace").strip()[-MOST_DETAIL:]
        raise AgentFailedError(f"the command ended with {process.returncode}: {detail}")
    return _last_reward(printed.decode(errors="replace"))


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while read := await stream.read(KEPT_BYTES):
        kept = (kept + read)[-KEPT_BYTES:]
    return kept


def _last_reward(printed: str) -> Parts | None:
    """From a line such as {"reward": 1.0}, or {"reward": {"right": 1.0, "short": 0.2}}."""
    try:
        last = json.loads(printed.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return parts_of(last.get("reward")) if isinstance(last, dict) else None

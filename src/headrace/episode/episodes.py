"""Episodes: the policy and an environment take turns, until one of them ends it.

Turns are appended token by token to what was sampled (chat.py), and each is a request of its own to
the engine, which goes on from the cache of the turn before it. `Episodes` is asked like the pool of
engines: groups in, one future per answer out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from headrace.episode.answer import ParsedAnswer
from headrace.episode.chat import Chat, Message
from headrace.episode.environment import ADVICE, Environment, EnvironmentFailedError, Environments, Said
from headrace.episode.tree import context, indices, told, turned
from headrace.errors import ChatError, ConfigError
from headrace.types import (
    BoolArray,
    DropReason,
    FinishReason,
    IntArray,
    Order,
    Outcome,
    Prompt,
    Sampling,
    Trajectory,
    Turn,
)

R = TypeVar("R")


class _AbortedError(Exception):
    """The episode's group is not wanted any more."""


@dataclass(eq=False)
class Episodes:
    """All episodes of a run. `sample` and `forget` are those of the engines, `abort` ends their requests."""

    environments: Environments
    chat: Chat
    _: KW_ONLY
    max_context: int
    system: str  # a message before every episode, if the environment begins without one
    reward_follows: bool  # a reward function adds to what the environment says
    sample: Callable[[Order], Awaitable[Trajectory]]
    forget: Callable[[str], None]
    abort_requests: Callable[[Sequence[int]], None]
    now: Callable[[], float]
    span: Callable[[str], AbstractContextManager[None]]
    on_turn: Callable[[int, Trajectory], None]  # a group's serial, and the episode with its newest turn
    on_note: Callable[[str], None] = lambda text: None
    _running: dict[int, set[_Episode]] = field(default_factory=dict, init=False)  # by serial, if counted
    _tasks: set[asyncio.Task[Outcome]] = field(default_factory=set, init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def prepare(self) -> None:
        """Raises if the environment cannot be loaded, or the chat template cannot serve it."""
        await self.environments.start()
        described = self.environments.described
        proof = self.chat.prove(described.tools or None)
        if described.tools and not proof.calls:
            raise ConfigError(f"episode.environment has tools, but {proof}")
        kinds = ["a tool result"] * bool(described.tools) + ["a user message"] * described.takes_text
        if any(kind in proof.rewrites for kind in kinds):
            self.on_note(str(proof))

    async def worked(self, prompt: Prompt, chat: Sequence[Message]) -> tuple[IntArray, BoolArray]:
        """The tokens of a worked episode, and which of them the policy should learn to sample.

        `chat` is what follows the environment's first message: answers, and replies to them.
        """
        environment, tools = (
            self.environments.open(f"worked:{prompt.id}", prompt),
            list(self.environments.described.tools),
        )
        history = self.with_system(await environment.start())
        self.let_go(environment)
        ids, learned = self.chat.first(history, tools), list[bool]()
        answers = [i for i, message in enumerate(chat) if message.get("role") == "assistant"]
        for i, after in zip(answers, [*answers[1:], len(chat)], strict=True):
            learned += [False] * (len(ids) - len(learned))
            said, replies = self.chat.answer_ids(history, chat[i], tools), chat[i + 1 : after]
            ids, learned = ids + said, learned + [True] * len(said)
            if replies:
                ids += self.chat.append(history, said, chat[i], replies, tools)
            history += chat[i:after]
        return np.array(ids[: len(learned)], np.int32), np.array(learned, np.bool_)

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The first messages of an episode, with the system message of `prompts.system`."""
        if not self.system or messages[0].get("role") == "system":
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await self.environments.close()

    def let_go(self, environment: Environment) -> None:
        """End an environment, without waiting for it."""
        task = asyncio.create_task(environment.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def start(
        self,
        serial: int,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        *,
        counted: bool = True,
        attempt: int = 1,
        so_far: Mapping[int, Trajectory] | None = None,
    ) -> list[asyncio.Task[Outcome]]:
        """An episode per sampling; those in `so_far` continue an earlier attempt."""
        order = Order(
            serial=serial,
            prompt=prompt,
            samplings=tuple(samplings),
            indices=tuple(range(len(samplings))),
            counted=counted,
            attempt=attempt,
        )
        episodes = [_Episode(self, order, i, (so_far or {}).get(i)) for i in range(len(samplings))]
        tasks = [asyncio.create_task(self._play(episode)) for episode in episodes]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        return tasks

    async def _play(self, episode: _Episode) -> Outcome:
        serial, counted = episode.order.serial, episode.order.counted
        if counted:
            self._running.setdefault(serial, set()).add(episode)
        try:
            return await episode.play()
        finally:
            self.forget(episode.id)
            if counted:
                self._running[serial].discard(episode)
                if not self._running[serial]:
                    del self._running[serial]

    def abort(self, serials: Sequence[int]) -> None:
        """End the rest of these groups; their futures give what was sampled so far."""
        for serial in serials:
            for episode in self._running.get(serial, ()):
                episode.aborted.set()
        self.abort_requests(serials)

    async def drain(self) -> None:
        """Wait until every episode is over."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, the finished turns of episodes that are not over."""
        return {
            serial: {e.trajectory.index: e.trajectory for e in episodes if e.trajectory.turns}
            for serial, episodes in self._running.items()
        }


class _Episode:
    """One episode, from its first message to its reward."""

    def __init__(self, room: Episodes, order: Order, i: int, known: Trajectory | None) -> None:
        self.room, self.order, self.aborted = room, order, asyncio.Event()
        self.id = order.request_id(i)
        self._index, self._sampling = order.indices[i], order.samplings[i]
        self._described = room.environments.described
        self._tools = list(self._described.tools) or None
        self._known = known  # of an earlier attempt, to be continued
        empty = replace(order.prompt, token_ids=np.empty(0, np.int32))
        self.trajectory = replace(order, prompt=empty).nothing_sampled(i, room.now())
        self._ended = False  # by the environment
        self._place = -1  # the last token of the branch that goes on
        self._history: list[Message] = []
        self._environment: Environment | None = None

    async def play(self) -> Outcome:
        """Take turns until the episode is over."""
        try:
            await self._start()
            known = self._known
            answer = await self._repeat(known) if known and known.turns else await self._next_answer()
            while answer is not None and await self._reply(answer):
                answer = await self._next_answer()
            return await self._score()
        except EnvironmentFailedError as failed:
            return Outcome(trajectory=self.trajectory, failure=failed.reason, detail=str(failed))
        except _AbortedError:
            return Outcome(trajectory=replace(self.trajectory, finish=FinishReason.ABORT))
        finally:
            if self._environment is not None:
                self.room.let_go(self._environment)

    async def _start(self) -> None:
        self._environment = self.room.environments.open(self.id, self.order.prompt)
        self._history = self.room.with_system(await self._timed(self._environment.start()))
        try:
            self._tell(self.room.chat.first(self._history, self._tools))
        except ChatError as error:
            raise EnvironmentFailedError(DropReason.ENV_ERROR, str(error)) from error

    async def _repeat(self, known: Trajectory) -> ParsedAnswer:
        """Come to where an earlier attempt was, and return its last answer: no turn is sampled again."""
        assert self._environment is not None
        began = known.turns[0].start
        if not np.array_equal(known.token_ids[:began], self.trajectory.token_ids):
            raise EnvironmentFailedError(DropReason.ENV_ERROR, f"it began otherwise than before; {ADVICE}")
        self.trajectory, log = replace(known, id=self.id), []
        for turn in known.turns:
            self._place = turn.end - 1
            answer = self._read(context(known, turn.start - 1)[0], known.token_ids[turn.start : turn.end])
            if turn is not known.turns[-1]:
                if (given := self._given(answer)) is not None:
                    log.append((given, turn.replies))
                message = answer.message()
                self._history += [message, *_as_messages(message, turn.replies)]
        snapshot = known.turns[-2].snapshot if len(known.turns) > 1 else ""
        if log:
            await self._timed(self._environment.make_again(log, snapshot))
        return answer

    async def _next_answer(self) -> ParsedAnswer | None:
        """Sample a turn and read it; None if the episode has reached a limit."""
        room, limits, turns = self.room, self._described, self.trajectory.turns
        tokens, routes = context(self.trajectory, self._place)
        most_tokens = min(limits.max_tokens or room.max_context, room.max_context)
        num_new = min(self._sampling.max_new_tokens, most_tokens - len(tokens))
        elapsed_s = room.now() - self.trajectory.timing.submitted_s
        if self.aborted.is_set():
            raise _AbortedError
        if num_new <= 0 or len(turns) >= limits.max_turns or (limits.max_s and elapsed_s > limits.max_s):
            return None
        order = replace(
            self.order,
            prompt=replace(self.order.prompt, token_ids=tokens, fields={}, messages=()),
            samplings=(replace(self._sampling, max_new_tokens=num_new),),
            indices=(self._index,),
            turn=len(turns) + 1,
            routes=routes,
        )
        sampled = await room.sample(order)
        assert self._environment is not None
        state, temperature = self._environment.state, self._sampling.temperature
        turn = Turn(start=0, end=0, finish=sampled.finish, temperature=temperature, text=sampled.text, state=state)
        self.trajectory = turned(self.trajectory, sampled, self._place, turn)
        self.trajectory = replace(self.trajectory, text=sampled.text)
        self._place = len(self.trajectory.token_ids) - 1
        if sampled.finish is FinishReason.ABORT:
            raise _AbortedError
        if self.order.counted:
            room.on_turn(self.order.serial, self.trajectory)
        return self._read(tokens, sampled.token_ids[len(tokens) :])

    def _read(self, prompt: IntArray, sampled: IntArray) -> ParsedAnswer:
        return self.room.chat.parse(sampled.tolist(), prompt.tolist(), self._tools)

    async def _reply(self, answer: ParsedAnswer) -> bool:
        """Let the environment reply; False if the episode is over."""
        message, turn = answer.message(), self.trajectory.turns[-1]
        began_s = self.room.now()
        said = await self._said(answer)
        if said is None:
            return False
        environment_s = self.room.now() - began_s
        done = replace(
            turn, replies=said.replies, reward=said.reward, environment_s=environment_s, snapshot=said.snapshot
        )
        self.trajectory = replace(self.trajectory, turns=(*self.trajectory.turns[:-1], done))
        if said.done:
            self._ended = True
            return False
        self._go_on(message, _as_messages(message, said.replies))
        return True

    async def _said(self, answer: ParsedAnswer) -> Said | None:
        """The environment's reply; None if the answer was the last word."""
        assert self._environment is not None
        if answer.error:
            replies = (f"error: {answer.error}",) * max(1, len(answer.tool_calls))
            return Said(replies=replies, reward=None, done=False, state="", snapshot="")
        given = self._given(answer)
        return None if given is None else await self._timed(self._environment.turn(given))

    def _given(self, answer: ParsedAnswer) -> dict[str, Any] | None:
        """What the environment is asked; None if it is not: an error, or a last word."""
        if answer.error:
            return None
        if answer.tool_calls and self._tools:
            return {"calls": [[call.name, call.arguments] for call in answer.tool_calls]}
        return {"text": answer.content} if self._described.takes_text else None

    def _go_on(self, message: Message, new: list[Message]) -> None:
        """Append the environment's messages; where the template rewrites history, in a new branch."""
        chat, t = self.room.chat, self.trajectory
        turn = t.turns[-1]
        try:
            tail = chat.append(self._history, t.token_ids[turn.start : turn.end].tolist(), message, new, self._tools)
            self._tell(tail)
        except ChatError:
            tokens = np.array(chat.first([*self._history, message, *new], self._tools), np.int32)
            at = indices(t, self._place)
            size = min(len(at), len(tokens))
            different = np.flatnonzero(t.token_ids[at[:size]] != tokens[:size])
            same = int(different[0]) if len(different) else size
            self._place = int(at[same - 1]) if same else -1
            self._tell(tokens[same:].tolist())
        self._history += [message, *new]

    def _tell(self, tokens: Sequence[int]) -> None:
        self.trajectory = told(self.trajectory, np.array(tokens, np.int32), self._place)
        self._place = len(self.trajectory.token_ids) - 1

    async def _score(self) -> Outcome:
        """The reward: what the environment gave for turns, and what it gives for the whole."""
        assert self._environment is not None
        turns = tuple(replace(turn, snapshot="") for turn in self.trajectory.turns)
        given = [turn.reward for turn in turns if turn.reward is not None]
        parts = {"turns": float(sum(given))} if given else {}
        parts |= await self._timed(self._environment.end())
        # what the policy caused (a limit, a last word) is an end with a reward
        if not parts and not self._described.scores and not self._ended:
            parts = {"turns": 0.0}
        trajectory = replace(self.trajectory, turns=turns, reward_parts=parts)
        if self.room.reward_follows:
            return Outcome(trajectory=trajectory)
        if not parts:
            detail = "the episode ended without a reward: raise Done(text, reward=...), or give it a method reward()"
            return Outcome(trajectory=trajectory, failure=DropReason.ENV_ERROR, detail=detail)
        timing = replace(trajectory.timing, scored_s=self.room.now())
        return Outcome(trajectory=replace(trajectory, reward=float(sum(parts.values())), timing=timing))

    async def _timed(self, asked: Awaitable[R]) -> R:
        with self.room.span("environment"):
            return await self._unless_aborted(asked)

    async def _unless_aborted(self, wanted: Awaitable[R]) -> R:
        task, aborted = asyncio.ensure_future(wanted), asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait([task, aborted], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _AbortedError
            return task.result()
        finally:
            aborted.cancel()
            task.cancel()


def _as_messages(message: Message, replies: Sequence[str]) -> list[Message]:
    """The replies to an answer: one per tool call, or one to its text."""
    calls = message.get("tool_calls") or ()
    if not calls:
        return [{"role": "user", "content": reply} for reply in replies]
    return [
        {"role": "tool", "content": reply, "name": call["function"]["name"], "tool_call_id": call["id"]}
        for call, reply in zip(calls, replies, strict=False)
    ]

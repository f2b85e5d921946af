"""One episode: what it is told and what it samples; and all episodes of a run.

An environment and the policy take turns (played.py), or an agent asks for turns (serve/).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from headrace.episode.answer import Tools
from headrace.episode.chat import Chat, Message, Messages
from headrace.episode.tree import context, indices, place_before, told, turned
from headrace.errors import ChatError
from headrace.roles import R
from headrace.types import (
    DropReason,
    Example,
    FinishReason,
    IntArray,
    Order,
    Outcome,
    Prompt,
    Sampling,
    Trajectory,
    Turn,
)


class AbortedError(Exception):
    """The episode's group is not wanted any more."""


class EpisodeFailedError(Exception):
    """An episode that cannot go on, or has no reward: it is dropped."""

    def __init__(self, detail: str, reason: DropReason = DropReason.ENV_ERROR) -> None:
        super().__init__(detail)
        self.reason = reason


class Addition(NamedTuple):
    """Tokens that the policy did not sample, to come after a place."""

    tokens: IntArray
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the sessions of a run share."""

    chat: Chat
    max_context: int
    sample: Callable[[Order], Awaitable[Trajectory]]  # by the engines
    forget: Callable[[str], None]  # a session's cache
    now: Callable[[], float]
    span: Callable[[str], AbstractContextManager[None]]  # of a stage
    on_turn: Callable[[int, Trajectory], None]  # a group's serial, the episode with its newest turn
    refusal: Callable[[Sampling], str]  # why the engine cannot sample so; empty if it can


class Session:
    """An episode under way. A place in it is an index of a token; -1 is before the first."""

    def __init__(self, desk: Desk, order: Order, i: int) -> None:
        self.desk, self.order, self.sampling = desk, order, order.samplings[i]
        self.id, self.index = order.request_id(i), order.indices[i]
        self.known = (order.so_far or {}).get(self.index)  # an earlier attempt
        self.aborted = asyncio.Event()
        empty = replace(order.prompt, token_ids=np.empty(0, np.int32))
        self.trajectory = replace(order, prompt=empty).nothing_sampled(i, desk.now())
        self._num_asked = 0
        self._asked_at: list[int] = []  # places after which a turn is being sampled

    async def sample(self, place: int, sampling: Sampling, *, agent: str = "", state: str = "") -> Turn:
        """Sample a turn after `place`; `state` is the environment's before it."""
        if self.aborted.is_set():
            raise AbortedError
        self._num_asked = max(self._num_asked, len(self.trajectory.turns)) + 1
        tokens, routes = context(self.trajectory, place)
        order = replace(
            self.order,
            prompt=replace(self.order.prompt, token_ids=tokens),
            samplings=(sampling,),
            indices=(self.index,),
            so_far=None,
            turn=self._num_asked,
            routes=routes,
        )
        self._asked_at.append(place)
        try:
            sampled = await self.desk.sample(order)
        finally:
            self._asked_at.remove(place)
        if len(sampled.token_ids) > len(tokens):
            text = self.desk.chat.text(sampled.token_ids[len(tokens) :].tolist())
            turn = Turn(start=0, end=0, finish=sampled.finish, temperature=sampling.temperature, agent=agent)
            self.trajectory = turned(self.trajectory, sampled, place, replace(turn, text=text, state=state))
        if sampled.finish is FinishReason.ABORT:
            raise AbortedError
        if self.order.counted:
            self.desk.on_turn(self.order.serial, self.trajectory)
        return self.trajectory.turns[-1]

    def sampled_ids(self, turn: Turn) -> IntArray:
        return self.trajectory.token_ids[turn.start : turn.end]

    def prompt_ids(self, turn: Turn) -> IntArray:
        return context(self.trajectory, place_before(self.trajectory, turn.start))[0]

    def first(self, messages: Messages, tools: Tools) -> Addition:
        """The prompt of a chat. What it has in common with an earlier turn is not repeated."""
        return self.beyond(np.array(self.desk.chat.first(messages, tools), np.int32))

    def next(self, turn: Turn, history: Messages, answer: Message, new: Messages, tools: Tools) -> Addition:
        """Messages after `turn`, the `answer` to `history`; in a new branch if the template rewrites history."""
        try:
            tail = self.desk.chat.append(history, self.sampled_ids(turn).tolist(), answer, new, tools)
        except ChatError:
            return self.first([*history, answer, *new], tools)
        return Addition(np.array(tail, np.int32), turn.end - 1)

    def beyond(self, tokens: IntArray) -> Addition:
        """What of `tokens` is new: they may begin like the context of an earlier turn, or like all of it."""
        t, best = self.trajectory, Addition(tokens, -1)
        for place in [turn.end - 1 for turn in t.turns] + self._asked_at:
            at = indices(t, place)
            size = min(len(at), len(tokens))
            same = int(np.logical_and.accumulate(t.token_ids[at[:size]] == tokens[:size]).sum())
            if len(tokens) - same < len(best.tokens):
                best = Addition(tokens[same:], int(at[same - 1]))
        return best

    def tell(self, new: Addition) -> int:
        """Returns the place of the last token."""
        if not len(new.tokens):
            return new.after
        self.trajectory = told(self.trajectory, new.tokens, new.after)
        return len(self.trajectory.token_ids) - 1

    def replace_turn(self, new: Turn) -> None:
        turns = tuple(new if turn.start == new.start else turn for turn in self.trajectory.turns)
        self.trajectory = replace(self.trajectory, turns=turns)

    def outcome(self, parts: Mapping[str, float], *, reward_follows: bool) -> Outcome:
        """The end with these parts of the reward; a reward function may add to them."""
        trajectory = replace(self.trajectory, reward_parts=parts)
        if not reward_follows:
            timing = replace(trajectory.timing, scored_s=self.desk.now())
            trajectory = replace(trajectory, reward=float(sum(parts.values())), timing=timing)
        return Outcome(trajectory=trajectory)

    async def unless_aborted(self, wanted: Awaitable[R]) -> R:
        task, aborted = asyncio.ensure_future(wanted), asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait([task, aborted], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise AbortedError
            return task.result()
        finally:
            aborted.cancel()
            task.cancel()


@dataclass(eq=False)
class Episodes:
    """All episodes of a run, asked like the pool of engines: groups in, one future per answer out.

    `player` leads one to its end: a `Player`, or the `Agents` of a run. `abort_requests` ends requests at the engines.
    """

    player: Any
    abort_requests: Callable[[Sequence[int]], None]
    _running: dict[asyncio.Task[Outcome], Session] = field(default_factory=dict, init=False)

    async def prepare(self) -> None:
        await self.player.prepare()

    async def close(self) -> None:
        await self.player.close()

    async def worked(self, prompt: Prompt, chat: Messages) -> Example:
        return await self.player.worked(prompt, chat)  # type: ignore[no-any-return]

    def start(self, order: Order) -> Sequence[asyncio.Future[Outcome]]:
        """An episode per sampling; those in `order.so_far` continue an earlier attempt."""
        return [self.play(order, i) for i in range(len(order.samplings))]

    def play(self, order: Order, i: int) -> asyncio.Task[Outcome]:
        session = Session(self.player.desk, order, i)
        task = asyncio.create_task(self._play(session))
        self._running[task] = session
        task.add_done_callback(self._running.pop)
        return task

    async def _play(self, session: Session) -> Outcome:
        try:
            return await self.player.play(session)  # type: ignore[no-any-return]
        except EpisodeFailedError as failed:
            return Outcome(trajectory=session.trajectory, failure=failed.reason, detail=str(failed))
        except AbortedError:
            return Outcome(trajectory=replace(session.trajectory, finish=FinishReason.ABORT))
        finally:
            self.player.desk.forget(session.id)

    def abort(self, serials: Sequence[int]) -> None:
        for session in self._running.values():
            if session.order.counted and session.order.serial in serials:
                session.aborted.set()
        self.abort_requests(serials)

    async def drain(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, the finished turns of episodes that are not over."""
        found: dict[int, dict[int, Trajectory]] = {}
        for session in self._running.values():
            if session.order.counted and session.trajectory.turns:
                found.setdefault(session.order.serial, {})[session.index] = session.trajectory
        return found

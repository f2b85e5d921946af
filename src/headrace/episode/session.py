"""One episode's tokens: what it is told and what it samples, one after the other.

An environment and the policy take turns (played.py), and each appends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from headrace.episode.chat import Chat, Message, Tools
from headrace.types import FinishReason, IntArray, Order, Replay, RouteArray, Sampling, Trajectory, Turn

R = TypeVar("R")


class AbortedError(Exception):
    """The episode's group is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the sessions of a run share."""

    chat: Chat
    max_context: int
    sample: Callable[[Order], Awaitable[Trajectory]]  # by the engines
    forget: Callable[[str], None]  # a session's cache
    now: Callable[[], float]
    span: Callable[[str], AbstractContextManager[None]]  # of a stage
    on_turn: Callable[[int, Trajectory], None]  # a group's serial, and the episode with its newest turn


class Session:
    """An episode under way."""

    def __init__(self, desk: Desk, order: Order, i: int) -> None:
        self.desk, self.order, self.sampling = desk, order, order.samplings[i]
        self.id, self.index = order.request_id(i), order.indices[i]
        self.aborted = asyncio.Event()
        empty = replace(order.prompt, token_ids=np.empty(0, np.int32))
        self.trajectory = replace(order, prompt=empty).nothing_sampled(i, desk.now())

    def room(self, max_tokens: int = 0) -> int:
        """Tokens that can still come, in the model's context or in `max_tokens`."""
        return min(max_tokens or self.desk.max_context, self.desk.max_context) - len(self.trajectory.token_ids)

    async def sample(self, sampling: Sampling, state: str = "") -> Turn:
        """Sample a turn; `state` is the environment's before it."""
        if self.aborted.is_set():
            raise AbortedError
        t = self.trajectory
        order = replace(
            self.order,
            prompt=replace(self.order.prompt, token_ids=t.token_ids),
            samplings=(sampling,),
            indices=(self.index,),
            so_far=None,
            turn=len(t.turns) + 1,
            routes=computed_routes(t),
        )
        sampled = await self.desk.sample(order)
        if len(sampled.token_ids) > len(t.token_ids):
            text = self.desk.chat.text(sampled.token_ids[len(t.token_ids) :].tolist())
            turn = Turn(start=0, end=0, finish=sampled.finish, temperature=sampling.temperature, text=text, state=state)
            self.trajectory = turned(t, sampled, turn)
        if sampled.finish is FinishReason.ABORT:
            raise AbortedError
        if self.order.counted:
            self.desk.on_turn(self.order.serial, self.trajectory)
        return self.trajectory.turns[-1]

    def sampled_ids(self, turn: Turn) -> IntArray:
        return self.trajectory.token_ids[turn.start : turn.end]

    def begin(self, messages: Sequence[Message], tools: Tools) -> None:
        """The prompt of a chat."""
        self.trajectory = told(self.trajectory, self.desk.chat.first(messages, tools))

    def go_on(self, history: Sequence[Message], answer: Message, new: Sequence[Message], tools: Tools) -> None:
        """Append messages to the last turn, the `answer` to `history`. Raises ChatError if history is rewritten."""
        sampled = self.sampled_ids(self.trajectory.turns[-1])
        self.trajectory = told(self.trajectory, self.desk.chat.append(history, sampled.tolist(), answer, new, tools))

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


def told(t: Trajectory, tokens: Sequence[int]) -> Trajectory:
    """With `tokens` that the policy did not sample."""
    replay, count = t.replay, len(tokens)
    if replay is not None and replay.routes is not None:
        routes = np.zeros((count, *replay.routes.shape[1:]), replay.routes.dtype)  # until a turn computes them
        replay = replace(replay, routes=np.concatenate([replay.routes, routes]))
    return replace(
        t,
        token_ids=np.concatenate([t.token_ids, np.array(tokens, np.int32)]),
        sampled=np.concatenate([t.sampled, np.zeros(count, np.bool_)]),
        logprobs=np.concatenate([t.logprobs, np.zeros(count, np.float32)]),
        replay=replay,
    )


def turned(t: Trajectory, sampled: Trajectory, turn: Turn) -> Trajectory:
    """With the tokens that `sampled` has after those of `t`. They are those of `turn`."""
    start, end = len(t.token_ids), len(sampled.token_ids)
    earlier = (*(replace(old, snapshot="") for old in t.turns[:-1]), *t.turns[-1:])
    started_s = t.timing.started_s if t.turns else sampled.timing.started_s
    return replace(
        t,
        token_ids=sampled.token_ids,
        sampled=np.concatenate([t.sampled, sampled.sampled[start:]]),
        logprobs=np.concatenate([t.logprobs, sampled.logprobs[start:]]),
        spans=t.spans + sampled.spans,
        finish=sampled.finish,
        text=turn.text,
        replay=_joined(t, sampled.replay),
        turns=(*earlier, replace(turn, start=start, end=end)),
        timing=replace(t.timing, started_s=started_s, finished_s=sampled.timing.finished_s),
    )


def computed_routes(t: Trajectory) -> RouteArray | None:
    """The experts of the tokens that turns have computed: all before the newest sampled one."""
    return None if t.replay is None or t.replay.routes is None else t.replay.routes[: t.turns[-1].end - 1]


def _joined(t: Trajectory, later: Replay | None) -> Replay | None:
    """What the learner chooses again. Experts stay those of the turn that computed a token first."""
    supports = [*(t.replay.supports if t.replay else []), *(later.supports if later else [])]
    routes, known = None if later is None else later.routes, computed_routes(t)
    if routes is not None and known is not None:
        routes = np.concatenate([known, routes[len(known) :]])
    return Replay.of(supports, routes)

"""The rollout actor: prompts in, trajectories out, one by one as they finish."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np

from headrace.errors import DataError
from headrace.roles import Device
from headrace.rollout.engine import Engine
from headrace.rollout.engine_server import ServerEngine
from headrace.rollout.rows import Generation, Request, request_seed
from headrace.types import FinishReason, Order, Trajectory

COMING_S = 0.02  # between two turns that come back together
MOST_GATHERED_S = 0.25
AnyEngine = Engine | ServerEngine


@dataclass(eq=False)
class RolloutActor:
    """Drives the engine and turns its generations into trajectories."""

    engine: AnyEngine
    device: Device
    _: KW_ONLY
    seed: int
    clock: Callable[[], float]
    span: Callable[[str], AbstractContextManager[None]]  # of a stage, around engine work
    on_sampled: Callable[[int], None]  # tokens, before the trajectories that hold them
    on_begun: Callable[[int, int], None]  # serial and version, at a group's first token
    on_finished: Callable[[Trajectory], None]
    # by id, unfinished requests and the trajectory of each without what it sampled
    _pending: dict[str, tuple[Order, Trajectory]] = field(default_factory=dict, init=False)
    _work: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _booked: int = field(default=0, init=False)
    _away: set[str] = field(default_factory=set, init=False)  # sessions whose environment replies
    _came: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _turn_s: float = field(default=0.0, init=False)  # that a turn takes, on average

    def start(self, order: Order) -> None:
        """Queue a request per entry of `order.samplings`.

        Requests that are not `counted` (evaluation) draw other noise and stay out of the ledger. A
        further attempt at a group draws the same noise as the first, and continues `order.so_far`.
        """
        max_context, num_prompt = self.engine.policy.max_context, len(order.prompt.token_ids)
        if num_prompt + (num_new := max(s.max_new_tokens for s in order.samplings)) > max_context:
            told = f"has {num_prompt} tokens and may get {num_new} new ones: more than the model's context of"
            helps = "lower rollout.max_new_tokens or prompts.max_tokens"
            raise DataError(f"prompt '{order.prompt.id}' {told} {max_context}; {helps}")
        now_s, requests = self.clock(), []
        for i, (index, sampling) in enumerate(zip(order.indices, order.samplings, strict=True)):
            id = order.request_id(i)
            known = (order.so_far or {}).get(index)
            if known is not None and known.finish is not FinishReason.ABORT:
                self.on_finished(replace(known, id=id))
                continue
            submitted_s = now_s if known is None else known.timing.submitted_s
            self._pending[id] = order, order.nothing_sampled(i, submitted_s)
            turn = [order.turn] if order.turn else []
            parts = turn if sampling.seed is None else [0, sampling.seed % 2**64]
            seed = request_seed(self.seed, int(order.counted), order.serial, index, *parts)
            session = order.session(i)
            self._away.discard(session)
            self._came.set()
            request = Request(id=id, sampling=sampling, seed=seed, counted=order.counted, session=session)
            if known is not None and known.spans:
                self.engine.resume_request(request, known)
            else:
                requests.append(request)
        if requests:
            self.engine.submit(order.prompt.token_ids, requests, order.routes)
        self._end_late(order)
        self._work.set()

    def _end_late(self, order: Order) -> None:
        """If enough of its answers are complete. Before the next engine step, so it depends on the tokens alone."""
        if order.first is not None:
            owed = {order.request_id(i) for i in range(len(order.indices))} & self._pending.keys()
            if len(order.indices) - len(owed) >= order.first:
                self.engine.abort(owed)

    def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished requests sampled (no texts). Call it in the device thread."""
        found: dict[int, dict[int, Trajectory]] = {}
        for id, generation in self.engine.under_way().items():
            if id in self._pending and (pending := self._pending[id])[0].counted:
                trajectory = self._trajectory(pending[1], generation)
                found.setdefault(pending[0].serial, {})[trajectory.index] = trajectory
        return found

    def abort(self, serials: Sequence[int]) -> None:
        pending = self._pending.items()
        self.engine.abort({id for id, (order, _) in pending if order.counted and order.serial in serials})
        self._work.set()

    async def run(self) -> None:
        """Step the engine while there is work. Raises its errors."""
        while True:
            await self._work.wait()
            while self.engine.has_work:
                counted = any(order.counted for order, _ in self._pending.values())
                ended = await self.device.run(self._advance, "rollout" if counted else "evaluate")
                if fresh_tokens := self.engine.sampled_tokens - self._booked:
                    self.on_sampled(fresh_tokens)
                    self._booked += fresh_tokens
                while self.engine.begun:
                    id, version = self.engine.begun.popleft()
                    if id in self._pending and (order := self._pending[id][0]).counted:
                        self.on_begun(order.serial, version)
                for generation in ended:
                    self._deliver(generation)
                if ended and self._away:
                    await self._gather()
            self._work.clear()

    async def _gather(self) -> None:
        """Let turns come back that are replied to at once: a batch of many costs little more than one of few.

        Waits while most sessions are away and keep coming, no longer than a turn takes.
        """
        end_s = self.clock() + min(self._turn_s, MOST_GATHERED_S)
        with suppress(TimeoutError):
            while len(self._away) > len(self._pending) and self.clock() < end_s:
                self._came.clear()
                async with asyncio.timeout(COMING_S):
                    await self._came.wait()

    def forget(self, sessions: Sequence[str]) -> None:
        self._away.difference_update(sessions)
        self.engine.forget(set(sessions))
        self._came.set()

    def _advance(self, stage: str) -> list[Generation]:
        with self.span(stage):
            return self.engine.advance()

    def _deliver(self, generation: Generation) -> None:
        order, before = self._pending.pop(generation.id)
        if order.turn and generation.finish is not FinishReason.ABORT:
            self._away.add(generation.id.rpartition("#")[0])
            self._turn_s += 0.1 * (generation.finished_s - generation.started_s - self._turn_s)
        text = ""  # that of a turn is made with its chat
        if not order.turn:
            text = str(self.engine.policy.tokenizer.decode(generation.token_ids, skip_special_tokens=True))
        self.on_finished(self._trajectory(before, generation, text))
        if generation.finish is not FinishReason.ABORT:
            self._end_late(order)

    def _trajectory(self, before: Trajectory, generation: Generation, text: str = "") -> Trajectory:
        return replace(
            before,
            id=generation.id,
            token_ids=np.concatenate([before.token_ids, generation.token_ids]),
            sampled=np.concatenate([before.sampled, np.ones(len(generation.token_ids), np.bool_)]),
            logprobs=np.concatenate([before.logprobs, generation.logprobs]),
            spans=generation.spans,
            finish=generation.finish,
            text=text,
            timing=replace(before.timing, started_s=generation.started_s, finished_s=generation.finished_s),
            replay=generation.replay,
        )

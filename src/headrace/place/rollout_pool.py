"""Rollout workers as one: groups go to whoever has least to do, and what a lost worker had is sampled by another.

A worker may be lost, join, or leave when it has done its work, at any time. Tokens that went with a lost one were paid
for: they are booked as redone. An answer has the same noise wherever it is sampled, so at the same version it is the
same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.ledger.clock import StageClock
from headrace.place.workers import Worker, WorkerLostError
from headrace.rollout.actor import request_id
from headrace.types import EngineCounts, FinishReason, IntArray, News, Order, Prompt, Sampling, Timing, Trajectory

ANSWER_S = 60.0  # for a question that a worker answers from memory


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that takes part."""

    worker: Worker
    orders: dict[str, Order] = field(default_factory=dict)  # by the id of each answer that it owes
    sampled_tokens: int = 0  # that it told of
    delivered_tokens: int = 0  # of finished answers
    counts: EngineCounts = field(default_factory=EngineCounts)
    leaves: asyncio.Event | None = None  # set when it owes nothing any more; it is given nothing new
    following: asyncio.Task[None] | None = None


class RolloutPool:
    """What the loop takes for its rollout actor.

    `on_sampled(tokens)` hears of new tokens before the answers that hold them, `on_redone(tokens)` of those that were
    lost with a worker, `on_lost(worker, why)` of the worker.
    """

    def __init__(
        self,
        *,
        exact: bool,
        clock: StageClock,
        on_sampled: Callable[[int], None],
        on_redone: Callable[[int], None],
        on_lost: Callable[[Worker, str], None],
    ) -> None:
        self.exact = exact
        self.on_begun: Callable[[int, int], None] = lambda serial, version: None
        self._clock = clock
        self._on_sampled, self._on_redone, self._on_lost = on_sampled, on_redone, on_lost
        self._members: list[_Member] = []
        self._waiting: list[Order] = []  # while there is nobody to give them to
        self._futures: dict[str, asyncio.Future[Trajectory]] = {}
        self._past = EngineCounts()  # of workers that are gone
        self._failure: asyncio.Future[None] | None = None

    @property
    def workers(self) -> list[Worker]:
        """Those that take part."""
        return [member.worker for member in self._members]

    @property
    def staying(self) -> list[Worker]:
        """Those that are given work."""
        return [member.worker for member in self._members if member.leaves is None]

    @property
    def counts(self) -> EngineCounts:
        """What all engines did so far."""
        return sum((member.counts for member in self._members), self._past)

    # ---- who takes part

    def join(self, worker: Worker) -> None:
        """A worker that holds the present version: from here on it is given work."""
        member = _Member(worker)
        self._members.append(member)
        member.following = asyncio.create_task(self._follow(member))
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._give(order)

    def lose(self, worker: Worker, why: str) -> None:
        """A worker is gone, or must go: what it owes goes to others."""
        member = self._member(worker)
        if member is None:
            return
        self._end(member)
        if redone := member.sampled_tokens - member.delivered_tokens:
            self._on_redone(redone)
        self._on_lost(worker, why)
        for order in {id(order): order for order in member.orders.values()}.values():
            owed = [i for i in range(len(order.indices)) if self._id(order, i) in member.orders]
            self._give(_part(order, owed))

    def retire(self, worker: Worker) -> asyncio.Event:
        """Give a worker nothing more. When it owes nothing, or is lost, the event is set: then `dismiss` it."""
        member = self._member(worker)
        done = asyncio.Event() if member is None or member.leaves is None else member.leaves
        if member is not None:
            member.leaves = done
        if member is None or not member.orders:
            done.set()
        return done

    def dismiss(self, worker: Worker) -> None:
        """A worker that owes nothing ends."""
        if member := self._member(worker):
            self._end(member)

    def fail(self, error: Exception) -> None:
        """Nobody can go on: everyone who waits hears why."""
        if not self._failed().done():
            self._failed().set_exception(error)
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()

    def close(self) -> None:
        """Follow nobody any more."""
        for member in self._members:
            if member.following is not None:
                member.following.cancel()

    # ---- what the loop asks

    def start(
        self,
        serial: int,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        *,
        counted: bool = True,
        attempt: int = 1,
        so_far: Mapping[int, Trajectory] | None = None,
    ) -> list[asyncio.Future[Trajectory]]:
        """Give the group to the worker that owes the fewest answers; each future gives its trajectory."""
        bare = replace(prompt, fields={})  # a worker has no use for them, and they may not travel
        indices = tuple(range(len(samplings)))
        order = Order(
            serial=serial,
            prompt=bare,
            samplings=tuple(samplings),
            indices=indices,
            counted=counted,
            attempt=attempt,
            so_far=so_far,
        )
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in indices]
        self._futures |= {self._id(order, i): future for i, future in enumerate(futures)}
        self._give(order)
        return futures

    def abort(self, serial: int) -> None:
        """End what is left of a group; its futures give what was sampled so far."""
        for member in self._members:
            if any(order.counted and order.serial == serial for order in member.orders.values()):
                member.worker.ask("abort", serial)
        given_up = [order for order in self._waiting if order.counted and order.serial == serial]
        for order in given_up:
            self._waiting.remove(order)
            for i in range(len(order.indices)):
                self._futures.pop(self._id(order, i)).set_result(self._never_begun(order, i))

    async def drain(self) -> None:
        """Wait until every answer that is under way is complete."""
        while self._futures:
            await asyncio.wait(list(self._futures.values()))

    async def run(self) -> None:
        """Wait for what cannot be mended: workers sample by themselves."""
        await asyncio.shield(self._failed())

    def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished answers have so far. Call it in the device thread."""
        found: dict[int, dict[int, Trajectory]] = {}
        for answer in [worker.ask("under_way") for worker in self.workers]:
            try:
                parts: dict[int, dict[int, Trajectory]] = answer.result(ANSWER_S)
            except WorkerLostError:
                continue
            for serial, answers in parts.items():
                found.setdefault(serial, {}).update(answers)
        return found

    def likeliest(self, prompt: IntArray) -> list[tuple[int, float]]:
        """Of every engine that has room, the likeliest next token and its log-prob. Call it in the device thread."""
        found = []
        for answer in [worker.ask("likeliest", prompt) for worker in self.workers]:
            try:
                likeliest = answer.result(ANSWER_S)
            except WorkerLostError:
                continue
            if likeliest is not None:
                found.append(likeliest)
        return found

    # ---- inside

    def _member(self, worker: Worker) -> _Member | None:
        return next((member for member in self._members if member.worker is worker), None)

    def _end(self, member: _Member) -> None:
        self._members.remove(member)
        member.worker.kill()  # what it still has to say must not be heard
        if member.following is not None and member.following is not asyncio.current_task():
            member.following.cancel()
        if member.leaves is not None:
            member.leaves.set()
        self._past = self._past + member.counts

    def _give(self, order: Order) -> None:
        staying = [member for member in self._members if member.leaves is None]
        if not staying:
            self._waiting.append(order)
            return
        member = min(staying, key=lambda m: len(m.orders))
        member.orders |= {self._id(order, i): order for i in range(len(order.indices))}
        member.worker.ask("take", [order])  # if it is lost before it hears this, whoever follows it finds out

    def _id(self, order: Order, i: int) -> str:
        return request_id(order.serial, order.prompt, order.indices[i], order.attempt, counted=order.counted)

    def _never_begun(self, order: Order, i: int) -> Trajectory:
        """What comes of an answer that nobody could take: what it had, or nothing."""
        id, now_s = self._id(order, i), self._clock.now()
        if known := (order.so_far or {}).get(order.indices[i]):
            return replace(known, id=id)
        prompt_ids = order.prompt.token_ids
        return Trajectory(
            id=id,
            prompt_id=order.prompt.id,
            index=order.indices[i],
            token_ids=prompt_ids,
            sampled=np.zeros(len(prompt_ids), np.bool_),
            logprobs=np.zeros(len(prompt_ids), np.float32),
            spans=(),
            finish=FinishReason.ABORT,
            text="",
            timing=Timing(submitted_s=now_s, started_s=now_s, finished_s=now_s),
        )

    async def _follow(self, member: _Member) -> None:
        """Hear a worker out, for as long as it lives."""
        try:
            while True:
                self._hear(member, await member.worker.ask("news"))
        except WorkerLostError as lost:
            self.lose(member.worker, str(lost))
        except Exception as error:  # the engine's own, which another worker would meet as well
            self.fail(error)

    def _hear(self, member: _Member, news: News) -> None:
        if news.sampled_tokens > member.sampled_tokens:
            self._on_sampled(news.sampled_tokens - member.sampled_tokens)
            member.sampled_tokens = news.sampled_tokens
        member.counts = news.counts
        for span in news.spans:
            self._clock.add(span)
        for serial, version in news.begun:
            self.on_begun(serial, version)
        for trajectory in news.finished:
            order = member.orders.pop(trajectory.id)
            if order.counted:
                known = (order.so_far or {}).get(trajectory.index)  # sampled elsewhere
                member.delivered_tokens += trajectory.num_sampled_tokens - (known.num_sampled_tokens if known else 0)
            future = self._futures.pop(trajectory.id)
            if not future.done():
                future.set_result(trajectory)
        if member.leaves is not None and not member.orders:
            member.leaves.set()

    def _failed(self) -> asyncio.Future[None]:
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        return self._failure


def _part(order: Order, places: list[int]) -> Order:
    return replace(
        order,
        samplings=tuple(order.samplings[i] for i in places),
        indices=tuple(order.indices[i] for i in places),
    )

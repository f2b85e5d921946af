"""All samplers as one: a group goes to the one that owes the fewest answers, and what a lost one had goes to another.

A worker may be lost, join, or leave when it has done its work, at any time. Tokens that went with a lost one were paid
for: they are booked as redone. An answer has the same noise wherever it is sampled, so at the same version it is the
same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import WorkerLostError
from headrace.roles import Sampler, Worker
from headrace.types import EngineCounts, IntArray, News, Order, Prompt, Sampling, StageSpan, Trajectory

ANSWER_S = 60.0  # for a question that a worker answers from memory


@dataclass(slots=True, eq=False)
class _Member:
    """A worker that takes part."""

    worker: Worker[Sampler]
    orders: dict[str, Order] = field(default_factory=dict)  # by the id of each answer that it owes
    sampled_tokens: int = 0  # that it told of
    delivered_tokens: int = 0  # of finished answers
    counts: EngineCounts = field(default_factory=EngineCounts)
    leaves: asyncio.Event | None = None  # set when it owes nothing any more; it is given nothing new
    following: asyncio.Task[None] | None = None


class RolloutPool:
    """What the loop samples with.

    `on_sampled(tokens)` hears of new tokens before the answers that hold them, `on_begun(serial, version)` of a group's
    first token, `on_redone(tokens)` of tokens that were lost with a worker, `on_lost(worker, why)` of the worker.
    """

    def __init__(
        self,
        *,
        exact: bool,
        now: Callable[[], float],
        on_span: Callable[[StageSpan], None],
        on_sampled: Callable[[int], None],
        on_begun: Callable[[int, int], None],
        on_redone: Callable[[int], None],
        on_lost: Callable[[Worker[Sampler], str], None],
    ) -> None:
        self.exact = exact  # an answer has the same bits in any batch
        self._now, self._on_span = now, on_span
        self._on_sampled, self._on_begun, self._on_redone = on_sampled, on_begun, on_redone
        self._on_lost = on_lost
        self._members: list[_Member] = []
        self._waiting: list[Order] = []  # while there is nobody to give them to
        self._futures: dict[str, asyncio.Future[Trajectory]] = {}
        self._past = EngineCounts()  # of workers that are gone
        self._failure: asyncio.Future[None] | None = None

    @property
    def workers(self) -> list[Worker[Sampler]]:
        """Those that take part."""
        return [member.worker for member in self._members]

    @property
    def staying(self) -> list[Worker[Sampler]]:
        """Those that are given work."""
        return [member.worker for member in self._members if member.leaves is None]

    @property
    def counts(self) -> EngineCounts:
        """What all engines did so far."""
        return sum((member.counts for member in self._members), self._past)

    # ---- who takes part

    def join(self, worker: Worker[Sampler]) -> None:
        """A worker that holds the present version: from here on it is given work."""
        member = _Member(worker)
        self._members.append(member)
        member.following = asyncio.create_task(self._follow(member))
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._give(order)

    def lose(self, worker: Worker[Sampler], why: str) -> None:
        """A worker is gone, or must go: what it owes goes to others."""
        member = self._member(worker)
        if member is None:
            return
        self._end(member)
        if redone := member.sampled_tokens - member.delivered_tokens:
            self._on_redone(redone)
        self._on_lost(worker, why)
        for order in {id(order): order for order in member.orders.values()}.values():
            owed = [i for i in range(len(order.indices)) if order.request_id(i) in member.orders]
            self._give(_part(order, owed))

    def retire(self, worker: Worker[Sampler]) -> asyncio.Event:
        """Give a worker nothing more. When it owes nothing, or is lost, the event is set: then `dismiss` it."""
        member = self._member(worker)
        done = asyncio.Event() if member is None or member.leaves is None else member.leaves
        if member is not None:
            member.leaves = done
        if member is None or not member.orders:
            done.set()
        return done

    def dismiss(self, worker: Worker[Sampler]) -> None:
        """A worker that owes nothing ends."""
        if member := self._member(worker):
            self._end(member)

    def fail(self, error: Exception) -> None:
        """Nobody can go on: everyone who waits hears why."""
        if not self._failed().done():
            self._failed().set_exception(error)
            self._failed().exception()  # it counts as heard: everyone who waits hears it, too
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()

    def close(self) -> None:
        """Follow nobody any more: what workers still sample is not heard of."""
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
        """Give a group to the worker that owes the fewest answers; each future gives its trajectory."""
        order = Order(
            serial=serial,
            prompt=replace(prompt, fields={}),  # a worker has no use for them, and they may not travel
            samplings=tuple(samplings),
            indices=tuple(range(len(samplings))),
            counted=counted,
            attempt=attempt,
            so_far=so_far,
        )
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in samplings]
        self._futures |= {order.request_id(i): future for i, future in enumerate(futures)}
        self._give(order)
        return futures

    def abort(self, serials: Sequence[int]) -> None:
        """End what is left of these groups; their futures give what was sampled so far."""
        for member in self._members:
            owed = {order.serial for order in member.orders.values() if order.counted}
            if ended := [serial for serial in serials if serial in owed]:
                member.worker.ask(Sampler.abort, ended)
        given_up = [order for order in self._waiting if order.counted and order.serial in serials]
        for order in given_up:
            self._waiting.remove(order)
            for i, index in enumerate(order.indices):
                never_begun = order.nothing_sampled(i, self._now())
                known = (order.so_far or {}).get(index)
                never_begun = never_begun if known is None else replace(known, id=never_begun.id)
                self._futures.pop(order.request_id(i)).set_result(never_begun)

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
        for answer in [worker.ask(Sampler.under_way) for worker in self.workers]:
            try:
                parts = answer.result(ANSWER_S)
            except WorkerLostError:
                continue
            for serial, answers in parts.items():
                found.setdefault(serial, {}).update(answers)
        return found

    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        """Of every engine with room, the most likely next token and its log-prob. Call it in the device thread."""
        found = []
        for answer in [worker.ask(Sampler.greedy, prompt) for worker in self.workers]:
            try:
                token = answer.result(ANSWER_S)
            except WorkerLostError:
                continue
            if token is not None:
                found.append(token)
        return found

    def release_cache(self) -> None:
        """Free every engine's KV cache until it decodes again. Call it in the device thread."""
        for answer in [worker.ask(Sampler.release_cache) for worker in self.workers]:
            answer.result(ANSWER_S)

    # ---- inside

    def _member(self, worker: Worker[Sampler]) -> _Member | None:
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
        member.orders |= {order.request_id(i): order for i in range(len(order.indices))}
        member.worker.ask(Sampler.take, [order])  # if it is lost before it hears this, whoever follows it finds out

    async def _follow(self, member: _Member) -> None:
        """Hear a worker out, for as long as it lives."""
        try:
            while True:
                self._hear(member, await member.worker.ask(Sampler.news))
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
            self._on_span(span)
        for serial, version in news.begun:
            self._on_begun(serial, version)
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

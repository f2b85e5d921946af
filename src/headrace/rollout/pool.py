"""All rollout workers as one sampler: a group goes to the worker with the fewest requests.

Workers may join, retire or be lost at any time; the orders of a lost one go to others, and its lost
tokens are booked as redone. The noise of a request is the same on every worker, so at the same
version the trajectory is the same, too.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from headrace.errors import WorkerLostError
from headrace.measured import EngineCounts, StageClock
from headrace.roles import Sampler, Worker
from headrace.types import IntArray, News, Order, Trajectory

ANSWER_S = 60.0  # timeout of calls that a worker answers from memory


@dataclass(slots=True, eq=False)
class _Member:
    """What the pool knows of a worker."""

    version: int  # that it samples with
    orders: dict[str, Order] = field(default_factory=dict)  # by id of each unfinished request
    sampled_tokens: int = 0  # reported
    delivered_tokens: int = 0  # of finished trajectories
    counts: EngineCounts = field(default_factory=EngineCounts)
    leaves: asyncio.Event | None = None  # retiring: no new orders; set when none is left
    following: asyncio.Task[None] = field(init=False)  # hears what the worker tells
    under_way: asyncio.Future[Mapping[int, Mapping[int, Trajectory]]] | None = None  # asked for


@dataclass(kw_only=True, eq=False)
class RolloutPool:
    """Samples trajectories for the loop."""

    clock: StageClock
    on_sampled: Callable[[int], None]  # tokens: before the trajectories that hold them
    on_begun: Callable[[int, int], None]  # serial and version, at a group's first token
    on_redone: Callable[[int], None]  # tokens, when a worker is lost
    on_lost: Callable[[Worker[Sampler], str], None]  # and why
    on_note: Callable[[str], None]
    most_behind: int = 0  # versions, of a worker that gets new groups
    _newest: int = field(default=0, init=False)  # version that a worker has
    _members: dict[Worker[Sampler], _Member] = field(default_factory=dict, init=False)
    _waiting: list[Order] = field(default_factory=list, init=False)  # while there is no worker
    _futures: dict[str, asyncio.Future[Trajectory]] = field(default_factory=dict, init=False)
    _homes: dict[str, Worker[Sampler]] = field(default_factory=dict, init=False)  # by session: who has its cache
    _past: EngineCounts = field(default_factory=EngineCounts, init=False)  # of former workers
    _failure: Exception | None = field(default=None, init=False)
    _failed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def workers(self) -> list[Worker[Sampler]]:
        return list(self._members)

    @property
    def staying(self) -> list[Worker[Sampler]]:
        """Workers that get new orders."""
        return [worker for worker, member in self._members.items() if member.leaves is None]

    @property
    def counts(self) -> EngineCounts:
        return sum((member.counts for member in self._members.values()), self._past)

    def join(self, worker: Worker[Sampler]) -> None:
        self._members[worker] = member = _Member(self._newest)
        member.following = asyncio.create_task(self._follow(worker, member))
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._give(order)

    def reached(self, worker: Worker[Sampler], version: int) -> None:
        """The worker samples with `version` from now on."""
        self._newest = max(self._newest, version)
        if worker in self._members:
            self._members[worker].version = version

    def lose(self, worker: Worker[Sampler], why: str) -> None:
        """Remove a worker that is lost or must go; its unfinished requests go to others."""
        if (member := self.dismiss(worker)) is None:
            return
        if redone := member.sampled_tokens - member.delivered_tokens:
            self.on_redone(redone)
        self.on_lost(worker, why)
        for order in {id(order): order for order in member.orders.values()}.values():
            owed = [i for i in range(len(order.indices)) if order.request_id(i) in member.orders]
            indices = tuple(order.indices[i] for i in owed)
            samplings = tuple(order.samplings[i] for i in owed)
            self._give(replace(order, indices=indices, samplings=samplings))

    def retire(self, worker: Worker[Sampler]) -> asyncio.Event:
        """Give a worker no more orders. The event is set when it has none: then `dismiss` it."""
        member = self._members[worker]
        member.leaves = asyncio.Event()
        if not member.orders:
            member.leaves.set()
        return member.leaves

    def dismiss(self, worker: Worker[Sampler]) -> _Member | None:
        """Remove a worker; returns what it leaves, or None if it was no member."""
        if (member := self._members.pop(worker, None)) is None:
            return None
        worker.kill()  # nothing that it still sends may be booked
        if member.following is not asyncio.current_task():
            member.following.cancel()
        if member.leaves is not None:
            member.leaves.set()
        self._tell_under_way(member, {})
        self._past = self._past + member.counts
        return member

    def fail(self, error: Exception) -> None:
        """No worker can continue: every pending future raises `error`."""
        self._failure = self._failure or error
        self._failed.set()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
        self._futures.clear()

    def close(self) -> None:
        for member in self._members.values():
            member.following.cancel()

    def start(self, order: Order) -> list[asyncio.Future[Trajectory]]:
        """Give a group to the worker with the fewest unfinished requests."""
        futures = [asyncio.get_running_loop().create_future() for _ in order.samplings]
        self._futures |= {order.request_id(i): future for i, future in enumerate(futures)}
        # workers do not need the prompt's fields, and they may not pickle
        self._give(replace(order, prompt=replace(order.prompt, fields={}, messages=())))
        return futures

    def forget(self, session: str) -> None:
        """An episode is over."""
        if (home := self._homes.pop(session, None)) in self._members and home is not None:
            home.ask(Sampler.forget, [session])

    def abort(self, serials: Sequence[int]) -> None:
        for worker, member in self._members.items():
            owed = {order.serial for order in member.orders.values() if order.counted}
            if ended := [serial for serial in serials if serial in owed]:
                worker.ask(Sampler.abort, ended)
        given_up = [order for order in self._waiting if order.counted and order.serial in serials]
        for order in given_up:
            self._waiting.remove(order)
            for i, index in enumerate(order.indices):
                id, known = order.request_id(i), (order.so_far or {}).get(index)
                unfinished = replace(known, id=id) if known else order.nothing_sampled(i, self.clock.now())
                self._futures.pop(id).set_result(unfinished)

    async def drain(self) -> None:
        while self._futures:
            await asyncio.wait(list(self._futures.values()))

    async def run(self) -> None:
        """Wait for a failure: workers sample by themselves."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished requests have sampled. It is booked on return."""
        for worker, member in self._members.items():
            if member.under_way is None:
                member.under_way = asyncio.get_running_loop().create_future()
                worker.ask(Sampler.tell_under_way)
        found: dict[int, dict[int, Trajectory]] = {}
        for groups in await asyncio.gather(*(m.under_way for m in self._members.values() if m.under_way)):
            for serial, group in groups.items():
                found.setdefault(serial, {}).update(group)
        return found

    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        """Greedy next token and its log-prob of every engine with the newest weights. Call it in the device thread."""
        found = list[tuple[int, float]]()
        newest = [w for w, member in self._members.items() if member.version == self._newest]
        for reply in [worker.ask(Sampler.greedy, prompt) for worker in newest]:
            with suppress(WorkerLostError):
                found += reply.result(ANSWER_S)
        return found

    def release_cache(self) -> None:
        """Free every engine's KV cache until it decodes again. Call it in the device thread."""
        for reply in [worker.ask(Sampler.release_cache) for worker in self.workers]:
            reply.result(ANSWER_S)

    def _give(self, order: Order) -> None:
        if not (staying := self.staying):
            self._waiting.append(order)
            return
        worker = self._homes.get(session := order.session(0))
        if worker not in staying or worker is None:
            oldest = self._newest - self.most_behind
            fresh = [w for w in staying if self._members[w].version >= oldest]  # else its tokens are soon too old
            worker = min(fresh or staying, key=lambda w: len(self._members[w].orders))
        if session:
            self._homes[session] = worker
        self._members[worker].orders |= {order.request_id(i): order for i in range(len(order.indices))}
        worker.ask(Sampler.take, [order])  # `_follow` sees it if the worker is lost

    async def _follow(self, worker: Worker[Sampler], member: _Member) -> None:
        try:
            while True:
                for note in (news := await worker.ask(Sampler.news)).notes:
                    self.on_note(note)
                self._hear(member, news)
        except WorkerLostError as lost:
            self.lose(worker, str(lost))
        except Exception as error:  # of the engine: another worker would raise it, too
            self.fail(error)

    def _hear(self, member: _Member, news: News) -> None:
        if news.sampled_tokens > member.sampled_tokens:
            self.on_sampled(news.sampled_tokens - member.sampled_tokens)
            member.sampled_tokens = news.sampled_tokens
        member.counts = news.counts
        for span in news.spans:
            self.clock.add(span)
        for serial, version in news.begun:
            self.on_begun(serial, version)
        for trajectory in news.finished:
            order = member.orders.pop(trajectory.id)
            if order.counted:
                member.delivered_tokens += trajectory.num_sampled_tokens
                if known := (order.so_far or {}).get(trajectory.index):  # sampled by another worker
                    member.delivered_tokens -= known.num_sampled_tokens
            future = self._futures.pop(trajectory.id)
            if not future.done():
                future.set_result(trajectory)
        if member.leaves is not None and not member.orders:
            member.leaves.set()
        if news.under_way is not None:
            self._tell_under_way(member, news.under_way)

    def _tell_under_way(self, member: _Member, found: Mapping[int, Mapping[int, Trajectory]]) -> None:
        if member.under_way is not None and not member.under_way.done():
            member.under_way.set_result(found)
        member.under_way = None

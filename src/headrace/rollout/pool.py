"""All rollout workers as one sampler: a group goes to the worker with the fewest requests.

Workers may join, leave or be lost at any time. Their answers go on elsewhere from what they last
told of; what a lost one sampled after that is booked as redone. The noise is alike on all workers.
Half of the groups of the worker that owes most move to one that has nothing to do.
"""

import asyncio
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from headrace.errors import WorkerLostError
from headrace.measured import EngineCounts, StageClock
from headrace.roles import Sampler, Worker
from headrace.types import FinishReason, IntArray, News, Order, Trajectory

ANSWER_S = 60.0  # timeout of calls that a worker answers from memory
LOOK_S = 20.0  # after which a worker in another process tells what its answers have sampled
TOLD_BYTES_PER_S = 5e6  # that it tells of them at most: with experts they may be large
LEAVE_S = 5.0  # that it has for it when it leaves
IDLE_S = 0.1  # after which a worker without work gets some of another; new groups may come at once
MOVE_ANSWERS = 16  # a worker that owes fewer would hardly be faster with half of them
UnderWay = Mapping[int, Mapping[int, Trajectory]]  # by serial and index


@dataclass(slots=True, eq=False)
class _Member:
    """What the pool knows of a worker."""

    version: int  # that it samples with
    orders: dict[str, Order] = field(default_factory=dict)  # by id of each unfinished request
    sampled_tokens: int = 0  # reported
    delivered_tokens: int = 0  # of finished trajectories
    counts: EngineCounts = field(default_factory=EngineCounts)
    retired: bool = False  # it gets no new orders
    following: asyncio.Task[None] = field(init=False)  # hears what the worker tells
    under_way: asyncio.Future[UnderWay] | None = None  # asked for
    known: dict[str, Trajectory] = field(default_factory=dict)  # by id, as it last told
    look_s: float = 0.0  # when it is to tell again
    moving: set[int] = field(default_factory=set)  # serials that it is to end, to go on elsewhere


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
    _failures: asyncio.Queue[Exception] = field(default_factory=asyncio.Queue, init=False)

    @property
    def workers(self) -> list[Worker[Sampler]]:
        return list(self._members)

    @property
    def staying(self) -> list[Worker[Sampler]]:
        """Workers that get new orders."""
        return [worker for worker, member in self._members.items() if not member.retired]

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
        """Remove a worker that is lost or must go."""
        if self._dismiss(worker):
            self.on_lost(worker, why)

    def retire(self, worker: Worker[Sampler]) -> None:
        """Give a worker no more orders: it is to `leave` soon."""
        self._members[worker].retired = True

    async def leave(self, worker: Worker[Sampler]) -> bool:
        """Remove a worker that first tells what it has sampled. False if it was lost meanwhile."""
        told, left = self._ask_under_way(worker), list[bool]()
        told.add_done_callback(lambda _: left.append(self._dismiss(worker)))  # before it tells of more
        await asyncio.wait([told], timeout=LEAVE_S)
        return any(left) or self._dismiss(worker)

    def _dismiss(self, worker: Worker[Sampler]) -> bool:
        """Remove a worker, whose answers go on elsewhere. False if it was no member."""
        if (member := self._members.pop(worker, None)) is None:
            return False
        worker.kill()  # nothing that it still sends may be booked
        if member.following is not asyncio.current_task():
            member.following.cancel()
        self._tell_under_way(member, {})
        self._past = self._past + member.counts
        kept_tokens = member.delivered_tokens
        for order in {id(order): order for order in member.orders.values()}.values():
            rest = _rest(order, member.orders, member.known)
            kept_tokens += sum(_fresh_tokens(order, t) for id, t in member.known.items() if id in _ids(rest))
            self._give(rest)
        if member.sampled_tokens > kept_tokens:
            self.on_redone(member.sampled_tokens - kept_tokens)
        return True

    def fail(self, error: Exception) -> None:
        """No worker can continue: every pending future raises `error`."""
        self._failures.put_nowait(error)
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
            member.moving.difference_update(serials)
            owed = {order.serial for order in member.orders.values() if order.counted}
            if ended := [serial for serial in serials if serial in owed]:
                worker.ask(Sampler.abort, ended)
        for order in [o for o in self._waiting if o.counted and o.serial in serials]:
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
        raise await self._failures.get()

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished requests have sampled. It is booked on return."""
        found: dict[int, dict[int, Trajectory]] = {}
        for groups in await asyncio.gather(*map(self._ask_under_way, self._members)):
            for serial, group in groups.items():
                found.setdefault(serial, {}).update(group)
        return found

    def _ask_under_way(self, worker: Worker[Sampler]) -> asyncio.Future[UnderWay]:
        if (member := self._members[worker]).under_way is None:
            member.under_way = asyncio.get_running_loop().create_future()
            worker.ask(Sampler.tell_under_way)
        return member.under_way

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

    def _relieve(self, idle: _Member) -> None:
        """Move the last half of the groups of the worker that owes most, if `idle` still is."""
        busiest = max(self.staying, key=lambda worker: len(self._members[worker].orders), default=None)
        if busiest is None or idle.orders or idle.retired or idle.version < self._newest - self.most_behind:
            return
        if len((member := self._members[busiest]).orders) < MOVE_ANSWERS or member.moving:
            return
        orders = (o for o in member.orders.values() if o.counted and not o.turn and o.first is None)
        groups = list(dict.fromkeys(order.serial for order in orders))
        if moving := groups[(len(groups) + 1) // 2 :]:
            member.moving.update(moving)
            busiest.ask(Sampler.abort, moving)

    async def _follow(self, worker: Worker[Sampler], member: _Member) -> None:
        try:
            while True:
                for note in (news := await worker.ask(Sampler.news)).notes:
                    self.on_note(note)
                self._hear(member, news)
                if not member.orders:
                    asyncio.get_running_loop().call_later(IDLE_S, self._relieve, member)
                if worker.pid != os.getpid() and self.clock.now() > member.look_s:
                    self._ask_under_way(worker)
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
        moved: dict[int, tuple[Order, dict[str, Trajectory]]] = {}
        for trajectory in news.finished:
            if (order := member.orders.pop(trajectory.id)).counted:
                member.delivered_tokens += _fresh_tokens(order, trajectory)
            if order.counted and order.serial in member.moving and trajectory.finish is FinishReason.ABORT:
                moved.setdefault(id(order), (order, {}))[1][trajectory.id] = trajectory
            elif not (future := self._futures.pop(trajectory.id)).done():
                future.set_result(trajectory)
        member.moving.intersection_update(order.serial for order in member.orders.values())
        for order, answers in moved.values():
            self._give(_rest(order, answers, answers))
        if news.under_way is not None:
            member.known = {t.id: t for group in news.under_way.values() for t in group.values()}
            replays = [t.replay for t in member.known.values() if t.replay is not None]
            size = sum(replay.routes.nbytes for replay in replays if replay.routes is not None)
            member.look_s = self.clock.now() + LOOK_S + size / TOLD_BYTES_PER_S
            self._tell_under_way(member, news.under_way)

    def _tell_under_way(self, member: _Member, found: UnderWay) -> None:
        if member.under_way is not None and not member.under_way.done():
            member.under_way.set_result(found)
        member.under_way = None


def _ids(order: Order) -> list[str]:
    return [order.request_id(i) for i in range(len(order.indices))]


def _rest(order: Order, owed: Container[str], known: Mapping[str, Trajectory]) -> Order:
    """The answers of an order that are `owed`, by id, to go on from what is `known` of them."""
    rest = [i for i, id in enumerate(_ids(order)) if id in owed]
    told = (known[id] for id in _ids(order) if id in owed and id in known)
    return replace(
        order,
        indices=tuple(order.indices[i] for i in rest),
        samplings=tuple(order.samplings[i] for i in rest),
        so_far={**(order.so_far or {}), **{t.index: t for t in told}},
        first=None if order.first is None else max(0, order.first - len(order.indices) + len(rest)),
    )


def _fresh_tokens(order: Order, trajectory: Trajectory) -> int:
    """Tokens of it that the order's worker has sampled, and no other."""
    before = (order.so_far or {}).get(trajectory.index)
    return trajectory.num_sampled_tokens - (before.num_sampled_tokens if before else 0)

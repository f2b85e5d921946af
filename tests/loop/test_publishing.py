"""New weights on their way from a learner to workers that come and go: real ends, workers that are objects here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.errors import PublishError, WorkerLostError
from headrace.loop.publishing import LEADER, TRIES, WeightPublisher
from headrace.measured import PublishTimes, StageClock
from headrace.place.inline import InlineReply
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.publish.encoding import Encoder
from headrace.publish.publisher import Publisher, Subscriber
from headrace.types import Ticket

WEIGHTS = torch.arange(1000.0)


class Served:
    """Answers each call in a thread, by the method with its name."""

    node = "here"

    def ask(self, method: Callable[..., Any], *args: Any) -> InlineReply[Any]:
        return InlineReply(ThreadPoolExecutor(1).submit(getattr(self, method.__name__), *args), "worker")


class Rank(Served):
    """Its weights of a version are those of the first, and the version on top."""

    def __init__(self, encoding: str = "full", directory: Path | None = None) -> None:
        end = CollectiveSender() if directory is None else DiskSender(directory)
        self.publisher = Publisher(Encoder(encoding), end)
        self.num_offers = 0

    def offer(self, version: int, nodes: list[str]) -> Ticket:
        self.num_offers += 1
        self.publisher.expect(nodes)
        return self.publisher.stage(version, [("x", WEIGHTS + version)])

    def send(self, ticket: Ticket, timeout_s: float) -> None:
        self.publisher.send(ticket, timeout_s)

    def offered(self, version: int, wanted: list[int]) -> PublishTimes:
        self.publisher.commit(version, wanted)
        return self.publisher.times

    def withdraw(self, version: int) -> None:
        self.publisher.abandon(version)

    def catch_up(self, nodes: list[str]) -> list[Ticket]:
        self.publisher.expect(nodes)
        return self.publisher.catch_up()


class Receiver(Served):
    def __init__(self, name: str, by_disk: bool = False) -> None:
        self.name, self.live, self.dead, self.broken = name, {"x": WEIGHTS.clone()}, False, False
        self.subscriber = Subscriber(DiskReceiver() if by_disk else CollectiveReceiver(), self.live)
        self.gate, self.versions = threading.Event(), list[int]()
        self.slower_s = 0.0  # fetching took so much longer than it did, it says
        self.gate.set()

    def ask(self, method: Callable[..., Any], *args: Any) -> InlineReply[Any]:
        return super().ask(self.die if self.dead else method, *args)

    def die(self, *args: Any) -> None:
        raise WorkerLostError(f"{self.name} is dead")

    def stage(self, ticket: Ticket, timeout_s: float) -> None:
        if self.broken:
            raise PublishError(f"{self.name} has no room")
        self.gate.wait()
        self.subscriber.stage(ticket, timeout_s)

    def commit(self, version: int) -> float:
        self.subscriber.commit(version)
        return self.subscriber.fetch_s + self.slower_s

    def abandon(self, version: int) -> None:
        self.subscriber.abandon(version)


class World:
    def __init__(self, encoding: str = "full", directory: Path | None = None) -> None:
        self.rank, by_disk, self.lost = Rank(encoding, directory), directory is not None, list[str]()
        self.workers = [Receiver("a", by_disk), Receiver("b", by_disk)]
        self.brought: list[Future[None]] = []
        ranks: Any = SimpleNamespace(
            first=self.rank, ranks=[self.rank], gather=lambda asked: [reply.result() for reply in asked]
        )
        bring: Any = lambda *late: self.brought.append(ThreadPoolExecutor(1).submit(self.publisher.follow, *late))  # noqa: E731
        pool: Any = self
        self.clock = StageClock()
        self.publisher = WeightPublisher(ranks, self.clock, 1.0, pool, self.give_up, bring if by_disk else None)
        self.publisher.commit(0)

    def reached(self, worker: Any, version: int) -> None:
        worker.versions.append(version)

    def give_up(self, worker: Any, why: str) -> None:
        self.lost.append(worker.name)
        self.workers.remove(worker)

    def assert_all_have(self, version: int) -> None:
        assert self.publisher.version == version
        assert all(torch.equal(worker.live["x"], WEIGHTS + version) for worker in self.workers)


def test_what_is_offered_reaches_nobody_before_it_is_delivered():
    world = World()
    world.publisher.offer(1)
    world.assert_all_have(0)
    assert world.publisher.deliver()
    world.assert_all_have(1)
    assert world.publisher.pending is None


def test_what_is_booked_as_transfer_ends_with_the_slowest_receiver():
    world = World()
    world.publisher.commit(1)
    world.clock.drain()
    slowest, other = world.workers
    slowest.slower_s, other.slower_s = 60.0, 30.0
    begun_s = world.clock.now()
    world.publisher.commit(2)
    spans, times = world.clock.drain(), world.rank.publisher.times
    assert {(span.stage, span.version, span.worker) for span in spans} == {("publish", 2, LEADER)}
    assert [span.detail for span in spans] == [f"{name}, 4000 bytes" for name in ("gather", "encode", "transfer")]
    expected = [times["gather"][0], times["encode"][0], times["transfer"][0] + slowest.subscriber.fetch_s + 60.0]
    assert [span.end_s - span.start_s for span in spans] == pytest.approx(expected)
    assert begun_s <= spans[0].start_s <= world.clock.now()
    assert [span.end_s for span in spans[:-1]] == [span.start_s for span in spans[1:]]


@pytest.mark.parametrize("dies", [True, False])
def test_who_joins_in_between_makes_it_be_offered_again(dies: bool):
    world, joining = World(), Receiver("c")
    world.publisher.offer(1)
    joining.dead = dies
    if dies:
        with pytest.raises(WorkerLostError):
            world.publisher.add_receiver(joining, world.workers.append)  # type: ignore[arg-type]
    else:
        world.publisher.add_receiver(joining, world.workers.append)  # type: ignore[arg-type]
    assert not world.publisher.deliver()
    world.publisher.commit(1)
    world.assert_all_have(1)
    assert len(world.workers) == (2 if dies else 3)
    assert not world.lost


def test_a_worker_that_dies_is_given_up_and_the_others_get_the_version():
    world = World()
    world.publisher.offer(1)
    world.workers[0].dead = True
    if not world.publisher.deliver():  # its death kept the version from the other, too
        world.publisher.commit(1)
    assert world.lost == ["a"]
    world.assert_all_have(1)


def test_where_nobody_can_take_a_version_the_run_is_told_why():
    world = World()
    for worker in world.workers:
        worker.broken = True
    told = r"version 1 was not published, and the old one stays: a: a has no room; b: b has no room"
    world.give_up = lambda worker, why: world.lost.append(worker.name)  # type: ignore[method-assign]
    world.publisher.give_up = world.give_up
    with pytest.raises(PublishError, match=told):
        world.publisher.commit(1)
    assert world.rank.num_offers == 1 + TRIES
    assert world.publisher.version == 0


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_nobody_waits_for_a_late_worker_which_gets_the_newest_version_in_the_end(encoding: str, tmp_path: Path):
    world = World(encoding, tmp_path)
    fast, late = world.workers
    late.gate.clear()
    for version in (1, 2, 3):
        world.publisher.commit(version)
        assert fast.versions[-1] == version
        assert late.versions == [0]
        assert torch.equal(late.live["x"], WEIGHTS)
    late.gate.set()
    (brought,) = world.brought  # it was asked once
    brought.result(30.0)
    world.assert_all_have(3)
    assert late.versions[-1] == 3
    assert late.versions == sorted(late.versions)  # it never went back
    world.publisher.commit(4)
    world.assert_all_have(4)
    assert len(world.brought) == 1
    assert not world.lost


def test_a_late_worker_that_fails_is_told_of(tmp_path: Path):
    world = World(directory=tmp_path)
    world.workers[1].gate.clear()
    world.publisher.commit(1)
    world.workers[1].dead = True
    world.workers[1].gate.set()
    with pytest.raises(WorkerLostError, match="b is dead"):
        world.brought[0].result(30.0)


def test_the_first_version_is_waited_for(tmp_path: Path):
    """A worker without it has no weights of this run."""
    world = World(directory=tmp_path)
    late = Receiver("c", by_disk=True)
    late.gate.clear()
    world.workers.append(late)
    world.publisher.version = None
    threading.Timer(1.0, late.gate.set).start()
    world.publisher.commit(1)
    assert late.versions == [1]

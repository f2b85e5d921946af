"""Real engines behind a pool, one of which is lost in the middle of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_runs import Workshop

from headrace.errors import DataError, WorkerLostError
from headrace.measured import StageClock
from headrace.place.device import DeviceThread
from headrace.place.rollout_worker import RolloutSpec, RolloutWorker
from headrace.publish.disk import DiskReceiver
from headrace.rollout.engine import Engine
from headrace.rollout.pool import RolloutPool
from headrace.types import FinishReason, Order, Prompt, Sampling, Trajectory

PROMPT = np.array([5, 6, 7], np.int32)


class Asked:
    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, Any]:
        return self._task.__await__()

    def result(self, timeout_s: float | None = None) -> Any:
        return self._task.result()


class Here:
    """A worker in this process, which can be lost like one elsewhere."""

    node, pid = "here", 0

    def __init__(self, workshop: Workshop, name: str) -> None:
        config = workshop.config(name)
        spec = RolloutSpec(config=config, name=name, epoch_s=0.0, longest_prompt=8, receiving=DiskReceiver)
        self.name, self.worker = name, RolloutWorker(DeviceThread(), spec)
        self.dead = self.is_hung = False

    def ask(self, method: Callable[..., Any], *args: Any) -> Asked:
        return Asked(asyncio.ensure_future(self._answer(method.__name__, *args)))

    async def _answer(self, method: str, *args: Any) -> Any:
        found = await getattr(self.worker, method)(*args)
        while self.is_hung and not self.dead:
            await asyncio.sleep(0.01)
        if self.dead:
            raise WorkerLostError(f"{self.name} is lost")
        return found

    def kill(self) -> None:
        self.dead = True


class Books:
    """What the pool books: sampled, and lost with a worker."""

    def __init__(self, *workers: Here) -> None:
        self.sampled = self.redone = 0
        self.lost: list[str] = []
        self.pool = RolloutPool(
            clock=StageClock(),
            on_begun=lambda serial, version: None,
            on_sampled=lambda n: setattr(self, "sampled", self.sampled + n),
            on_redone=lambda n: setattr(self, "redone", self.redone + n),
            on_lost=lambda worker, why: self.lost.append(worker.name),
            on_note=self.lost.append,
        )
        for worker in workers:
            self.pool.join(worker)  # type: ignore[arg-type]

    def start(self, tokens: int) -> list[asyncio.Future[Trajectory]]:
        found = []
        for serial in range(4):
            prompt = Prompt(id=f"p{serial}", text="", token_ids=PROMPT + serial)
            found += self.pool.start(Order.group(serial, prompt, [Sampling(max_new_tokens=tokens)] * 2))
        return found


async def test_tokens_that_went_with_a_worker_are_booked_and_its_answers_come_all_the_same(workshop: Workshop):
    undisturbed = Books(Here(workshop, "alone"))
    expected = await asyncio.gather(*undisturbed.start(200))
    assert undisturbed.redone == 0

    doomed = Here(workshop, "doomed")
    books = Books(doomed, Here(workshop, "other"))
    futures = books.start(200)
    while not books.pool._members[doomed].sampled_tokens:
        await asyncio.sleep(0.001)
    sampled = books.pool._members[doomed].sampled_tokens
    books.pool.lose(doomed, "killed")  # type: ignore[arg-type]
    assert books.lost == ["doomed"]
    assert 0 < books.redone <= sampled
    found = await asyncio.gather(*futures)
    assert {t.id: t.token_ids.tolist() for t in found} == {t.id: t.token_ids.tolist() for t in expected}
    assert books.sampled == sum(t.num_sampled_tokens for t in found) + books.redone
    undisturbed.pool.close()
    books.pool.close()


async def test_a_worker_that_dies_with_all_that_counts_told_leaves_nothing_to_sample(workshop: Workshop):
    """Of a group that two answers are enough for: the others end where they are."""
    doomed = Here(workshop, "doomed")
    books = Books(doomed)
    lengths = [Sampling(max_new_tokens=n) for n in (4, 4, 200, 200)]
    prompt = Prompt(id="p", text="", token_ids=PROMPT)
    futures = books.pool.start(Order.group(0, prompt, lengths, first=3))
    await asyncio.wait(futures[:2])
    member = books.pool._members[doomed]
    member.orders = dict.fromkeys(member.orders, replace(member.orders["0:p/2"], first=2))  # two were enough
    books.pool.join(Here(workshop, "other"))  # type: ignore[arg-type]
    books.pool.lose(doomed, "killed")  # type: ignore[arg-type]
    late = await asyncio.gather(*futures[2:])
    assert {t.finish for t in late} == {FinishReason.ABORT}
    assert max(t.num_sampled_tokens for t in late) < 200
    books.pool.close()


async def test_without_anybody_an_aborted_group_ends_with_nothing(workshop: Workshop):
    books = Books()
    futures = books.start(8)
    books.pool.abort([0])
    first, second = await asyncio.gather(*futures[:2])
    assert first.num_sampled_tokens == second.num_sampled_tokens == books.sampled == 0
    assert not futures[2].done()
    late = Here(workshop, "late")
    books.pool.join(late)  # type: ignore[arg-type]
    rest = await asyncio.gather(*futures[2:])
    assert len(rest) == 6
    books.pool.close()


async def test_a_lost_worker_costs_only_what_it_sampled_since_it_last_told(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.rollout.pool.LOOK_S", 0.0)
    undisturbed = Books(Here(workshop, "alone"))
    expected = await asyncio.gather(*undisturbed.start(200))
    doomed, other = Here(workshop, "doomed"), Here(workshop, "other")
    books = Books(doomed, other)
    futures, member = books.start(200), books.pool._members[doomed]
    while sum(t.num_sampled_tokens for t in member.known.values()) < 40:
        await asyncio.sleep(0.001)
    told = sum(t.num_sampled_tokens for id, t in member.known.items() if id in member.orders)
    books.pool.lose(doomed, "killed")  # type: ignore[arg-type]
    assert told > 0
    assert books.redone == member.sampled_tokens - member.delivered_tokens - told
    found = await asyncio.gather(*futures)
    assert {t.id: t.token_ids.tolist() for t in found} == {t.id: t.token_ids.tolist() for t in expected}
    assert books.sampled == sum(t.num_sampled_tokens for t in found) + books.redone
    undisturbed.pool.close()
    books.pool.close()


async def test_the_answers_of_a_worker_that_leaves_go_on_elsewhere_with_their_tokens(workshop: Workshop):
    undisturbed = Books(Here(workshop, "alone"))
    expected = await asyncio.gather(*undisturbed.start(200))
    leaving, staying = Here(workshop, "leaving"), Here(workshop, "staying")
    books = Books(leaving, staying)
    futures = books.start(200)
    books.pool.retire(leaving)  # type: ignore[arg-type]
    assert books.pool.staying == [staying]
    assert books.pool.workers == [leaving, staying], "it takes new weights as long as it samples"
    prompt = Prompt(id="p9", text="", token_ids=PROMPT)
    later = books.pool.start(Order.group(9, prompt, [Sampling(max_new_tokens=100)] * 2))
    owed = {order.serial for order in books.pool._members[leaving].orders.values()}
    assert owed
    assert 9 not in owed
    while not books.pool._members[leaving].sampled_tokens:
        await asyncio.sleep(0.001)
    await books.pool.leave(leaving)  # type: ignore[arg-type]
    assert books.pool.workers == [staying]
    moved = [o.so_far[i] for o in books.pool._members[staying].orders.values() for i in o.so_far or ()]
    assert sum(t.num_sampled_tokens for t in moved) > 0
    found = await asyncio.gather(*futures)
    assert {t.id: t.token_ids.tolist() for t in found} == {t.id: t.token_ids.tolist() for t in expected}
    found += await asyncio.gather(*later)
    assert (books.redone, books.lost) == (0, [])
    assert books.sampled == sum(t.num_sampled_tokens for t in found)
    undisturbed.pool.close()
    books.pool.close()


async def test_a_worker_with_nothing_to_do_takes_over_half_of_the_groups_of_another(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    undisturbed = Books(Here(workshop, "alone"))
    expected = await asyncio.gather(*undisturbed.start(200))

    monkeypatch.setattr("headrace.rollout.pool.MOVE_ANSWERS", 2)
    monkeypatch.setattr("headrace.place.rollout_worker.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("headrace.rollout.pool.IDLE_S", 0.0)
    given: list[tuple[str, int, int]] = []  # to whom, the group, and tokens it came with

    class Noting(Here):
        def ask(self, method: Callable[..., Any], *args: Any) -> Asked:
            if method.__name__ == "take":
                known = args[0][0].so_far or {}
                given.append((self.name, args[0][0].serial, sum(t.num_sampled_tokens for t in known.values())))
            return super().ask(method, *args)

    busy, late = Noting(workshop, "busy"), Noting(workshop, "late")
    books = Books(busy)
    futures = books.start(200)
    while books.pool._members[busy].sampled_tokens < 40:
        await asyncio.sleep(0.001)
    books.pool.join(late)  # type: ignore[arg-type]
    found = await asyncio.gather(*futures)
    moved = [(serial, tokens) for name, serial, tokens in given if name == "late"]
    assert [serial for serial, _ in moved][:2] == [2, 3]
    assert all(tokens > 0 for _, tokens in moved)
    assert {t.id: t.token_ids.tolist() for t in found} == {t.id: t.token_ids.tolist() for t in expected}
    assert (books.redone, books.lost) == (0, [])  # nothing was sampled twice
    assert books.sampled == sum(t.num_sampled_tokens for t in found)
    undisturbed.pool.close()
    books.pool.close()


async def test_a_group_that_is_ended_while_it_moves_ends(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.rollout.pool.MOVE_ANSWERS", 2)
    monkeypatch.setattr("headrace.place.rollout_worker.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("headrace.rollout.pool.IDLE_S", 0.0)
    busy = Here(workshop, "busy")
    books = Books(busy)
    futures = books.start(200)
    books.pool.join(Here(workshop, "late"))  # type: ignore[arg-type]
    member = books.pool._members[busy]  # type: ignore[index]
    while not member.moving:
        await asyncio.sleep(0)
    books.pool.abort([3])
    found = await asyncio.gather(*futures)
    assert [t.finish is FinishReason.ABORT for t in found] == [False] * 6 + [True] * 2
    assert books.sampled == sum(t.num_sampled_tokens for t in found)
    books.pool.close()


async def test_few_answers_and_episodes_stay_where_they_are(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.place.rollout_worker.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("headrace.rollout.pool.IDLE_S", 0.0)
    asked: list[str] = []

    class Noting(Here):
        def ask(self, method: Callable[..., Any], *args: Any) -> Asked:
            asked.append(method.__name__)
            return super().ask(method, *args)

    books = Books(Noting(workshop, "busy"))
    futures = books.start(200)  # eight answers
    late = Here(workshop, "late")
    books.pool.join(late)  # type: ignore[arg-type]
    await asyncio.gather(*futures)
    assert "abort" not in asked
    books.pool.lose(late, "not needed")  # type: ignore[arg-type]
    monkeypatch.setattr("headrace.rollout.pool.MOVE_ANSWERS", 2)
    turns = []
    for serial in range(4):
        prompt = Prompt(id=f"p{serial}", text="", token_ids=PROMPT + serial)
        turns += books.pool.start(Order.group(serial, prompt, [Sampling(max_new_tokens=200)], turn=1))
    books.pool.join(Here(workshop, "later"))  # type: ignore[arg-type]
    await asyncio.gather(*turns)
    assert "abort" not in asked
    books.pool.close()


async def test_a_worker_that_does_not_tell_leaves_all_the_same(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.rollout.pool.ANSWER_S", 0.05)
    leaving, staying = Here(workshop, "leaving"), Here(workshop, "staying")
    books = Books(leaving, staying)
    futures = books.start(30)
    leaving.is_hung = True
    await books.pool.leave(leaving)  # type: ignore[arg-type]
    found = await asyncio.gather(*futures)
    assert books.sampled == sum(t.num_sampled_tokens for t in found) + books.redone
    books.pool.close()


async def test_drain_waits_for_everything_under_way(workshop: Workshop):
    books = Books(Here(workshop, "busy"))
    futures = books.start(30)
    await books.pool.drain()
    assert len(futures) == 8
    assert all(future.done() for future in futures)
    await asyncio.wait_for(books.pool.drain(), 5)
    books.pool.close()


async def test_an_engine_error_reaches_everyone_who_waits(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    def broken(engine: Engine, wanted: int) -> int:
        raise ZeroDivisionError("the engine broke")

    monkeypatch.setattr(Engine, "_decode", broken)
    books = Books(Here(workshop, "broken"))
    running = asyncio.create_task(books.pool.run())
    outcomes = await asyncio.gather(*books.start(30), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["the engine broke"] * 8
    with pytest.raises(ZeroDivisionError, match="the engine broke"):
        await running
    await asyncio.wait_for(books.pool.drain(), 5)
    books.pool.close()


async def test_a_cancelled_waiter_disturbs_nobody(workshop: Workshop):
    books = Books(Here(workshop, "left"))
    first, *others = books.start(8)
    first.cancel()
    found = await asyncio.gather(*others)
    await books.pool.drain()
    assert books.sampled > sum(t.num_sampled_tokens for t in found) > 0
    books.pool.close()


async def test_an_order_that_cannot_be_taken_fails_the_pool(workshop: Workshop):
    books = Books(Here(workshop, "small"))
    with pytest.raises(DataError, match=r"prompt 'p0' has 3 tokens and may get 9999 new ones"):
        await asyncio.gather(*books.start(9999))
    books.pool.close()


@pytest.mark.parametrize(("most_behind", "orders"), [(0, [8, 0]), (1, [4, 4])])
async def test_a_worker_with_older_weights_gets_new_groups_only_as_far_as_allowed(
    workshop: Workshop, most_behind: int, orders: list[int]
):
    workers = newest, _ = Here(workshop, "newest"), Here(workshop, "behind")
    books = Books(*workers)
    books.pool.most_behind = most_behind
    books.pool.reached(newest, 1)  # type: ignore[arg-type]
    futures = books.start(8)
    assert [len(books.pool._members[worker].orders) for worker in workers] == orders
    await asyncio.gather(*futures)
    books.pool.close()

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hand_made import group, group_of, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.buffer import Buffer, LagPolicy, Sieve
from headrace.config import BufferSection
from headrace.errors import StalledError
from headrace.types import DropReason, FinishReason, Group, Span, Trajectory

Dropped = list[tuple[Trajectory, str]]


@dataclass
class Books:
    """What a buffer told about the groups that passed through it."""

    buffered: list[int] = field(default_factory=list)
    drops: list[tuple[str, str, bool]] = field(default_factory=list)  # trajectory id, reason, was buffered

    def on_buffered(self, entered: Group) -> None:
        self.buffered.append(entered.serial)

    def on_drop(self, dropped: Dropped, from_group: Group, was_buffered: bool) -> None:
        assert was_buffered == (from_group.serial in self.buffered)
        self.drops += [(t.id, str(reason), was_buffered) for t, reason in dropped]

    @property
    def reasons(self) -> Counter[str]:
        return Counter(reason for _, reason, _ in self.drops)


def make(
    max_lag: int,
    size: int = 2,
    *,
    patience: int = 10**6,
    overlong: bool = False,
    most_at_once: int = 0,
) -> tuple[Buffer, Books]:
    books = Books()
    buffer = Buffer(
        LagPolicy(max_lag=max_lag, groups_per_step=size, most_at_once=most_at_once),
        Sieve(BufferSection(drop="no_signal,overlong" if overlong else "no_signal")),
        patience=patience,
        on_buffered=books.on_buffered,
        on_drop=books.on_drop,
    )
    return buffer, books


async def soon(wait: Coroutine[Any, Any, Any]) -> Any:
    """The result if it is there without anybody else doing anything, else None."""
    task = asyncio.ensure_future(wait)
    for _ in range(5):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


async def test_producer_waits_for_room_and_learner_for_groups():
    buffer, books = make(max_lag=0)
    assert await soon(buffer.next()) is None
    assert await soon(buffer.admit()) == 2
    assert [buffer.start(serial) for serial in (0, 1)] == [0, 0]
    producer, learner = asyncio.create_task(buffer.admit()), asyncio.create_task(buffer.next())
    await buffer.put(group(1))
    assert await soon(asyncio.sleep(0, "a while")) == "a while"
    assert not learner.done()  # group 0 comes first
    await buffer.put(group(0))
    assert (await learner).serial == 0
    assert (await buffer.next()).serial == 1
    assert not producer.done()
    assert await buffer.settle(1) == []
    assert await producer == 2
    assert buffer.start(2) == 1
    assert books.buffered == [1, 0]
    assert not books.drops


async def test_on_policy_admits_in_waves():
    buffer, books = make(max_lag=0, size=3)
    for serial in range(await buffer.admit()):
        buffer.start(serial)
    await buffer.put(group(0, rewards=[1, 1]))
    assert await soon(buffer.admit()) is None  # a place is free, but 1 and 2 still run
    await buffer.lose(1, DropReason.REWARD_ERROR)
    assert await soon(buffer.admit()) is None
    await buffer.put(group(2))
    assert await soon(buffer.admit()) == 2
    buffer.start(3)
    assert await soon(buffer.admit()) == 1  # the wave goes on where it was
    assert books.reasons == {"no_signal": 2}


async def test_a_wave_counts_on_drops_and_what_it_keeps_is_trained_on_in_its_step():
    buffer, books = make(max_lag=0, size=3, most_at_once=8)

    async def wave(first: int, good: int) -> int:
        """Start what is admitted; `good` of it has signal. Returns the next serial."""
        until = first + await buffer.admit()
        for serial in range(first, until):
            buffer.start(serial)
        for serial in range(first, until):
            await buffer.put(group(serial, version=buffer.version, rewards=[0, 1] if serial < first + good else [1, 1]))
        return until

    assert await wave(0, good=1) == 3
    assert await wave(3, good=4) == 7, "two are missing, and one of three was kept"
    taken = [(await buffer.next()).serial for _ in range(5)]
    assert taken == [0, 3, 4, 5, 6], "the step has five groups instead of three, and none is thrown away"
    assert await buffer.next() is None
    assert await soon(buffer.admit()) is None
    await buffer.settle(1)
    assert await wave(7, good=3) == 11, "three are missing, and six of eight count as kept"
    assert [(await buffer.next()).serial for _ in range(3)] == [7, 8, 9]
    assert await buffer.next() is None
    await buffer.settle(2)
    assert await soon(buffer.admit()) == 4, "three of four, and what came two steps ago no longer counts"
    assert books.reasons == {"no_signal": 6}


async def test_off_policy_replaces_at_once():
    buffer, _ = make(max_lag=1, size=3)
    assert await buffer.admit() == 3
    for serial in range(3):
        buffer.start(serial)
    assert await soon(buffer.admit()) is None
    await buffer.put(group(1, rewards=[1, 1]))
    assert await soon(buffer.admit()) == 1


async def test_a_learner_that_waits_lets_more_groups_start():
    buffer, _ = make(max_lag=2, size=2)
    for serial in range(await buffer.admit()):
        buffer.start(serial)
    for serial in (0, 1):
        waiting = asyncio.create_task(buffer.next())
        assert await soon(buffer.admit()) == (2 if serial else None)
        await buffer.put(group(serial))
        assert (await waiting).serial == serial
    assert await soon(buffer.admit()) == 4, "one for each that was taken, and one for each that was waited for"


async def test_groups_that_only_lie_there_are_not_replaced():
    """Answers that come at once are there as soon as a place is free: in the end there is a step's worth of places."""
    buffer, _ = make(max_lag=4, size=2)
    for _ in range(6):
        buffer._window = buffer.policy.widened(buffer._window)
    serial, waiting = 0, []
    for version in range(12):
        for _ in range(await soon(buffer.admit()) or 0):
            buffer.start(serial)
            await buffer.put(group(serial, version=version))
            serial += 1
        waiting.append(len(buffer.buffered))
        assert await soon(buffer.next()) is not None
        assert await soon(buffer.next()) is not None
        await buffer.settle(version + 1)
    assert waiting == [8, 7, 6, 5, 4, 3, 2, 2, 2, 2, 2, 2]


async def test_the_hard_check_is_made_when_the_learner_takes_a_group():
    buffer, books = make(max_lag=1, size=1)
    buffer.start(0), buffer.start(1)
    await buffer.put(group(0))
    await buffer.put(group(1))
    assert (await buffer.next()).serial == 0
    await buffer.settle(1)
    await buffer.settle(2)  # nobody took group 1 in time
    assert await soon(buffer.next()) is None
    assert books.drops == [("1:p1/0", "stale", True), ("1:p1/1", "stale", True)]
    assert await soon(buffer.admit()) == 1  # a step's worth: it never waited for one that came


async def test_a_group_that_comes_too_late_is_not_buffered():
    buffer, books = make(max_lag=1, size=1)
    buffer.start(0), buffer.start(1)
    buffer.begin(0, 0)
    assert await buffer.settle(1) == []
    assert await buffer.settle(2) == [0]  # the other one still waits for the engine and does not age
    buffer.begin(1, 2)
    buffer.begin(1, 3)  # its second answer: the first one counts
    assert await buffer.settle(3) == [0]
    assert await buffer.settle(4) == [0, 1]
    await buffer.settle(2)
    await buffer.put(group(0, version=0))
    await buffer.put(group(1, version=1))
    assert books.drops == [("0:p0/0", "stale", False), ("0:p0/1", "stale", False)]
    assert (await buffer.next()).serial == 1


async def test_held_admission():
    buffer, _ = make(max_lag=0)
    buffer.hold()
    waiting = asyncio.create_task(buffer.admit())
    assert await soon(asyncio.sleep(0, "a while")) == "a while"
    assert not waiting.done()
    await buffer.release()
    assert await waiting == 2


async def test_stall_names_reasons_and_counts():
    buffer, _ = make(max_lag=0, size=2, patience=2)
    losses = [None, DropReason.REWARD_ERROR, None, DropReason.INCOMPLETE]
    for serial, reason in enumerate(losses):
        buffer.start(serial)
        assert await soon(buffer.next()) is None  # patience is two steps' worth
        if reason is None:
            await buffer.put(group(serial, rewards=[1, 1]))
        else:
            await buffer.lose(serial, reason)
    with pytest.raises(StalledError, match=r"last 4 groups .*2 x no_signal, 1 x reward_error, 1 x incomplete"):
        await buffer.next()


async def test_stall_names_what_the_whole_group_was_dropped_for():
    buffer, _ = make(max_lag=0, size=1, patience=1, overlong=True)
    buffer.start(0)
    cut = trajectory(index=0, finish=FinishReason.LENGTH, reward=0.0)
    await buffer.put(group_of(cut, trajectory(index=1), trajectory(index=2)))
    with pytest.raises(StalledError, match=r"1 x no_signal\)"):
        await buffer.next()


async def test_one_good_group_ends_a_barren_stretch():
    buffer, _ = make(max_lag=0, size=3, patience=1)
    for serial in range(8):
        buffer.start(serial)
        await buffer.put(group(serial, rewards=[1, 1] if serial % 3 else [0, 1]))
    assert (await buffer.next()).serial == 0
    assert [(await buffer.next()).serial for _ in range(2)] == [3, 6]
    assert await soon(buffer.next()) is None


async def test_a_wave_is_complete_before_its_dropped_groups_are_replaced():
    buffer, _ = make(max_lag=0, size=4)
    for serial in range(await buffer.admit()):
        buffer.start(serial)
    await buffer.put(group(0))
    await buffer.put(group(1, rewards=[1, 1]))
    await buffer.lose(2, DropReason.REWARD_ERROR)
    assert (await buffer.next()).serial == 0
    waiting = asyncio.create_task(buffer.next())
    assert await soon(buffer.admit()) is None
    assert not waiting.done()  # 3 may still come
    await buffer.put(group(3))
    assert (await waiting).serial == 3
    assert await soon(buffer.admit()) == 2


async def test_stale_groups_are_no_stall():
    """They say that training went on, not that nothing can be trained on."""
    buffer, books = make(max_lag=0, size=1, patience=1)
    for serial in range(3):
        buffer.start(serial)
    await buffer.settle(1)
    await buffer.put(group(0, version=0))
    await buffer.lose(1, DropReason.STALE)
    assert books.reasons == {"stale": 2}
    assert await soon(buffer.next()) is None


class Driver:
    """Producer, engine and learner in one, doing whatever the dice say."""

    def __init__(self, max_lag: int, size: int, seed: int) -> None:
        self.buffer, self.books = make(max_lag, size, overlong=True)
        self.max_lag, self.size, self.rng = max_lag, size, random.Random(seed)
        self.engine_version = self.serial = self.taken = 0
        self.lost: Counter[int] = Counter()
        self.handed: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()  # trajectory id -> how often it was handed out or dropped
        self.all: set[str] = set()

    async def do(self, act: str) -> None:
        await getattr(self, act)()
        self.check()

    async def admit(self) -> None:
        room = await soon(self.buffer.admit())
        for _ in range(self.rng.randint(0, room) if room else 0):
            self.buffer.start(self.serial)
            self.all |= {f"{self.serial}:p{self.serial}/{i}" for i in range(3)}
            self.serial += 1

    async def put(self, *, good: bool = False) -> None:
        if not self.buffer.in_flight:
            return
        serial = self.rng.choice(list(self.buffer.in_flight))
        self.buffer.begin(serial, self.engine_version)  # if it has not begun already
        begun_at = self.buffer.in_flight[serial]
        assert begun_at is not None
        answers = [self.answer(serial, i, begun_at, good) for i in range(3)]
        await self.buffer.put(group_of(*answers, serial=serial, version=begun_at))

    async def begin(self) -> None:
        for serial in list(self.buffer.in_flight):
            if self.rng.random() < 0.5:
                self.buffer.begin(serial, self.engine_version)

    def answer(self, serial: int, index: int, begun_at: int, good: bool) -> Trajectory:
        first = self.rng.randint(begun_at, self.engine_version)
        spans = (Span(version=first, start=2, end=3), Span(version=self.engine_version, start=3, end=5))
        reward = float(index) if good else float(self.rng.random() < 0.3)
        cut = not good and self.rng.random() < 0.2
        finish = FinishReason.LENGTH if cut else FinishReason.EOS
        return trajectory(serial=serial, index=index, spans=spans, reward=reward, finish=finish)

    async def lose(self) -> None:
        if self.buffer.in_flight:
            await self._lose(self.rng.choice(list(self.buffer.in_flight)), DropReason.REWARD_ERROR)

    async def _lose(self, serial: int, reason: DropReason) -> None:
        await self.buffer.lose(serial, reason)
        self.lost[serial] += 1
        self.ends.update(f"{serial}:p{serial}/{i}" for i in range(3))

    async def learn(self) -> None:
        """Take a group; after `size` of them publish, and give up what became hopeless."""
        taken = await soon(self.buffer.next())
        if taken is None:
            return
        assert 0 <= taken.lag(self.engine_version) <= self.max_lag
        if self.max_lag == 0:
            assert not self.handed or taken.serial > max(self.handed)
        self.handed[taken.serial] += 1
        self.ends.update(t.id for t in taken.trajectories)
        self.taken += 1
        if self.taken == self.size:
            self.taken, self.engine_version = 0, self.engine_version + 1
            for serial in await self.buffer.settle(self.engine_version):
                await self._lose(serial, DropReason.STALE)

    def check(self) -> None:
        trained = self.engine_version * self.size + self.taken
        held = len(self.buffer.in_flight) + len(self.buffer.buffered)
        assert trained + held <= (self.engine_version + self.max_lag + 1) * self.size
        assert len(self.buffer.buffered) == len({g.serial for g in self.buffer.buffered})

    async def keeps_going(self) -> None:
        """From any state, a producer that goes on lets the learner finish two more steps."""
        goal = self.engine_version + 2
        for _ in range(20 * self.size * (self.max_lag + 2)):
            await self.do("admit")
            await self.put(good=True)
            await self.do("learn")
        assert self.engine_version >= goal

    def settled(self) -> None:
        """Everything that was admitted and is not waiting ended exactly once."""
        ends = self.ends + Counter(id for id, _, _ in self.books.drops)
        waiting = {f"{s}:p{s}/{i}" for s in self.buffer.in_flight for i in range(3)}
        waiting |= {t.id for g in self.buffer.buffered for t in g.trajectories}
        assert set(ends.values()) <= {1}
        assert set(ends) | waiting == self.all
        assert not set(ends) & waiting


@settings(max_examples=60, deadline=None)
@given(
    max_lag=st.integers(0, 3),
    size=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    acts=st.lists(st.sampled_from(["admit", "begin", "put", "put", "lose", "learn", "learn"]), max_size=60),
)
def test_any_interleaving(max_lag: int, size: int, seed: int, acts: list[str]):
    async def play() -> None:
        driver = Driver(max_lag, size, seed)
        for act in acts:
            await driver.do(act)
        driver.settled()
        await driver.keeps_going()
        driver.settled()

    asyncio.run(play())

"""The one place where producer and learner wait for each other: lag policy, filters, buffer."""

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from headrace.config import BufferSection, LearnerSection
from headrace.errors import StalledError
from headrace.types import DropReason, Group, Score, Trajectory

Dropped = list[tuple[Trajectory, str]]
OnDrop = Callable[[Dropped, Group, bool], None]
Recent = tuple[int, int]  # groups of the last step and of this one


@dataclass(frozen=True, slots=True, kw_only=True)
class LagPolicy:
    """Every decision about how far generation may run ahead of training. The simulator uses it too.

    A trained token is at most `max_lag` versions old (rounded up), and younger if that costs no time.
    """

    max_lag: float
    groups_per_step: int
    eager: bool = False  # always admit all that max_lag allows, whether the learner needs it or not
    most_at_once: int = 0  # groups that the engines have rows for

    @property
    def most_ahead(self) -> int:
        """Groups that can be in flight or buffered at once."""
        return self.groups_per_step + int(round(self.max_lag * self.groups_per_step, 6))

    @property
    def least_window(self) -> int:
        """The initial and smallest window: one step's groups, for full batches."""
        return self.most_ahead if self.eager else self.groups_per_step

    def capacity(self, *, version: int, committed: int) -> int:
        """Groups that may be admitted now, if `committed` were admitted so far and not dropped.

        The learner at version v has trained the groups of v steps. A group beyond those of the next
        max_lag + 1 steps would be too old when its turn comes.
        """
        return version * self.groups_per_step + self.most_ahead - committed

    def admit(self, capacity: int, *, wave_left: int, free: int) -> int:
        """Groups to start now; the window of those in flight or buffered has `free` places.

        On-policy training (max_lag = 0) admits in waves: the replacement of a dropped group waits
        until every group in flight is scored. So the engine's batches depend on the data alone, not
        on how fast rewards arrive, and two runs with one seed are bit-identical.
        """
        return wave_left if self.max_lag == 0 else min(capacity, free)

    def wave(self, missing: int, *, begun: int, kept: int) -> int:
        """Groups that start together, so that about `missing` are kept, if as many are as `kept` of the last `begun`.

        What is kept beyond `missing` is trained on in the same step.
        """
        return max(missing, min(-(-missing * (begun + 1) // (kept + 1)), self.most_at_once))

    def widened(self, window: int) -> int:
        """The window after the learner had to wait for a group.

        Wider by an eighth of a step only, because groups come in bursts and one wait may be long.
        """
        return min(window + -(-self.groups_per_step // 8), self.most_ahead)

    def narrowed(self, window: int, *, idle: int) -> int:
        """The window after a step in which at least `idle` groups were always buffered.

        Narrower by an eighth of them at a time, because waiting costs more than lag.
        """
        return max(window - -(-idle // 8), self.least_window)

    @staticmethod
    def order(group: Group) -> tuple[int, int]:
        """Sort key of buffered groups: the oldest version first, then by serial."""
        return group.oldest_version, group.serial

    def select(self, buffered: Sequence[Group], in_flight: Mapping[int, int | None]) -> Group | None:
        """The first of `buffered`, which is sorted by `order`, or None to wait.

        At max_lag = 0 groups are taken by serial, so that gradients accumulate in a fixed order.
        """
        first = buffered[0] if buffered else None
        if first is not None and self.max_lag == 0 and any(serial < first.serial for serial in in_flight):
            return None
        return first

    def is_too_old(self, lag: int) -> bool:
        return lag >= self.max_lag + 1

    def evict(self, buffered: Sequence[Group], *, version: int) -> list[Group]:
        """The groups that are too old at `version`: the first of `buffered`."""
        return list(takewhile(lambda group: self.is_too_old(group.lag(version)), buffered))

    def abort(self, in_flight: Mapping[int, int | None], *, version: int) -> list[int]:
        """Serials of groups in flight that are too old already, however soon they finish.

        `in_flight` maps serials to the version of their first token, None before it is sampled.
        """
        begun = ((serial, first) for serial, first in in_flight.items() if first is not None)
        return [serial for serial, first in begun if self.is_too_old(version - first)]


@dataclass
class Sieve:
    """Which trajectories are trained on; every other one is dropped with a reason.

    The filters in order: overlong answers, the user's own, groups without signal.
    """

    section: BufferSection
    keeps: Callable[[str, Group], Awaitable[Score]] | None = None  # what a filter says
    learner: LearnerSection = field(default_factory=LearnerSection)  # decides what is a signal
    first_error: str = ""

    async def filtered(self, group: Group) -> tuple[Group, str | None]:
        """The group with the rewards that the user's filters add, and why they do not keep it.

        They may run in other processes, and take long.
        """
        seen, cut = self._uncut(group)
        for spec in self.section.filters if seen.trajectories else ():
            assert self.keeps is not None
            name, verdict = spec.rpartition(":")[2], await self.keeps(spec, seen)
            if verdict.failure is not None:
                told = f"the filter '{name}' failed on prompt '{group.prompt.id}': {verdict.detail}"
                self.first_error = self.first_error or told
                return group, DropReason.FILTER_ERROR
            if verdict.parts.get(name) == 0:
                return group, f"filter:{name}"
            if name not in verdict.parts:  # but rewards for each answer
                given: dict[int, list[float]] = {t.index: [] for t in seen.trajectories}
                for key, reward in verdict.parts.items():
                    given[int(key.split()[0])].append(reward)
                ranked = tuple(t.rewarded(name, given[t.index]) for t in seen.trajectories)
                seen = replace(seen, trajectories=ranked)
        return replace(group, trajectories=(*seen.trajectories, *(t for t, _ in cut))), None

    def sift(self, group: Group, refusal: str | None = None) -> tuple[Group | None, Dropped]:
        """What of the group to train on, if anything, and the dropped trajectories with reasons.

        `refusal` is what the user's filters said about it.
        """
        group, dropped = self._uncut(group)
        reason = refusal if group.trajectories else DropReason.INCOMPLETE
        if reason is None and "no_signal" in self.section.drop and self.learner.advantage != "gae":
            answers, by_turn = group.trajectories, self.learner.credit != "episode"
            parts = [(*(turn.reward for turn in t.turns), *sorted(t.reward_parts.items())) for t in answers]
            if len({(t.reward, *(own if by_turn else ())) for t, own in zip(answers, parts, strict=True)}) == 1:
                reason = DropReason.NO_SIGNAL
        if reason is None:
            return group, dropped
        return None, dropped + [(t, reason) for t in group.trajectories]

    def _uncut(self, group: Group) -> tuple[Group, Dropped]:
        """The group without the answers that are dropped because they were cut, and those."""
        if "overlong" not in self.section.drop:
            return group, []
        kept = tuple(t for t in group.trajectories if not t.finish.cut)
        return replace(group, trajectories=kept), [(t, DropReason.OVERLONG) for t in group.trajectories if t.finish.cut]


@dataclass(eq=False)
class Buffer:
    """Groups on their way from generation to training.

    A group is *in flight* from `start` to `put` (or `lose`), then *buffered* until `next`. For
    every drop `on_drop(trajectories with reasons, their group, was_buffered)` is called.
    """

    policy: LagPolicy
    sieve: Sieve
    patience: int
    on_buffered: Callable[[Group], None]
    on_drop: OnDrop
    version: int = 0
    wave: int = 0  # a new one begins when a group is started while none is in flight
    in_flight: dict[int, int | None] = field(default_factory=dict)  # serial -> its first token's version
    buffered: list[Group] = field(default_factory=list)  # sorted by `policy.order`
    _attempts: dict[int, int] = field(default_factory=dict)  # serial -> attempt, in flight
    _held: bool = False
    _committed: int = 0  # groups admitted and not dropped
    _taken: int = 0  # groups of the current step
    _wave_left: int = 0
    _begun: Recent = (0, 0)  # groups started
    _kept: Recent = (0, 0)  # those of them that were buffered
    _window: int = 0  # groups that may be in flight or buffered
    _idle: int | None = None  # fewest buffered groups since the step began
    _barren: Counter[str] = field(default_factory=Counter)  # drop reasons since the last good group
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self._window = self.policy.least_window

    def restore(
        self, *, version: int, wave: int, buffered: list[Group], num_again: int, begun: Recent, kept: Recent
    ) -> None:
        """Continue a run that ended too soon. Then `num_again` groups are started again; `begun` is without them."""
        self.version, self.wave, self.buffered = version, wave, sorted(buffered, key=self.policy.order)
        self._committed = version * self.policy.groups_per_step + len(buffered)
        self._begun, self._kept = begun, kept
        self._wave_left = num_again

    async def admit(self) -> int:
        """Wait until groups may be started; returns how many."""
        async with self._changed:
            while True:
                capacity = self.policy.capacity(version=self.version, committed=self._committed)
                if not self.in_flight:
                    self._wave_left = self.policy.wave(capacity, begun=sum(self._begun), kept=sum(self._kept))
                free = self._window - len(self.in_flight) - len(self.buffered)
                room = self.policy.admit(capacity, wave_left=self._wave_left, free=free)
                if room > 0 and not self._held:
                    return room
                await self._changed.wait()

    def start(self, serial: int, attempt: int = 1) -> int:
        """A group is admitted. Returns the version it is admitted under."""
        self.wave += not self.in_flight
        self.in_flight[serial], self._attempts[serial] = None, attempt
        self._committed += 1
        self._wave_left -= 1
        self._begun = (self._begun[0], self._begun[1] + 1)
        return self.version

    def begin(self, serial: int, version: int) -> None:
        """`version` sampled the group's first token: its lag counts from here."""
        if serial in self.in_flight and self.in_flight[serial] is None:
            self.in_flight[serial] = version

    async def put(self, group: Group, refusal: str | None = None) -> bool:
        """Whether the scored group was buffered. Ignored if a restart has replaced its attempt.

        `refusal` is that of `Sieve.filtered`; a group stays in flight while filters are asked.
        """
        async with self._changed:
            if self._attempts.get(group.serial) != group.attempt:
                return False
            del self.in_flight[group.serial], self._attempts[group.serial]
            self._changed.notify_all()
            kept, dropped = self.sieve.sift(group, refusal)
            self.on_drop(dropped, group, False)
            if kept is not None and not self.policy.is_too_old(kept.lag(self.version)):
                self._barren.clear()
                self._kept = (self._kept[0], self._kept[1] + 1)
                insort(self.buffered, kept, key=self.policy.order)
                self.on_buffered(kept)
                return True
            self._committed -= 1
            if kept is None:
                self._barren[dropped[-1][1] if dropped else DropReason.INCOMPLETE] += 1
            else:
                self.on_drop([(t, DropReason.STALE) for t in kept.trajectories], kept, False)
            return False

    async def lose(self, serial: int, reason: str) -> None:
        """A group was dropped before it was complete. The caller has booked its trajectories."""
        async with self._changed:
            del self.in_flight[serial], self._attempts[serial]
            self._committed -= 1
            if reason not in (DropReason.STALE, DropReason.RUN_ENDED):  # not the task's fault
                self._barren[reason] += 1
            self._changed.notify_all()

    async def next(self) -> Group | None:
        """The next group to train on. Its lag is checked here, not only at admission.

        None if the step has all its groups.
        """
        waited = False
        async with self._changed:
            while True:
                for old in self.policy.evict(self.buffered, version=self.version):
                    self.buffered.remove(old)
                    self._committed -= 1
                    self.on_drop([(t, DropReason.STALE) for t in old.trajectories], old, True)
                    self._changed.notify_all()
                all_taken = self._taken >= self.policy.groups_per_step
                if all_taken and (self.policy.max_lag > 0 or not (self.in_flight or self.buffered)):
                    return None
                group = self.policy.select(self.buffered, self.in_flight)
                if group is not None:
                    self.buffered.remove(group)  # the first
                    self._taken += 1
                    left = len(self.buffered)
                    self._idle = left if self._idle is None else min(self._idle, left)
                    if waited:
                        self._window = self.policy.widened(self._window)
                    self._changed.notify_all()  # another group may be admitted
                    return group
                waited = True
                self._check_progress()
                await self._changed.wait()

    async def settle(self, version: int) -> list[int]:
        """`version` is published. Returns the serials of groups in flight that are too old now."""
        async with self._changed:
            self.version = version
            self._committed -= max(0, self._taken - self.policy.groups_per_step)  # more than needed
            self._taken = 0
            self._begun, self._kept = (self._begun[1], 0), (self._kept[1], 0)
            self._window, self._idle = self.policy.narrowed(self._window, idle=self._idle or 0), None
            self._changed.notify_all()
            return self.policy.abort(self.in_flight, version=version)

    def hold(self) -> None:
        """Admit nothing until `release`: an engine drains, or its new weights are on their way."""
        self._held = True

    async def release(self) -> None:
        async with self._changed:
            self._held = False
            self._changed.notify_all()

    def clear(self) -> list[Group]:
        """Take out all that waits, for good."""
        waiting, self.buffered = self.buffered, []
        return waiting

    def _check_progress(self) -> None:
        if self._barren.total() >= self.patience * self.policy.groups_per_step:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self._barren.most_common())
            why = f"the last {self._barren.total()} groups were all dropped ({reasons}). "
            if DropReason.NO_SIGNAL in self._barren:
                why += "no_signal means that all answers to a prompt got the same reward: the task is "
                why += "too hard or too easy, or the reward does not distinguish answers. "
            why += "buffer.patience sets how long to wait."
            if DropReason.FILTER_ERROR in self._barren:
                why += f"\nThe first error: {self.sieve.first_error}"
            raise StalledError(f"nothing to train on: {why}")

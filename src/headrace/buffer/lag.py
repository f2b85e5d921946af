"""The lag policy: every decision about how far generation may run ahead of training, in one object.

The buffer asks it, and nothing else in the system decides about staleness. It knows no clock and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from headrace.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class LagPolicy:
    """A trained token is never more than `max_lag` versions old, and less where the learner is busy all the same.

    Example:
        LagPolicy(max_lag=4, groups_per_step=16)
    """

    max_lag: int
    groups_per_step: int
    min_share: float = 1.0  # of a step's groups, with which it may be taken
    eager: bool = False  # admit all that max_lag allows when a version is there, whether the learner needs it or not

    @property
    def most_ahead(self) -> int:
        """Groups that can be on their way at once."""
        return (self.max_lag + 1) * self.groups_per_step

    @property
    def least_window(self) -> int:
        """What the window begins with and never falls below: a step's worth, for batches as large as on-policy ones."""
        return self.most_ahead if self.eager else self.groups_per_step

    def capacity(self, *, version: int, committed: int) -> int:
        """Groups that may be admitted now, when `committed` were admitted so far and not dropped.

        The learner at version v has trained v steps' worth. What is admitted beyond the next max_lag + 1 steps' worth
        would be too old when its turn comes.
        """
        return version * self.groups_per_step + self.most_ahead - committed

    def admit(self, *, version: int, committed: int, in_flight: int, buffered: int, wave_left: int, window: int) -> int:
        """Groups to start now: as many as `window` lets be in flight or buffered. On-policy training admits in waves.

        A group that is dropped gives its place back, and at max_lag = 0 the replacement waits until every running
        group is scored: then the engine's batches depend on the data alone, not on how fast rewards came in, and two
        runs with one seed agree to the last bit.
        """
        room = min(self.capacity(version=version, committed=committed), window - in_flight - buffered)
        if self.max_lag == 0 and in_flight:
            return min(room, wave_left)
        return room

    def widened(self, window: int) -> int:
        """The window after the learner had to wait for a group: more of them under way would have come sooner.

        By an eighth of a step's worth: one wait may be a long one, when groups come in bursts. If the learner waits for
        every group, the window is as wide as the lag allows within a few times the duration of a group.
        """
        return min(window + -(-self.groups_per_step // 8), self.most_ahead)

    def narrowed(self, window: int, *, idle: int) -> int:
        """The window after a step in which never fewer than `idle` groups lay in the buffer: they only grew old.

        An eighth of them at a time: in the next step the learner may need more, and waiting costs more than age.
        """
        return max(window - -(-idle // 8), self.least_window)

    def missing(self, *, ready: int, in_flight: int) -> int:
        """Groups that the next step does without, when `ready` of its groups are there or taken already.

        Only once nothing runs any more: while something does, it may still bring them.
        """
        enough = ready >= self.min_share * self.groups_per_step
        return max(0, self.groups_per_step - ready) if enough and not in_flight else 0

    @staticmethod
    def order(group: Group) -> tuple[int, int]:
        """By which buffered groups are sorted: the oldest first, and of one version by serial."""
        return group.oldest_version, group.serial

    def select(self, buffered: Sequence[Group], in_flight: Mapping[int, int | None]) -> Group | None:
        """The first of the groups, which are in `order`, or None to wait; `in_flight` as for `abort`.

        At max_lag = 0 all are of one version, and each waits for those before it: gradients accumulate in one order.
        """
        if not buffered:
            return None
        first = buffered[0]
        if self.max_lag == 0 and any(serial < first.serial for serial in in_flight):
            return None
        return first

    def evict(self, buffered: Sequence[Group], *, version: int) -> list[Group]:
        """Groups that are too old to train on at this version: the first of them, since they are in `order`."""
        return list(takewhile(lambda group: group.lag(version) > self.max_lag, buffered))

    def abort(self, in_flight: Mapping[int, int | None], *, version: int) -> list[int]:
        """Serials of unfinished groups that can no longer be trained on, however soon they finish.

        `in_flight` maps serials to the version of their first token; None while they wait for the engine, when they do
        not age.
        """
        return [
            serial
            for serial, begun_at in in_flight.items()
            if begun_at is not None and version - begun_at > self.max_lag
        ]

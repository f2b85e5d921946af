"""The lag policy: every decision about how far generation may run ahead of training, in one object.

Nothing else decides about staleness. The buffer and the simulator use the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from headrace.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class LagPolicy:
    """A trained token is at most `max_lag` versions old, and younger if that costs no time."""

    max_lag: int
    groups_per_step: int
    min_share: float = 1.0  # of groups_per_step that suffices for a step
    eager: bool = False  # always admit all that max_lag allows, whether the learner needs it or not

    @property
    def most_ahead(self) -> int:
        """Groups that can be in flight or buffered at once."""
        return (self.max_lag + 1) * self.groups_per_step

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

    def admit(self, *, version: int, committed: int, in_flight: int, buffered: int, wave_left: int, window: int) -> int:
        """Groups to start now, so that at most `window` are in flight or buffered.

        On-policy training (max_lag = 0) admits in waves: the replacement of a dropped group waits
        until every group in flight is scored. So the engine's batches depend on the data alone, not
        on how fast rewards arrive, and two runs with one seed are bit-identical.
        """
        room = min(self.capacity(version=version, committed=committed), window - in_flight - buffered)
        if self.max_lag == 0 and in_flight:
            return min(room, wave_left)
        return room

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

    def missing(self, *, ready: int, in_flight: int) -> int:
        """Groups that the next step does without, if `ready` of its groups are buffered or taken.

        None while groups are in flight: they may still come.
        """
        enough = ready >= self.min_share * self.groups_per_step
        return max(0, self.groups_per_step - ready) if enough and not in_flight else 0

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

    def evict(self, buffered: Sequence[Group], *, version: int) -> list[Group]:
        """The groups that are too old at `version`: the first of `buffered`."""
        return list(takewhile(lambda group: group.lag(version) > self.max_lag, buffered))

    def abort(self, in_flight: Mapping[int, int | None], *, version: int) -> list[int]:
        """Serials of groups in flight that are too old already, however soon they finish.

        `in_flight` maps serials to the version of their first token, None before it is sampled.
        """
        begun = ((serial, first) for serial, first in in_flight.items() if first is not None)
        return [serial for serial, first in begun if version - first > self.max_lag]

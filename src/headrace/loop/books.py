"""What becomes of trajectories, booked: trained on, or dropped for a reason at some lag."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.ledger.ledger import Ledger
from headrace.types import Drop, DropReason, Group, Trajectory


class Bookkeeper:
    """Books against the policy's present `version`, which the loop advances."""

    def __init__(self, ledger: Ledger) -> None:
        self.version = 0
        self._ledger = ledger

    def trained(self, groups: Sequence[Group], *, step: int, skipped: bool) -> None:
        """The groups of a step; all are dropped if it was skipped. The step led to the present version."""
        trained_on = self.version - 1
        for group in groups:
            if skipped:
                drops = [(t, str(DropReason.SKIPPED_STEP)) for t in group.trajectories]
                self._ledger.dropped(_drops(drops, trained_on), source="buffered")
            else:
                self._ledger.trained(group, step=step, lag_of=lambda t: trained_on - t.oldest_version)

    def drop_group(self, dropped: Sequence[tuple[Trajectory, str]], group: Group, was_buffered: bool) -> None:
        """Trajectories of a group that the buffer let go."""
        if was_buffered:
            self.drop_buffered(dropped)
        else:
            self.drop_in_flight(dropped, of=(group.serial, group.attempt))

    def drop_buffered(self, dropped: Sequence[tuple[Trajectory, str]]) -> None:
        """Trajectories that waited for the learner."""
        if dropped:
            self._ledger.dropped(_drops(dropped, self.version), source="buffered")

    def drop_in_flight(self, dropped: Sequence[tuple[Trajectory, str]], *, of: tuple[int, int]) -> None:
        """Trajectories that never reached the buffer, `of` a group's serial and attempt."""
        if dropped:
            trajectories = [t for t, _ in dropped]
            self._ledger.dropped(_drops(dropped, self.version), source="in_flight", trajectories=trajectories, of=of)


def _drops(dropped: Sequence[tuple[Trajectory, str]], version: int) -> list[Drop]:
    return [
        Drop(
            trajectory_id=t.id,
            prompt_id=t.prompt_id,
            reason=str(reason),
            num_tokens=t.num_sampled_tokens,
            lag=version - t.oldest_version if t.spans else 0,
            reward=t.reward,
        )
        for t, reason in dropped
    ]

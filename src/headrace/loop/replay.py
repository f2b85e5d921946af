"""Replay: groups that were trained on are trained on again in later steps (`buffer.replay`).

The ledger names the groups of every step, and keeps their tokens. So this needs no memory for
them, and a restart chooses the same ones.
"""

import math
from collections import Counter
from collections.abc import Sequence

from headrace.config import Config
from headrace.ledger.recovery import Recovery
from headrace.loop.stages import Stages
from headrace.types import Group

Named = tuple[int, int]  # a group: its serial and attempt
# NULL if the tokens are gone: `recovery.journal_steps` may have been smaller before a restart.
WORTH = "SELECT MAX(reward) - AVG(reward) FROM trajectories JOIN journal ON trajectory_id = id"
TRAINED = "WHERE serial = ? AND attempt = ? AND state = 'trained'"


class PastGroups:
    """Chooses groups: half of them the newest, the others those whose best answer was the furthest above their mean."""

    def __init__(self, config: Config, stages: Stages) -> None:
        self._stages, (self._most, self._limit) = stages, config.buffer.replay
        self._window = config.recovery.journal_steps or math.inf  # older ones may have lost their tokens
        self._known: dict[Named, tuple[int, float]] = {}  # the step that trained on it first, and its worth
        self._times: Counter[Named] = Counter()

    def choose(self, step: int) -> list[Group]:
        """What `step` trains on besides its own groups."""
        known = {named: past for named, past in self._known.items() if past[0] > step - self._window}
        self._known = {named: past for named, past in known.items() if self._times[named] < self._limit}
        self._times = Counter({named: self._times[named] for named in self._known})
        newest, half = sorted(self._known, reverse=True), (self._most + 1) // 2
        others = sorted(newest[half:], key=lambda named: -self._known[named][1])
        return [group_of(self._stages, *named) for named in sorted(newest[:half] + others[: self._most // 2])]

    def trained(self, step: int, groups: Sequence[Named], *, skipped: bool) -> None:
        """`step` has trained on these groups, unless it was `skipped`."""
        for named in groups if self._most and not skipped else ():
            ((worth,),) = self._stages.ledger.read(f"{WORTH} {TRAINED}", named)
            if named not in self._times and worth is not None:
                self._known[named] = step, worth
        self._times.update(groups)


def group_of(stages: Stages, serial: int, attempt: int) -> Group:
    """A group that reached the buffer, from the ledger."""
    trajectories = tuple(Recovery(stages.ledger).trajectories(serial, attempt))
    prompt, version = stages.prompts.at(serial), min(t.oldest_version for t in trajectories)
    return Group(serial=serial, prompt=prompt, version=version, trajectories=trajectories, attempt=attempt)

"""A rollout worker and a learner rank in one process, which take turns on its device.

The optimizer step has the memory to itself: the engine's cache is released before it, and made again when there is
something to decode. What was being sampled then is computed again, and goes on.
"""

from __future__ import annotations

from typing import Any

from headrace.place.device import DeviceThread
from headrace.place.learner_rank import LearnerRank, RankSpec
from headrace.place.rollout_worker import RolloutSpec, RolloutWorker
from headrace.types import StepStats


class ColocatedWorker:
    """Answers what is asked of either."""

    def __init__(self, spec: RankSpec) -> None:
        self._device = DeviceThread()
        self._rank = LearnerRank(spec, self._device)
        self._rollout: RolloutWorker | None = None

    def begin_rollout(self, spec: RolloutSpec) -> None:
        """The engine, beside what the rank will hold."""
        self._rollout = RolloutWorker(spec, self._device, self._rank.still_wanted_bytes)

    async def finish(self) -> StepStats:
        """The optimizer step."""
        if self._rollout is not None:
            await self._device.run(self._rollout.release_cache)
        return await self._rank.finish()

    def __getattr__(self, method: str) -> Any:
        of_rollout = hasattr(RolloutWorker, method)
        return getattr(self._rollout if of_rollout else self._rank, method)

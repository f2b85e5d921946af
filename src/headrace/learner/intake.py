"""Groups in, micro-batches out. It knows nothing of weights, so it need not be where the learner is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.config import LearnerSection
from headrace.learner.advantages import advantages, needs_whole_step
from headrace.learner.batch import Packer, balanced
from headrace.learner.kl import kl
from headrace.types import FloatArray, Group, Item, Trajectory


class Intake:
    """The groups of the step under way, until their micro-batches are full: of a size that feeds all ranks."""

    def __init__(self, section: LearnerSection, num_ranks: int = 1) -> None:
        self._section = section
        self._packer = Packer(section.micro_batch_tokens * num_ranks)
        self._pending: list[tuple[Group, list[FloatArray | None]]] = []

    def add(self, group: Group, references: Sequence[FloatArray] | None = None) -> list[list[Item]]:
        """Take a group into the step; returns micro-batches that are now full."""
        known: list[FloatArray | None] = list(references) if references else [None] * len(group.trajectories)
        self._pending.append((group, known))
        if needs_whole_step(self._section.advantage):
            return []
        return self._packer.add(self._items())

    def rest(self) -> list[list[Item]]:
        """The step has all its groups: the remaining micro-batches."""
        if needs_whole_step(self._section.advantage):
            return balanced(self._items(), self._packer.budget)
        return self._packer.rest()

    def _items(self) -> list[Item]:
        """The groups taken in so far, with their advantages."""
        pending, self._pending = self._pending, []
        rewards = [self._rewards(group, references) for group, references in pending]
        found = advantages(self._section.advantage, rewards)
        return [
            Item(trajectory=trajectory, advantage=float(advantage), reference=reference)
            for (group, references), values in zip(pending, found, strict=True)
            for trajectory, advantage, reference in zip(group.trajectories, values, references, strict=True)
        ]

    def _rewards(self, group: Group, references: Sequence[FloatArray | None]) -> np.ndarray:
        """The group's rewards, less the divergence from the reference when it counts as reward."""
        rewards = np.array([t.reward for t in group.trajectories], np.float64)
        if not self._section.kl_coef or self._section.kl_in == "loss":
            return rewards
        costs = [self._divergence(t, r) for t, r in zip(group.trajectories, references, strict=True)]
        return rewards - self._section.kl_coef * np.array(costs)

    def _divergence(self, trajectory: Trajectory, reference: FloatArray | None) -> float:
        assert reference is not None
        behaviour = torch.from_numpy(trajectory.logprobs[trajectory.sampled])
        return float(kl(self._section.kl_estimator, behaviour, torch.from_numpy(reference)).sum())

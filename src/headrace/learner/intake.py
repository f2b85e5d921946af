"""Groups in, micro-batches of items with their advantages out.

Nothing here needs the weights, so it can run in another process than the learner.

Standard deviations are sample ones (n - 1), as in TRL and verl; DeepSeekMath writes only "std". A
group without signal (one member, or equal rewards) gets exact zeros from every kind of advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, assert_never

import numpy as np
import numpy.typing as npt
import torch

from headrace.config import LearnerSection
from headrace.learner.batch import Packer, balanced
from headrace.learner.objective import kl
from headrace.types import FloatArray, Group, Item, Trajectory

AdvantageKind = Literal["grpo", "dr-grpo", "rloo", "reinforce++"]
Rewards = npt.NDArray[np.floating[Any]]
Advantages = npt.NDArray[np.float64]

STD_FLOOR = 1e-6


class Intake:
    """The groups of the current step, until their micro-batches (of all `num_ranks`) are full."""

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
        pending, self._pending = self._pending, []
        rewards = [self._rewards(group, references) for group, references in pending]
        found = advantages(self._section.advantage, rewards)
        return [
            Item(trajectory=trajectory, advantage=float(advantage), reference=reference)
            for (group, references), values in zip(pending, found, strict=True)
            for trajectory, advantage, reference in zip(group.trajectories, values, references, strict=True)
        ]

    def _rewards(self, group: Group, references: Sequence[FloatArray | None]) -> np.ndarray:
        """The group's rewards, less the KL to the reference where that is a part of the reward."""
        rewards = np.array([t.reward for t in group.trajectories], np.float64)
        if not self._section.kl_coef or self._section.kl_in == "loss":
            return rewards
        costs = [self._divergence(t, r) for t, r in zip(group.trajectories, references, strict=True)]
        return rewards - self._section.kl_coef * np.array(costs)

    def _divergence(self, trajectory: Trajectory, reference: FloatArray | None) -> float:
        assert reference is not None
        behaviour = torch.from_numpy(trajectory.logprobs[trajectory.sampled])
        return float(kl(self._section.kl_estimator, behaviour, torch.from_numpy(reference)).sum())


def needs_whole_step(kind: AdvantageKind) -> bool:
    """Whether an advantage depends on the other groups of its step."""
    return kind == "reinforce++"


def advantages(kind: AdvantageKind, rewards_by_group: Sequence[Rewards]) -> list[Advantages]:
    """One advantage per reward. `rewards_by_group` are the groups of one step."""
    match kind:
        case "grpo":
            return [_centred(rewards) / (_std(rewards) + STD_FLOOR) for rewards in rewards_by_group]
        case "dr-grpo":
            return [_centred(rewards) for rewards in rewards_by_group]
        case "rloo":
            # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
            return [_centred(r) * (len(r) / max(len(r) - 1, 1)) for r in rewards_by_group]
        case "reinforce++":
            return _reinforce_plus_plus(rewards_by_group)
        case _:
            assert_never(kind)


def _reinforce_plus_plus(rewards_by_group: Sequence[Rewards]) -> list[Advantages]:
    """Subtract the group's mean, divide by the step's std. Groups of one: the step's mean."""
    if not rewards_by_group:
        return []
    ends = np.cumsum([len(rewards) for rewards in rewards_by_group])[:-1]
    if all(len(rewards) <= 1 for rewards in rewards_by_group):
        step = _centred(np.concatenate(rewards_by_group))
    else:
        # The step's mean is not subtracted again: centred groups sum to zero, and silent groups
        # stay exactly zero.
        step = np.concatenate([_centred(rewards) for rewards in rewards_by_group])
    return np.split(step / (_std(step) + STD_FLOOR), ends)


def _centred(rewards: Rewards) -> Advantages:
    values = np.asarray(rewards, np.float64)
    if len(values) == 0 or np.all(values == values[0]):
        return np.zeros_like(values)  # no rounding error, which a tiny std would blow up
    return values - float(values.mean())


def _std(rewards: Rewards) -> float:
    return float(np.std(rewards, ddof=1, dtype=np.float64)) if len(rewards) > 1 else 0.0

"""How the rewards of a step become one advantage per trajectory.

Standard deviations are sample ones (n - 1), as in TRL and verl; DeepSeekMath writes only "std". A group that says
nothing (one member, or equal rewards) gets exact zeros from every kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

AdvantageKind = Literal["grpo", "dr-grpo", "rloo", "reinforce++"]
Rewards = npt.NDArray[np.floating[Any]]
Advantages = npt.NDArray[np.float64]

STD_FLOOR = 1e-6


def needs_whole_step(kind: AdvantageKind) -> bool:
    """Whether an advantage depends on the other groups of its step, so that no group can be trained on alone."""
    return kind == "reinforce++"


def advantages(kind: AdvantageKind, rewards_by_group: Sequence[Rewards]) -> list[Advantages]:
    """One advantage per reward, in the same layout; the groups given are those of one step."""
    match kind:
        case "grpo":
            return [_centred(rewards) / (_std(rewards) + STD_FLOOR) for rewards in rewards_by_group]
        case "dr-grpo":
            return [_centred(rewards) for rewards in rewards_by_group]
        case "rloo":
            # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
            return [_centred(rewards) * (len(rewards) / max(len(rewards) - 1, 1)) for rewards in rewards_by_group]
        case "reinforce++":
            return _reinforce_plus_plus(rewards_by_group)
        case _:
            assert_never(kind)


def _reinforce_plus_plus(rewards_by_group: Sequence[Rewards]) -> list[Advantages]:
    """Subtract the group's mean, then divide by the step's std; groups of one are normalised over the step instead."""
    if not rewards_by_group:
        return []
    ends = np.cumsum([len(rewards) for rewards in rewards_by_group])[:-1]
    if all(len(rewards) <= 1 for rewards in rewards_by_group):
        step = _centred(np.concatenate(rewards_by_group))
    else:
        # The step's mean is not subtracted again: centred groups sum to zero, and silent groups stay exactly zero.
        step = np.concatenate([_centred(rewards) for rewards in rewards_by_group])
    return np.split(step / (_std(step) + STD_FLOOR), ends)


def _centred(rewards: Rewards) -> Advantages:
    values = np.asarray(rewards, np.float64)
    if len(values) == 0 or np.all(values == values[0]):
        return np.zeros_like(values)  # r - mean(r) may leave a rounding error, which a tiny std would blow up
    return values - float(values.mean())


def _std(rewards: Rewards) -> float:
    return float(np.std(rewards, ddof=1, dtype=np.float64)) if len(rewards) > 1 else 0.0

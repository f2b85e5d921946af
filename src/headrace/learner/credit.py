"""Credit: what each turn of an episode gets of its rewards, as an advantage for its tokens.

    episode   every token has the advantage of the episode's reward
    turn      a turn has its return (its reward and, discounted, those after it), compared with the
              same turn of the group's other episodes
    state     GiGPO: the episode's advantage, and the return among turns that began in the same state

Statistics count episodes or turns, never tokens. What has no peer has an advantage of zero.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from headrace.config import LearnerSection
from headrace.learner.objective import advantages
from headrace.types import FloatArray, Group, Trajectory

Turn = tuple[int, int, int]  # of which group, trajectory, and which of its turns


def credits(
    section: LearnerSection, groups: Sequence[Group], rewards: Sequence[np.ndarray]
) -> list[list[float | FloatArray]]:
    """Per group and trajectory its advantage: one number, or one for each sampled token."""
    whole = advantages(section.advantage, rewards)
    if section.credit == "episode":
        return [[float(advantage) for advantage in values] for values in whole]
    peers: dict[tuple[int, Hashable], dict[Turn, float]] = defaultdict(dict)  # returns of turns that are compared
    for number, (group, own) in enumerate(zip(groups, rewards, strict=True)):
        for i, (t, reward) in enumerate(zip(group.trajectories, own, strict=True)):
            for k, value in _returns(t, float(reward), section.discount):
                key = k if section.credit == "turn" else t.turns[k].state
                peers[number, key][number, i, k] = value
    compared = advantages(section.advantage, [np.array([*values.values()]) for values in peers.values()])
    by_turn: dict[Turn, float] = {}
    for values, some in zip(peers.values(), compared, strict=True):
        by_turn |= zip(values, some.tolist() if len(values) > 1 else [0.0], strict=True)
    adds = whole if section.credit == "state" else [np.zeros(len(values)) for values in whole]
    return [
        [_spread(t, float(adds[number][i]), by_turn, number, i) for i, t in enumerate(group.trajectories)]
        for number, group in enumerate(groups)
    ]


def _returns(t: Trajectory, reward: float, discount: float) -> Iterator[tuple[int, float]]:
    """Turns, the last one first, and their returns."""
    given = np.array([turn.reward or 0.0 for turn in t.turns] or [0.0])
    given[-1] += reward - given.sum()  # what was given for the whole comes with the last turn
    value = 0.0
    for k in reversed(range(len(t.turns))):
        value = given[k] + discount * value
        yield k, value


def _spread(t: Trajectory, whole: float, by_turn: Mapping[Turn, float], number: int, i: int) -> FloatArray:
    """The advantage of each sampled token: that of its turn."""
    if not t.turns:
        return np.full(t.num_sampled_tokens, whole, np.float32)
    parts = [np.full(turn.end - turn.start, whole + by_turn[number, i, k]) for k, turn in enumerate(t.turns)]
    return np.concatenate(parts).astype(np.float32)

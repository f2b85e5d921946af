"""Credit: what each turn of an episode gets of its rewards, as an advantage for its tokens.

    episode   every token has the advantage of the episode's reward
    turn      a turn has its return (its reward and, discounted, those after it), compared with the
              same turn of the group's other episodes
    state     GiGPO: the episode's advantage, and the return among turns that began in the same state

Statistics count episodes or turns, never tokens. What has no peer has an advantage of zero.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from headrace.config import LearnerSection
from headrace.learner.objective import advantages
from headrace.types import FloatArray, Group, Trajectory

Values = dict[tuple[int, int], tuple[Hashable, float]]  # by trajectory and turn: what it is compared with, value


def credits(
    section: LearnerSection, groups: Sequence[Group], rewards: Sequence[np.ndarray]
) -> list[list[float | FloatArray]]:
    """Per group and trajectory its advantage: one number, or one for each sampled token."""
    whole = advantages(section.advantage, rewards)
    if section.credit == "episode":
        return [[float(advantage) for advantage in values] for values in whole]
    by_turn = [_values(section, group, own) for group, own in zip(groups, rewards, strict=True)]
    compared = _compared(section, by_turn)
    found: list[list[float | FloatArray]] = []
    for group, values, turns in zip(groups, whole, compared, strict=True):
        add = values if section.credit == "state" else np.zeros(len(values))
        found.append([_spread(t, float(add[i]), turns, i) for i, t in enumerate(group.trajectories)])
    return found


def _values(section: LearnerSection, group: Group, rewards: np.ndarray) -> Values:
    found: Values = {}
    for i, (t, reward) in enumerate(zip(group.trajectories, rewards, strict=True)):
        given = np.array([turn.reward or 0.0 for turn in t.turns] or [0.0])
        given[-1] += float(reward) - given.sum()  # what was given for the whole comes with the last turn
        value = 0.0
        for k in reversed(range(len(t.turns))):
            value = given[k] + section.discount * value
            found[i, k] = (k if section.credit == "turn" else t.turns[k].state), value
    return found


def _compared(section: LearnerSection, by_turn: Sequence[Values]) -> list[Mapping[tuple[int, int], float]]:
    """The advantage of each turn among those that it is compared with, in its group."""
    found: list[dict[tuple[int, int], float]] = [{} for _ in by_turn]
    peers: dict[tuple[int, Hashable], list[tuple[int, int]]] = defaultdict(list)
    for number, values in enumerate(by_turn):
        for turn, (key, _) in values.items():
            peers[number, key].append(turn)
    samples = [np.array([by_turn[number][turn][1] for turn in turns]) for (number, _), turns in peers.items()]
    for ((number, _), turns), some in zip(peers.items(), advantages(section.advantage, samples), strict=True):
        for turn, advantage in zip(turns, some, strict=True):
            found[number][turn] = float(advantage) if len(turns) > 1 else 0.0
    return list(found)


def _spread(t: Trajectory, whole: float, turns: Mapping[tuple[int, int], float], i: int) -> FloatArray:
    """The advantage of each sampled token: that of its turn."""
    if not t.turns:
        return np.full(t.num_sampled_tokens, whole, np.float32)
    parts = [np.full(turn.end - turn.start, whole + turns[i, k]) for k, turn in enumerate(t.turns)]
    return np.concatenate(parts).astype(np.float32)

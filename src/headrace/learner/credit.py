"""Credit: what each turn of an episode gets of its rewards, as an advantage for its tokens.

    episode   every token has the advantage of the episode's reward
    turn      a turn has its return (its reward and, discounted, those after it), compared with the
              same turn of the group's other episodes
    state     GiGPO: the episode's advantage, and the turn's return compared with that of turns of the
              group that began in the same state
    agent     a turn has what its agent earned in the episode, compared with the same agent's in others

Statistics count episodes (or turns), never tokens. What cannot be compared has an advantage of zero.
"""

from __future__ import annotations

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
        if section.credit == "agent":
            names = [turn.agent for turn in t.turns]
            shared = float(reward) - given.sum()  # what the episode earned as a whole
            own = {name: shared + sum(g for g, n in zip(given, names, strict=True) if n == name) for name in names}
            found |= {(i, k): (name, own[name]) for k, name in enumerate(names)}
            continue
        given[-1] += float(reward) - given.sum()  # what was given for the whole comes with the last turn
        value = 0.0
        for k in reversed(range(len(t.turns))):
            value = given[k] + section.discount * value
            found[i, k] = (k if section.credit == "turn" else t.turns[k].state), value
    return found


def _compared(section: LearnerSection, by_turn: Sequence[Values]) -> list[Mapping[tuple[int, int], float]]:
    """The advantage of each turn among those that it is compared with, in its group."""
    places: list[list[tuple[int, tuple[int, int]]]] = []
    samples: list[np.ndarray] = []
    for number, values in enumerate(by_turn):
        peers: dict[Hashable, dict[Hashable, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for (i, k), (key, _) in values.items():
            unit = i if section.credit == "agent" else (i, k)  # all turns of an agent are one sample
            peers[key][unit].append((i, k))
        for units in peers.values():
            samples.append(np.array([values[turns[0]][1] for turns in units.values()]))
            places.append([(number, turn) for turns in units.values() for turn in turns[:1]])
    found: list[dict[tuple[int, int], float]] = [{} for _ in by_turn]
    for where, some in zip(places, advantages(section.advantage, samples), strict=True):
        for (number, turn), advantage in zip(where, some, strict=True):
            found[number][turn] = float(advantage) if len(where) > 1 else 0.0
    if section.credit == "agent":
        for number, values in enumerate(by_turn):
            first = {(i, key): found[number][i, k] for (i, k), (key, _) in values.items() if (i, k) in found[number]}
            found[number] = {(i, k): first[i, key] for (i, k), (key, _) in values.items()}
    return list(found)


def _spread(t: Trajectory, whole: float, turns: Mapping[tuple[int, int], float], i: int) -> FloatArray:
    """The advantage of each sampled token: that of its turn."""
    if not t.turns:
        return np.full(t.num_sampled_tokens, whole, np.float32)
    parts = [np.full(turn.end - turn.start, whole + turns[i, k]) for k, turn in enumerate(t.turns)]
    return np.concatenate(parts).astype(np.float32)

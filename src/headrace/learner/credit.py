"""Credit: what each turn of an episode gets of its rewards, as an advantage for its tokens.

    episode   every token has the advantage of the episode's reward
    turn      a turn has its return (its reward and, discounted, those after it), compared with the
              same turn of the group's other episodes
    state     GiGPO: the episode's advantage, and the return among turns that began in the same state
    agent     all turns of an agent have what it earned: the part of the reward with its name, or
              the whole, compared with the same agent's in other episodes

Statistics count episodes or turns, never tokens. What has no peer has an advantage of zero.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headrace.config import LearnerSection
from headrace.learner.objective import advantages
from headrace.types import FloatArray, Group, Trajectory

Key = int | str  # a turn by its number, an agent by its name, or a state
Earner = tuple[int, int, Key]  # which group, trajectory, and which of its turns or agents


def credits(
    section: LearnerSection, groups: Sequence[Group], rewards: Sequence[np.ndarray]
) -> list[list[float | FloatArray]]:
    """Per group and trajectory its advantage: one number, or one for each sampled token."""
    whole = advantages(section.advantage, rewards)
    if section.credit == "episode":
        return [[float(advantage) for advantage in values] for values in whole]
    peers: dict[tuple[int, Key], dict[Earner, float]] = defaultdict(dict)  # what is compared
    for number, (group, own) in enumerate(zip(groups, rewards, strict=True)):
        for i, (t, reward) in enumerate(zip(group.trajectories, own, strict=True)):
            for who, key, value in _earnings(section, t, float(reward)):
                peers[number, key][number, i, who] = value
    compared = advantages(section.advantage, [np.array([*values.values()]) for values in peers.values()])
    earned: dict[tuple[int, int], dict[Key, float]] = defaultdict(dict)
    for values, some in zip(peers.values(), compared, strict=True):
        for (number, i, who), value in zip(values, some.tolist(), strict=True):
            earned[number, i][who] = value if len(values) > 1 else 0.0
    adds = whole if section.credit == "state" else [np.zeros(len(values)) for values in whole]
    return [
        [_spread(section, t, adds[number][i], earned[number, i]) for i, t in enumerate(group.trajectories)]
        for number, group in enumerate(groups)
    ]


def token_rewards(t: Trajectory) -> FloatArray:
    """Of each sampled token: a turn's reward comes with its last, the rest with the very last."""
    given = np.zeros(t.num_sampled_tokens, np.float32)
    for turn, end in zip(t.turns, np.cumsum([x.end - x.start for x in t.turns]), strict=True):
        given[max(end, 1) - 1] += turn.reward or 0.0
    given[-1:] += (t.reward or 0.0) - given.sum()
    return given


def _earnings(section: LearnerSection, t: Trajectory, reward: float) -> Iterator[tuple[Key, Key, float]]:
    """Each agent, or each turn from the last on; what its peers share with it; what it earned."""
    if section.credit == "agent":
        for name in dict.fromkeys(turn.agent for turn in t.turns):
            yield name, name, t.reward_parts.get(name, reward)
        return
    given = np.array([turn.reward or 0.0 for turn in t.turns] or [0.0])
    given[-1] += reward - given.sum()  # what was given for the whole comes with the last turn
    value = 0.0
    for k in reversed(range(len(t.turns))):
        value = given[k] + section.discount * value
        yield k, k if section.credit == "turn" else t.turns[k].state, value


def _spread(section: LearnerSection, t: Trajectory, whole: float, earned: Mapping[Key, float]) -> FloatArray:
    """The advantage of each sampled token: that of its turn."""
    if not t.turns:
        return np.full(t.num_sampled_tokens, whole, np.float32)
    own = [earned[turn.agent if section.credit == "agent" else k] for k, turn in enumerate(t.turns)]
    return np.repeat(whole + np.array(own), [x.end - x.start for x in t.turns]).astype(np.float32)

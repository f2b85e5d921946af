"""What each turn of an episode is credited with, worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hand_made import group_of, trajectory

from headrace.buffer.buffer import Sieve
from headrace.config import BufferSection, LearnerSection
from headrace.learner.credit import credits
from headrace.types import FinishReason, Group, Trajectory, Turn


def episode(index: int, turns: list[dict[str, Any]], reward: float, **parts: float) -> Trajectory:
    """Turns of one token each."""
    made = trajectory(index=index, answer=range(7, 7 + len(turns)), reward=reward)
    found = [
        Turn(start=2 + i, end=3 + i, finish=FinishReason.EOS, **{"state": "", **turn}) for i, turn in enumerate(turns)
    ]
    return replace(made, turns=tuple(found), reward_parts=parts)


def credited(group: Group, credit: Any, discount: float = 1.0) -> list[list[float]]:
    section = LearnerSection(advantage="dr-grpo", credit=credit, discount=discount)
    rewards = np.array([t.reward for t in group.trajectories])
    (found,) = credits(section, [group], [rewards])
    return [np.broadcast_to(values, 1).tolist() if np.isscalar(values) else values.tolist() for values in found]


def test_a_turn_has_its_return_compared_with_the_same_turn():
    group = group_of(
        episode(0, [{"reward": 1.0}, {"reward": 0.0}], 3.0),  # returns: 1 + 0.5 * 2, 2
        episode(1, [{"reward": 0.0}, {}], 0.0),
    )
    assert credited(group, "turn", 0.5) == [[1.0, 1.0], [-1.0, -1.0]]


def test_turns_that_began_in_one_state_are_compared_and_the_episode_counts_too():
    group = group_of(
        episode(0, [{"state": "a"}, {"state": "b"}], 1.0),
        episode(1, [{"state": "a"}, {"state": "c"}], 0.0),
    )
    assert credited(group, "state") == [[1.0, 0.5], [-1.0, -0.5]]


def test_an_agent_has_the_part_with_its_name_whatever_its_turns():
    """Two players: one wins what the other loses, so the sum is always the same."""
    black, white = {"agent": "black"}, {"agent": "white"}
    group = group_of(
        episode(0, [black, white, black], 1.0, black=1.0, white=0.0),
        episode(1, [black, white], 1.0, black=0.0, white=1.0),
        episode(2, [black, white], 1.0, black=0.0, white=1.0),
        episode(3, [black, white, black, white], 1.0, black=0.0, white=1.0),
    )
    assert credited(group, "agent") == [
        [0.75, -0.75, 0.75],
        [-0.25, 0.25],
        [-0.25, 0.25],
        [-0.25, 0.25, -0.25, 0.25],
    ]
    kept, dropped = Sieve(BufferSection(), learner=LearnerSection(credit="turn")).sift(group)
    assert kept is not None
    assert not dropped
    assert Sieve(BufferSection()).sift(group)[0] is None, "without credit of its own, nobody's reward differs"


def test_an_agent_without_a_part_of_its_own_has_the_whole_reward():
    names = [{"agent": "planner"}, {"agent": "coder"}]
    group = group_of(episode(0, names, 1.0, coder=0.5), episode(1, names, 0.0, coder=0.0))
    assert credited(group, "agent") == [[0.5, 0.25], [-0.5, -0.25]]


@pytest.mark.parametrize("credit", ["turn", "state", "agent"])
def test_what_has_no_peer_has_no_advantage_of_its_own(credit: str):
    group = group_of(
        episode(0, [{"agent": "a", "state": "x"}] * 2, 1.0), episode(1, [{"agent": "b", "state": "y"}], 0.0)
    )
    found = credited(group, credit)
    assert found[0][-1] == {"turn": 0.0, "state": 0.5, "agent": 0.0}[credit]

import math

import numpy as np
import pytest

from headrace.config import BUILT_IN
from headrace.learner.objective import advantages

KINDS = [kind for kind in BUILT_IN["learner.advantage"] if kind != "gae"]


def groups(*rewards: list[float]) -> list[np.ndarray]:
    return [np.array(group, np.float32) for group in rewards]


def test_grpo_divides_by_the_sample_std() -> None:
    # mean 0.25, squares 0.5625 + 3 * 0.0625 = 0.75, sample variance 0.75 / 3 = 0.25, std 0.5
    (result,) = advantages("grpo", groups([1, 0, 0, 0]))
    np.testing.assert_allclose(result, np.array([0.75, -0.25, -0.25, -0.25]) / 0.500001, rtol=1e-14)


def test_dr_grpo_only_centres() -> None:
    first, second = advantages("dr-grpo", groups([1, 0, 0, 0], [4, 2]))
    assert first.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert second.tolist() == [1.0, -1.0]


def test_rloo_leaves_the_member_out_of_its_baseline() -> None:
    # baselines: (2 + 6) / 2 = 4, (1 + 6) / 2 = 3.5, (1 + 2) / 2 = 1.5
    (result,) = advantages("rloo", groups([1, 2, 6]))
    np.testing.assert_allclose(result, [-3.0, -1.5, 4.5], rtol=1e-14)


def test_rloo_equals_its_definition_on_random_rewards() -> None:
    rewards = np.random.default_rng(0).normal(size=7)
    (result,) = advantages("rloo", [rewards])
    np.testing.assert_allclose(result, [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)], rtol=1e-12)


def test_reinforce_plus_plus_scales_all_groups_of_the_step_alike() -> None:
    # centred: [1, -1] and [0.5, -0.5]; squares 2 + 0.5 = 2.5, sample variance 2.5 / 3
    first, second = advantages("reinforce++", groups([4, 2], [1, 0]))
    scale = math.sqrt(2.5 / 3) + 1e-6
    np.testing.assert_allclose(first, [1 / scale, -1 / scale], rtol=1e-14)
    np.testing.assert_allclose(second, [0.5 / scale, -0.5 / scale], rtol=1e-14)


def test_reinforce_plus_plus_with_one_sample_per_prompt_is_normalised_over_the_step() -> None:
    # rewards 0, 1, 2: mean 1, sample std 1
    result = advantages("reinforce++", groups([0], [1], [2]))
    assert [len(group) for group in result] == [1, 1, 1]
    np.testing.assert_allclose(np.concatenate(result), np.array([-1, 0, 1]) / 1.000001, rtol=1e-14)


def test_reinforce_plus_plus_has_no_baseline_for_a_lone_member_among_larger_groups() -> None:
    lone, pair = advantages("reinforce++", groups([9], [1, 0]))
    # centred: 0, 0.5, -0.5; sample variance 0.5 / 2, std 0.5
    assert lone.tolist() == [0.0]
    np.testing.assert_allclose(pair, np.array([0.5, -0.5]) / 0.500001, rtol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_signal_get_exact_zeros(kind: str) -> None:
    # 0.1 is not a binary fraction: 0.1 - mean([0.1] * 3) is not zero in float64
    result = advantages(kind, [np.array([0.1] * 3), np.array([5.0]), np.array([]), np.array([1.0, 0.0])])
    assert result[0].tolist() == [0.0, 0.0, 0.0]
    assert result[1].tolist() == [0.0]
    assert result[2].tolist() == []
    assert result[3][0] > 0 > result[3][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_any_signal_gets_zeros(kind: str) -> None:
    assert np.concatenate(advantages(kind, groups([0.1, 0.1], [0.1], [0.1]))).tolist() == [0.0] * 4
    assert np.concatenate(advantages(kind, groups([0.1], [0.1]))).tolist() == [0.0] * 2
    assert advantages(kind, []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_matter_to_reinforce_plus_plus_alone(kind: str) -> None:
    alone = advantages(kind, groups([1, 0, 0]))[0]
    among_others = advantages(kind, groups([1, 0, 0], [100, -100]))[0]
    assert (kind == "reinforce++") == (not np.array_equal(alone, among_others))

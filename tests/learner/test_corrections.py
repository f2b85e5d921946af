import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import LearnerSection
from headrace.learner.objective import CARRIES_WEIGHT, LOSSES, LossInput, corrected, correction_weight

INF = math.inf


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(values: list[float]) -> Tensor:
    return f64(values).log()


# proximal / behaviour = 3, 0.25, 1 and, at the limits of the masked form, 2 and 0.5
PROXIMAL, BEHAVIOUR = logs([0.3, 0.1, 0.5, 0.5, 0.25]), logs([0.1, 0.4, 0.5, 0.25, 0.5])


@pytest.mark.parametrize(
    ("kind", "expected", "kept"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0, 1.0], [True] * 5),
        ("truncated", [2.0, 0.25, 1.0, 2.0, 0.5], [True] * 5),
        ("masked", [0.0, 0.0, 1.0, 2.0, 0.5], [False, False, True, True, True]),
    ],
)
def test_weights(kind: str, expected: list[float], kept: list[bool]) -> None:
    # limits moved out by a rounding error, so that the ratios 2 and 0.5 lie inside
    weight, keep = correction_weight(kind, PROXIMAL, BEHAVIOUR, low=0.5 - 1e-12, high=2.0 + 1e-12)
    np.testing.assert_allclose(weight.detach(), f64(expected), rtol=1e-12, atol=1e-15)
    assert keep.tolist() == kept


def test_masked_limits() -> None:
    ratios = [0.4999, 0.5001, 1.9999, 2.0001]
    weight, kept = correction_weight("masked", logs(ratios), torch.zeros(4, dtype=torch.float64), low=0.5, high=2.0)
    np.testing.assert_allclose(weight.detach(), f64([0.0, 0.5001, 1.9999, 0.0]), rtol=1e-12, atol=1e-15)
    assert kept.tolist() == [False, True, True, False]


def test_a_carried_weight_is_cut_and_not_squared() -> None:
    # 3 is cut to 2, that is by 2 / 3; the rest stays as it is in the objective
    weight, kept = correction_weight("truncated", PROXIMAL, BEHAVIOUR, low=0.5, high=2.0 + 1e-12, carried=True)
    np.testing.assert_allclose(weight.detach(), f64([2 / 3, 1.0, 1.0, 1.0, 1.0]), rtol=1e-12, atol=1e-15)
    assert kept.all()
    weight, kept = correction_weight("masked", PROXIMAL, BEHAVIOUR, low=0.5 - 1e-12, high=2.0 + 1e-12, carried=True)
    assert weight.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert kept.tolist() == [False, False, True, True, True]


def test_decoupled_ppo_and_corrected_reinforce_agree_on_the_first_pass() -> None:
    # current = proximal: both gradients are -min(w, high) * A, however the weight came into the objective
    gradients = {}
    for name in ("decoupled-ppo", "reinforce"):
        current = PROXIMAL.clone().requires_grad_()
        terms = LOSSES[name](
            LossInput(
                current=current,
                proximal=PROXIMAL,
                behaviour=BEHAVIOUR,
                advantage=f64([1, -1, 2, 1, -2]),
                sequence_ids=torch.arange(5),
                clip_low=0.2,
                clip_high=0.2,
            )
        )
        weight, kept = correction_weight(
            "truncated", PROXIMAL, BEHAVIOUR, low=0.5, high=2.0, carried=name in CARRIES_WEIGHT
        )
        (gradients[name],) = torch.autograd.grad(corrected(terms.per_token, weight, kept).sum(), current)
    np.testing.assert_allclose(
        gradients["decoupled-ppo"].detach(), f64([-2.0, 0.25, -2.0, -2.0, 1.0]), rtol=1e-12, atol=1e-15
    )
    np.testing.assert_allclose(gradients["reinforce"].detach(), gradients["decoupled-ppo"], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", get_args(LearnerSection.model_fields["correction"].annotation))
@pytest.mark.parametrize("carried", [False, True])
def test_broken_log_probs_give_finite_constant_weights(kind: str, carried: bool) -> None:
    proximal = torch.tensor([-1.0, -1.0, -1e4, -INF, -INF], requires_grad=True)
    behaviour = torch.tensor([-INF, -1e4, -1.0, -1.0, -INF])
    weight, kept = correction_weight(kind, proximal, behaviour, low=0.5, high=2.0, carried=carried)
    assert torch.isfinite(weight).all()
    assert not weight.requires_grad
    # the last one is the same probability on both sides
    assert kept.tolist() == ([False] * 4 + [True] if kind == "masked" else [True] * 5)
    assert weight[4].item() == 1.0


def test_a_nan_is_not_masked_away() -> None:
    weight, kept = correction_weight("masked", f64([math.nan]), f64([-1.0]), low=0.5, high=2.0)
    assert kept.item()
    assert weight.isnan().item()


def test_a_dropped_token_cannot_poison_the_loss() -> None:
    per_token = f64([INF, 2.0]).requires_grad_()
    loss = corrected(per_token, f64([0.0, 1.5]), torch.tensor([False, True])).sum()
    loss.backward()
    assert loss.item() == 3.0
    assert per_token.grad.tolist() == [0.0, 1.5]

"""Losses against hand-worked numbers, a plain-Python reference with finite differences, and broken log-probs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import BUILT_IN
from headrace.learner.objective import LOSSES, LossInput, LossTerms, log_ratio, sequence_mean

LOW, HIGH = 0.2, 0.3
INF = math.inf


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(name: str, ratio: float, advantage: float) -> tuple[float, bool, float]:
    """Loss, clipped and gradient of one token whose current log-prob is -1 and whose ratio to the others is `ratio`."""
    current = f64([-1.0]).requires_grad_()
    old = f64([-1.0 - math.log(ratio)])
    terms = run(name, current, old, old, f64([advantage]), torch.tensor([0]))
    terms.per_token.sum().backward()
    return terms.per_token.item(), bool(terms.clipped.item()), current.grad.item()


def run(
    name: str,
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    ids: Tensor,
    *,
    clip_low: float = LOW,
    clip_high: float = HIGH,
) -> LossTerms:
    return LOSSES[name](
        LossInput(
            current=current,
            proximal=proximal,
            behaviour=behaviour,
            advantage=advantage,
            sequence_ids=ids,
            clip_low=clip_low,
            clip_high=clip_high,
        )
    )


def test_losses_are_those_of_the_settings() -> None:
    assert tuple(LOSSES) == BUILT_IN["learner.loss"]


# ratio, advantage -> loss, clipped, gradient. Inside, loss = -rA and its gradient -rA; the clip range is [0.8, 1.3].
SURROGATE = [
    (1.0, 2.0, -2.0, False, -2.0),
    (1.29, 2.0, -2.58, False, -2.58),
    (1.31, 2.0, -2.6, True, 0.0),  # min(2.62, 2.6)
    (1.31, -2.0, 2.62, False, 2.62),  # min(-2.62, -2.6): the worse one, with gradient
    (0.81, -2.0, 1.62, False, 1.62),
    (0.79, -2.0, 1.6, True, 0.0),  # min(-1.58, -1.6)
    (0.79, 2.0, -1.58, False, -1.58),  # min(1.58, 1.6)
    (0.5, 0.0, 0.0, False, 0.0),
    (5.0, 0.0, 0.0, False, 0.0),
]


@pytest.mark.parametrize("name", ["ppo", "decoupled-ppo", "gspo"])
@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "gradient"), SURROGATE)
def test_clip_boundaries(
    name: str, ratio: float, advantage: float, loss: float, clipped: bool, gradient: float
) -> None:
    # decoupled-ppo: proximal = behaviour here, so its weight is 1
    assert one_token(name, ratio, advantage) == (pytest.approx(loss), clipped, pytest.approx(gradient))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.0, 2.0, 1.0, False),
        (1.29, -2.0, 1.29, False),
        (1.31, 2.0, 1.3, True),
        (1.31, -2.0, 1.3, True),
        (0.81, 2.0, 0.81, False),
        (0.79, 2.0, 0.8, True),
        (0.79, -2.0, 0.8, True),
    ],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, clipped: bool
) -> None:
    # loss = -weight * A * current with current = -1; gradient = -weight * A
    expected = (pytest.approx(weight * advantage), clipped, pytest.approx(-weight * advantage))
    assert one_token("cispo", ratio, advantage) == expected


def test_reinforce_ignores_the_other_policies() -> None:
    assert one_token("reinforce", 3.0, 2.0) == (2.0, False, -2.0)


def test_a_ratio_of_exactly_one_has_the_whole_gradient_even_with_an_empty_clip_range() -> None:
    current = f64([-1.0]).requires_grad_()
    old = f64([-1.0])
    terms = run("ppo", current, old, old, f64([2.0]), torch.tensor([0]), clip_low=0.0, clip_high=0.0)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)
    assert (gradient.item(), terms.clipped.item()) == (-2.0, False)


def test_decoupled_ppo_clips_around_proximal_and_weighs_by_behaviour() -> None:
    # token 0: r = 1.1, w = 3, A = 1: -3.3, though current / behaviour = 3.3 is far outside the clip range
    # token 1: r = 1.5 is cut to 1.3, w = 0.5, A = 2: -1.3, no gradient
    current = f64([math.log(0.33), math.log(0.3)]).requires_grad_()
    proximal, behaviour = f64([math.log(0.3), math.log(0.2)]), f64([math.log(0.1), math.log(0.4)])
    terms = run("decoupled-ppo", current, proximal, behaviour, f64([1.0, 2.0]), torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)
    np.testing.assert_allclose(terms.per_token.detach(), f64([-3.3, -1.3]), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(gradient.detach(), f64([-3.3, 0.0]), rtol=1e-12, atol=1e-15)
    assert terms.clipped.tolist() == [False, True]


def test_decoupled_ppo_does_not_differentiate_proximal() -> None:
    # On the first pass over a batch the learner's proximal log-probs may be the current ones: the ratio is then 1.
    current = f64([-1.0]).requires_grad_()
    terms = run("decoupled-ppo", current, current, f64([-1.5]), f64([2.0]), torch.tensor([0]))
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)
    assert gradient.item() == pytest.approx(-2 * math.exp(0.5))


def test_gspo_uses_one_ratio_for_the_whole_sequence() -> None:
    # sequence 0: log-ratios 0.3, -0.1, so s = exp(0.1) = 1.105, inside the range
    # sequence 1: log-ratios 0.5, 0.3, 0.1, so s = exp(0.3) = 1.350, cut to 1.3
    behaviour = f64([-1.0, -2.0, -3.0, -1.0, -2.0])
    current = (behaviour + f64([0.3, -0.1, 0.5, 0.3, 0.1])).requires_grad_()
    advantage, ids = f64([2.0, 2.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1, 1])
    terms = run("gspo", current, behaviour, behaviour, advantage, ids)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)
    inside = -2 * math.exp(0.1)
    np.testing.assert_allclose(
        terms.per_token.detach(), f64([inside, inside, -1.3, -1.3, -1.3]), rtol=1e-12, atol=1e-15
    )
    np.testing.assert_allclose(gradient.detach(), f64([inside, inside, 0.0, 0.0, 0.0]), rtol=1e-12, atol=1e-15)
    assert terms.clipped.tolist() == [False, False, True, True, True]


def test_sequence_mean_copes_with_ids_that_have_no_tokens() -> None:
    # sequences 0, 1 and 3 sampled nothing
    result = sequence_mean(f64([1.0, 3.0, 7.0]), torch.tensor([2, 2, 4]))
    assert result.tolist() == [2.0, 2.0, 7.0]
    assert sequence_mean(f64([]), torch.tensor([], dtype=torch.int64)).tolist() == []


def surrogate(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


def reference_total(name: str, x: list[float], frozen: list[float], p: list[float], b: list[float], a: list[float],
                    ids: list[int]) -> float:  # fmt: skip
    """The objective written out; `x` is differentiated, `frozen` is the same point held constant."""
    if name == "ppo":
        return sum(surrogate(math.exp(x[i] - b[i]), a[i]) for i in range(len(x)))
    if name == "decoupled-ppo":
        return sum(math.exp(p[i] - b[i]) * surrogate(math.exp(x[i] - p[i]), a[i]) for i in range(len(x)))
    if name == "cispo":
        ratios = [min(max(math.exp(frozen[i] - b[i]), 1 - LOW), 1 + HIGH) for i in range(len(x))]
        return sum(-ratios[i] * a[i] * x[i] for i in range(len(x)))
    if name in ("reinforce", "tba"):
        return sum(-a[i] * x[i] for i in range(len(x)))
    total = 0.0  # gspo: a sequence's objective, times its length because the terms are summed and not averaged
    for sequence in set(ids):
        tokens = [i for i, owner in enumerate(ids) if owner == sequence]
        ratio = math.exp(sum(x[i] - b[i] for i in tokens) / len(tokens))
        total += len(tokens) * surrogate(ratio, a[tokens[0]])
    return total


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_reference(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3])
    behaviour, advantage = (
        -3 * torch.rand(10, generator=generator, dtype=torch.float64),
        f64([1.0, -1.0, -0.5, 2.0])[ids],
    )
    proximal = behaviour + 0.3 * torch.randn(10, generator=generator, dtype=torch.float64)
    current = (proximal + 0.3 * torch.randn(10, generator=generator, dtype=torch.float64)).requires_grad_()
    terms = run(name, current, proximal, behaviour, advantage, ids)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)

    point = current.tolist()
    rest = (proximal.tolist(), behaviour.tolist(), advantage.tolist(), ids.tolist())
    assert terms.per_token.sum().item() == pytest.approx(reference_total(name, point, point, *rest), rel=1e-12)
    step = 1e-6
    for i in range(10):
        above, below = list(point), list(point)
        above[i] += step
        below[i] -= step
        slope = (reference_total(name, above, point, *rest) - reference_total(name, below, point, *rest)) / (2 * step)
        assert gradient[i].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_broken_log_probs_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    cases = [
        (current, proximal, behaviour, advantage)
        for current, proximal, behaviour in [
            (-1e4, -1, -1),
            (-1, -1e4, -1),
            (-1, -1, -1e4),
            (-1, -1, -INF),
            (-1, -INF, -1),
            (-1, -INF, -INF),
            (-1e4, -1e4, -INF),
        ]
        for advantage in (1.0, 0.0, -1.0)
    ]
    current, proximal, behaviour, advantage = torch.tensor(cases, dtype=dtype).T
    current = current.clone().requires_grad_()
    for ids in (torch.arange(len(cases)), torch.zeros(len(cases), dtype=torch.int64)):
        terms = run(name, current, proximal, behaviour, advantage, ids)
        (gradient,) = torch.autograd.grad(terms.per_token.sum(), current)
        assert torch.isfinite(terms.per_token).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("numerator", "denominator", "value", "gradient"),
    [
        (-1.0, -1.5, 0.5, 1.0),
        (-1.0, -1.0, 0.0, 1.0),
        (-1.0, -INF, 20.0, 0.0),
        (-1e4, -1.0, -20.0, 0.0),
        (-INF, -INF, 0.0, 0.0),
        (-INF, -1.0, -20.0, 0.0),
    ],
)
def test_log_ratio_is_clamped(numerator: float, denominator: float, value: float, gradient: float) -> None:
    x = f64([numerator]).requires_grad_()
    result = log_ratio(x, f64([denominator]))
    result.sum().backward()
    assert (result.item(), x.grad.item()) == (value, gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_of_the_model_is_not_hidden(name: str) -> None:
    old = f64([-1.0, -1.0])
    terms = run(name, f64([math.nan, -1.0]), old, old, f64([1.0, 1.0]), torch.tensor([0, 1]))
    assert terms.per_token.isnan().tolist() == [True, False]

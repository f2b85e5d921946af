import math
from typing import get_args

import numpy as np
import pytest
import torch

from headrace.config import LearnerSection
from headrace.learner.objective import kl

KINDS = get_args(LearnerSection.model_fields["kl_estimator"].annotation)


# d = current - reference = ln 2, then -ln 2. k3 = exp(-d) - 1 + d; gradients 1, d and 1 - exp(-d).
LN2 = math.log(2)
BY_HAND = [
    ("k1", [LN2, -LN2], [1.0, 1.0]),
    ("k2", [LN2**2 / 2, LN2**2 / 2], [LN2, -LN2]),
    ("k3", [LN2 - 0.5, 1 - LN2], [0.5, -1.0]),
]


@pytest.mark.parametrize(("kind", "value", "gradient"), BY_HAND)
def test_by_hand(kind: str, value: list[float], gradient: list[float]) -> None:
    current = torch.tensor([0.5, 0.25], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.25, 0.5], dtype=torch.float64).log().requires_grad_()
    result = kl(kind, current, reference)
    result.sum().backward()
    np.testing.assert_allclose(result.detach(), torch.tensor(value, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(
        current.grad.detach(), torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-15
    )
    assert reference.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_equals_finite_differences(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    current = (-3 * torch.rand(8, generator=generator, dtype=torch.float64)).requires_grad_()
    reference = -3 * torch.rand(8, generator=generator, dtype=torch.float64)
    kl(kind, current, reference).sum().backward()
    # tokens do not touch each other, so all slopes come from one shift
    step = 1e-6
    slope = (kl(kind, current.detach() + step, reference) - kl(kind, current.detach() - step, reference)) / (2 * step)
    np.testing.assert_allclose(current.grad, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_divergence(kind: str) -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p * kl(kind, p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-12)


def test_expected_gradients_are_as_documented() -> None:
    # Over every token of a three-word vocabulary, weighted by its probability: k2 gives the gradient of the divergence
    # with respect to the logits, k1 gives none.
    logits = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    current = logits.log_softmax(0)
    probabilities = current.detach().exp()
    (exact,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits, retain_graph=True)
    for kind, expected in (("k1", torch.zeros_like(exact)), ("k2", exact)):
        (found,) = torch.autograd.grad((probabilities * kl(kind, current, reference)).sum(), logits, retain_graph=True)
        np.testing.assert_allclose(found.detach(), expected, atol=1e-14, rtol=1e-12)


def test_k3_keeps_its_digits_near_zero_in_float32() -> None:
    # exp(-d) - 1 + d = d²/2 - ...: 5e-9 at d = 1e-4, below the resolution of float32 next to 1
    current = torch.tensor([1e-4], dtype=torch.float32)
    assert kl("k3", current, torch.zeros(1)).item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_log_probs_give_finite_values_and_gradients(kind: str) -> None:
    current = torch.tensor([-1.0, -1.0, -1e4, -1.0], requires_grad=True)
    result = kl(kind, current, torch.tensor([-1e4, -math.inf, -1.0, -1.0]))
    result.sum().backward()
    assert torch.isfinite(result).all()
    assert torch.isfinite(current.grad).all()
    # clamped to d = 20, 20, -20 and an intact token
    values = {"k1": [20, 20, -20, 0], "k2": [200, 200, 200, 0], "k3": [19, 19, math.exp(20) - 21, 0]}[kind]
    np.testing.assert_allclose(result.detach(), torch.tensor(values, dtype=torch.float32), rtol=1e-6)

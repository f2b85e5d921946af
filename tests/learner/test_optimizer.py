from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.config import LearnerSection
from headrace.learner.optimizer import Optimizer


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def optimizer_for(*parameters: nn.Parameter, **settings: Any) -> Optimizer:
    return Optimizer(((str(i), p) for i, p in enumerate(parameters)), LearnerSection(**settings))


def gradient(of: nn.Parameter, *values: float) -> None:
    of.grad = torch.tensor(values, dtype=of.dtype)


def spied(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of the first parameter as AdamW gets to see them."""
    seen: list[Tensor] = []

    def spy(*_: Any) -> None:
        seen.append(optimizer.masters[0].grad.clone())  # type: ignore[union-attr]

    optimizer.adamw.register_step_pre_hook(spy)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_tiny_updates_add_up(dtype: torch.dtype):
    """Each update is far below what the weight's own precision can hold."""
    low, full = parameter(1.0, -3.0, dtype=dtype), parameter(1.0, -3.0)
    alone = parameter(1.0, -3.0, dtype=dtype)
    optimizers = [optimizer_for(low), optimizer_for(full)]
    naive = torch.optim.AdamW([alone], lr=1e-5, betas=(0.9, 0.99), weight_decay=0.0)
    for i in range(1000):
        for weight, optimizer in zip((low, full), optimizers, strict=True):
            gradient(weight, 1.0 + i % 3, -0.5)
            optimizer.step(lr=1e-5, scale=1.0, clip=0.0)
        gradient(alone, 1.0 + i % 3, -0.5)
        naive.step()
    torch.testing.assert_close(low.detach(), full.detach().to(dtype), rtol=0, atol=0)
    assert full[0].item() == pytest.approx(0.99, abs=1e-3)
    assert low.dtype == dtype
    assert low[0].item() < 1.0
    if dtype is torch.bfloat16:
        assert alone[0].item() == 1.0  # without masters nothing would ever have happened


def test_masters_are_for_low_precision_only():
    weights = parameter(1.0), parameter(1.0, dtype=torch.float64), parameter(1.0, dtype=torch.bfloat16)
    masters = optimizer_for(*weights).masters
    assert masters[0] is weights[0]
    assert masters[1] is weights[1]
    assert masters[2] is not weights[2]
    assert masters[2].dtype == torch.float32


def test_frozen_parameters_are_left_alone():
    free, frozen = parameter(1.0), parameter(1.0).requires_grad_(False)
    optimizer = optimizer_for(free, frozen)
    gradient(free, 1.0)
    optimizer.step(lr=0.1, scale=1.0, clip=0.0)
    assert (free.item(), frozen.item()) != (1.0, 1.0)
    assert frozen.item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scale", "clip", "norm", "seen"),
    [
        (1.0, 0.0, 5.0, [3.0, 4.0]),  # 0 is off
        (1.0, 5.0, 5.0, [3.0, 4.0]),
        (1.0, 2.5, 5.0, [1.5, 2.0]),
        (0.5, 0.0, 2.5, [1.5, 2.0]),
        (0.5, 1.25, 2.5, [0.75, 1.0]),  # the norm is that of the scaled gradient
        (0.5, 5.0, 2.5, [1.5, 2.0]),  # small gradients are not blown up
    ],
)
def test_scale_then_clip(dtype: torch.dtype, scale: float, clip: float, norm: float, seen: list[float]):
    weight = parameter(1.0, 1.0, dtype=dtype)
    optimizer = optimizer_for(weight)
    gradients = spied(optimizer)
    gradient(weight, 3.0, 4.0)
    assert optimizer.step(lr=0.1, scale=scale, clip=clip) == pytest.approx(norm)
    torch.testing.assert_close(gradients[0].float(), torch.tensor(seen))


def test_norm_is_over_all_parameters():
    one, other, without = parameter(0.0), parameter(0.0), parameter(0.0)
    optimizer = optimizer_for(one, other, without)
    gradient(one, 3.0)
    gradient(other, 4.0)
    assert optimizer.step(lr=0.1, scale=1.0, clip=0.0) == pytest.approx(5.0)
    assert without.item() == 0.0


def test_the_rate_given_is_the_rate_used():
    weight = parameter(0.0)
    optimizer = optimizer_for(weight, lr=123.0)
    places = [0.0]
    for lr in (0.1, 0.025, 0.0):
        gradient(weight, 1.0)
        optimizer.step(lr=lr, scale=1.0, clip=0.0)
        places.append(weight.item())
    assert places == pytest.approx([0.0, -0.1, -0.125, -0.125], abs=1e-6)


def test_settings_reach_adamw():
    weight, same = parameter(2.0, -1.0), parameter(2.0, -1.0)
    optimizer = optimizer_for(weight, betas=(0.5, 0.7), weight_decay=0.3)
    plain = torch.optim.AdamW([same], lr=0.1, betas=(0.5, 0.7), weight_decay=0.3)
    for i in range(3):
        gradient(weight, 1.0, i - 1.5)
        gradient(same, 1.0, i - 1.5)
        optimizer.step(lr=0.1, scale=1.0, clip=0.0)
        plain.step()
    torch.testing.assert_close(weight, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_that_is_not_finite_changes_nothing(dtype: torch.dtype, bad: float):
    weight = parameter(1.0, 2.0, dtype=dtype)
    optimizer = optimizer_for(weight, weight_decay=0.1)
    gradient(weight, 1.0, -1.0)
    optimizer.step(lr=0.1, scale=1.0, clip=1.0)
    state = optimizer.adamw.state[optimizer.masters[0]]
    before = [weight.clone(), optimizer.masters[0].clone(), *(value.clone() for value in state.values())]
    gradient(weight, bad, 1.0)
    norm = optimizer.step(lr=0.1, scale=1.0, clip=1.0)
    assert not torch.isfinite(torch.tensor(norm))
    after = [weight, optimizer.masters[0], *state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert weight.grad is None
    assert optimizer.masters[0].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_backward_passes_add_up(dtype: torch.dtype):
    """In the masters' precision: a bfloat16 sum would lose each 0.01 beside 8."""
    weight, idle = parameter(1.0, dtype=dtype), parameter(1.0, dtype=dtype)
    optimizer = optimizer_for(weight, idle)
    for factor in (8.0, *[0.0078125] * 64):
        optimizer.make_room()
        (weight * factor).sum().backward()
    assert optimizer.step(lr=0.1, scale=1.0, clip=0.0) == 8.5
    assert idle.item() == 1.0
    optimizer.make_room()
    (weight + idle).sum().backward()
    assert optimizer.step(lr=0.1, scale=1.0, clip=0.0) == pytest.approx(math.sqrt(2))
    assert idle.item() < 1.0

"""Norm, rotation and gate: the formula, and a backward that fits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headrace.policy.family import gated, rms_norm, rotate

T, H, D = 5, 3, 8


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def angles() -> tuple[Tensor, Tensor]:
    half = noise(T, 1, D // 2, seed=9)
    whole = torch.cat([half, half], dim=-1)
    return whole.cos(), whole.sin()


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "norm of tokens": (lambda x, w: rms_norm(x, w, 1e-3), (noise(T, D), noise(D, seed=1))),
    "norm of heads": (lambda x, w: rms_norm(x, w, 1e-3), (noise(T, H, D), noise(D, seed=1))),
    "rotation": (lambda x: rotate(x, *angles()), (noise(T, H, D),)),
    "gate": (gated, (noise(T, D), noise(T, D, seed=1))),
}


@pytest.mark.parametrize("name", CASES)
def test_backward_is_the_derivative(name: str):
    function, inputs = CASES[name]
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs])


@pytest.mark.parametrize("name", CASES)
def test_the_engine_computes_what_the_learner_does(name: str):
    function, inputs = CASES[name]
    trained = function(*(x.clone().requires_grad_() for x in inputs)).detach()
    with torch.inference_mode():
        torch.testing.assert_close(function(*(x.clone() for x in inputs)), trained, rtol=0, atol=1e-14)


def test_norm_by_hand():
    # mean of squares (9 + 16) / 2 = 12.5, and 12.5 + 3.5 = 4²
    x, weight = torch.tensor([[3.0, -4.0]]), torch.tensor([2.0, 10.0])
    assert rms_norm(x.requires_grad_(), weight, 3.5).tolist() == [[1.5, -10.0]]


def test_rotation_by_hand():
    # a quarter turn takes (first half, second half) to (-second, first)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert rotate(x, torch.zeros(1, 1, 4), torch.ones(1, 1, 4)).tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]


def test_the_same_as_transformers():
    x, cos_sin = noise(T, H, D).float(), [x.float() for x in angles()]
    theirs = LlamaRMSNorm(D, eps=1e-5)
    with torch.no_grad():
        theirs.weight.copy_(noise(D, seed=1))
    torch.testing.assert_close(rms_norm(x, theirs.weight, 1e-5), theirs(x), rtol=0, atol=1e-6)
    turned, _ = apply_rotary_pos_emb(x[None], x[None], *(a[None, :, 0] for a in cos_sin), unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, *cos_sin), turned[0], rtol=0, atol=1e-6)


def test_low_precision_stays_low():
    x, ones = noise(T, D).bfloat16().requires_grad_(), torch.ones(D, dtype=torch.bfloat16)
    assert rms_norm(x, ones, 1e-5).dtype == gated(x, x).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_in_half_precision_rounds_only_its_result(dtype: torch.dtype):
    x, weight = (5 * noise(40, 64)).to(dtype), noise(64, seed=1).to(dtype)
    expected = rms_norm(x.double(), weight.double(), 1e-6)
    for trained in (x.clone().requires_grad_(), x):
        with torch.set_grad_enabled(trained.requires_grad):
            torch.testing.assert_close(rms_norm(trained, weight, 1e-6), expected.to(dtype), rtol=2**-7, atol=0)
    found, given = x.clone().requires_grad_(), x.double().requires_grad_()
    rms_norm(found, weight, 1e-6).sum().backward()
    rms_norm(given, weight.double(), 1e-6).sum().backward()
    assert (found.grad - given.grad).norm() < 0.01 * given.grad.norm()

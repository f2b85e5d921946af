"""Joined matrices: one product, while the model keeps its own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.config import ModelSection
from headrace.policy.family import JoinedLinear
from headrace.policy.policy import Policy, load_policy
from headrace.policy.probe import packed_logits, random_ids


def linears(*sizes: int, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, size, bias=bias) for size in sizes]


def product(together: JoinedLinear, x: Tensor) -> Tensor:
    return F.linear(x, together.weight, together.bias)


def join(policy: Policy) -> None:
    """As on a GPU, where the first pass does it."""
    for layer in policy.body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        if not hasattr(mlp, "experts"):
            JoinedLinear([mlp.gate_proj, mlp.up_proj])


def logits(policy: Policy) -> Tensor:
    return packed_logits(policy, random_ids(policy, 2, 9)).detach()


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_the_parts(bias: bool):
    parts, same = linears(4, 2, 3, bias=bias), linears(4, 2, 3, bias=bias)
    together = JoinedLinear(parts)
    x, y = (torch.arange(30.0).view(5, 6).sin().requires_grad_() for _ in range(2))
    ours, theirs = product(together, x), torch.cat([part(y) for part in same], dim=1)
    torch.testing.assert_close(ours, theirs)
    for out in (ours, theirs):
        out.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for part, other in zip(parts, same, strict=True):
        for p, q in zip(part.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    with torch.no_grad():
        torch.testing.assert_close(product(together, x), theirs)


def test_a_frozen_part_gets_no_gradient():
    parts = linears(4, 2, bias=False)
    parts[0].weight.requires_grad_(False)
    product(JoinedLinear(parts), torch.ones(1, 6)).sum().backward()
    assert parts[0].weight.grad is None
    assert parts[1].weight.grad is not None


def test_updates_in_place_reach_the_joined_weight():
    parts = linears(4, 2, bias=True)
    together = JoinedLinear(parts)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=0.1)
    product(together, torch.ones(1, 6)).sum().backward()
    optimizer.step()
    parts[1].load_state_dict({"weight": torch.full((2, 6), 7.0), "bias": torch.zeros(2)})
    assert together.bias is not None
    assert torch.equal(together.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(together.bias, torch.cat([part.bias for part in parts]))


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2", "Qwen3Moe"])
def test_a_joined_model_is_saved_and_loaded_whole(
    make_policy: Callable[..., Policy], architecture: str, tmp_path: Path
):
    policy = make_policy(architecture, tie_word_embeddings=architecture == "Qwen2")
    expected = logits(policy)
    join(policy)
    assert torch.equal(logits(policy), expected)
    policy.save(tmp_path)
    assert torch.equal(logits(load_policy(ModelSection(path=str(tmp_path), device="cpu"))), expected)


def test_a_copy_of_a_joined_model_stays_as_it_was(policy: Policy):
    join(policy)
    reference = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    before = logits(reference)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(logits(reference), before)
    assert not torch.equal(logits(policy), before)
    sizes = {p.untyped_storage().nbytes() for p in reference.model.parameters()}
    assert sizes == {p.numel() * p.element_size() for p in reference.model.parameters()}  # nothing dragged along

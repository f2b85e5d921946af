"""Sequences laid end to end compute what each would alone, and what `transformers`' own attention would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from precise import precise_norms
from torch import Tensor

from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy

CPU = torch.device("cpu")
MIXED = [7, 1, 19, 3, 18, 40, 2, 19, 11, 5]
LENGTHS = {
    "mixed": MIXED,
    "equal": [13, 13, 13, 13],
    "one": [23],
    "single tokens": [1, 1, 1],
    "nearly equal": [16, 15, 14, 16],
    "many": [1 + (37 * i) % 41 for i in range(24)],
}
Gradients = dict[str, Tensor]


def token_ids(lengths: list[int], vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def with_gradients(policy: Policy, forward: Callable[[], Tensor], weights: Tensor) -> tuple[Tensor, Gradients]:
    """Hidden states and the gradients of their weighted sum."""
    policy.model.zero_grad()
    hidden = forward()
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def packed(policy: Policy, sequences: list[Tensor]) -> Tensor:
    plan = PackedPlan([len(s) for s in sequences], CPU)
    return policy.hidden(torch.cat(sequences), plan.positions, plan)


def alone(policy: Policy, sequences: list[Tensor]) -> Tensor:
    return torch.cat([packed(policy, [sequence]) for sequence in sequences])


def assert_same(ours: tuple[Tensor, Gradients], theirs: tuple[Tensor, Gradients], tolerance: float) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        scale = max(1.0, float(theirs[1][name].abs().max()))
        torch.testing.assert_close(
            gradient, theirs[1][name], rtol=0, atol=tolerance * scale, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("window", [None, 5, 19, 40])
def test_packed_equals_unpacked(make_policy: Callable[..., Policy], lengths: list[int], window: int | None):
    policy = make_policy("Mistral", dtype=torch.float64, sliding_window=window)
    sequences = token_ids(lengths, policy.head_weight.shape[0])
    weights = torch.randn(sum(lengths), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = with_gradients(policy, lambda: packed(policy, sequences), weights)
    assert len(ours[1]) == len([name for name, _ in policy.model.named_parameters()])
    assert_same(ours, with_gradients(policy, lambda: alone(policy, sequences), weights), 1e-10)


@pytest.mark.parametrize("architecture", ["Qwen3", "Llama", "Qwen2", "Qwen3Moe"])
def test_packed_equals_unpacked_whatever_the_model(make_policy: Callable[..., Policy], architecture: str):
    # the grouped matrix product of experts has no float64; their plain loop has
    changes = {"experts_implementation": "eager"} if "Moe" in architecture else {}
    policy = make_policy(architecture, dtype=torch.float64, **changes)
    sequences = token_ids(MIXED, policy.head_weight.shape[0])
    weights = torch.randn(sum(MIXED), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = with_gradients(policy, lambda: packed(policy, sequences), weights)
    assert_same(ours, with_gradients(policy, lambda: alone(policy, sequences), weights), 1e-10)


@pytest.mark.parametrize("window", [None, 6])
def test_packed_equals_the_models_own_attention(make_policy: Callable[..., Policy], window: int | None):
    policy = make_policy("Mistral", dtype=torch.float64, sliding_window=window)
    stock: Any = (
        type(policy.model)._from_config(copy.deepcopy(policy.model.config), attn_implementation="sdpa").double().eval()
    )
    stock.load_state_dict(policy.model.state_dict())
    precise_norms(stock)
    sequences = token_ids(MIXED, policy.head_weight.shape[0])
    weights = torch.randn(sum(MIXED), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def stock_hidden() -> Tensor:
        return torch.cat([stock.model(input_ids=s[None], use_cache=False).last_hidden_state[0] for s in sequences])

    (stock_hidden() * weights).sum().backward()
    theirs = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    assert stock.config._attn_implementation == "sdpa"
    assert_same(
        with_gradients(policy, lambda: packed(policy, sequences), weights), (stock_hidden().detach(), theirs), 1e-10
    )


def test_a_window_changes_what_is_seen(make_policy: Callable[..., Policy]):
    """Without this the comparisons above could pass with the window ignored on both sides."""
    narrow, wide = (make_policy("Mistral", dtype=torch.float64, sliding_window=window) for window in (5, None))
    sequences = token_ids(MIXED, narrow.head_weight.shape[0])
    difference = (packed(narrow, sequences) - packed(wide, sequences)).abs().amax(dim=1)
    positions = PackedPlan(MIXED, CPU).positions[0]
    assert (difference[positions < 5] < 1e-12).all()
    assert (difference[positions >= 5] > 1e-6).all()


@pytest.mark.parametrize("lengths", [[9, 4, 9, 2], [6, 6, 6]])
def test_a_sequence_never_sees_another_or_its_own_future(make_policy: Callable[..., Policy], lengths: list[int]):
    policy = make_policy(dtype=torch.float64)
    sequences = token_ids(lengths, policy.head_weight.shape[0])
    before = packed(policy, sequences).split(lengths)
    sequences[2] = sequences[2].clone()
    sequences[2][4] = (sequences[2][4] + 1) % 90
    after = packed(policy, sequences).split(lengths)
    for i in (0, 1, *range(3, len(lengths))):
        torch.testing.assert_close(after[i], before[i], rtol=0, atol=1e-12)
    torch.testing.assert_close(after[2][:4], before[2][:4], rtol=0, atol=1e-12)
    assert ((after[2][4:] - before[2][4:]).abs().amax(dim=1) > 1e-6).all()


def test_a_weight_of_zero_leaves_no_gradient_behind(make_policy: Callable[..., Policy]):
    """Padding repeats tokens; its gradient must not reach them. Only the loss on the longest sequence counts here."""
    policy = make_policy(dtype=torch.float64)
    lengths = [8, 12, 11, 9]
    sequences = token_ids(lengths, policy.head_weight.shape[0])
    weights = torch.zeros(sum(lengths), 32, dtype=torch.float64)
    weights[8:20] = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, ours = with_gradients(policy, lambda: packed(policy, sequences), weights)
    _, theirs = with_gradients(policy, lambda: packed(policy, sequences[1:2]), weights[8:20])
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-10)

"""Log-probs in chunks are those of the whole, and nothing as large as the whole is ever held."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from precise import precise_norms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.policy import policy as policy_module
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy, Support, chosen_logprobs

N, V, E = 23, 57, 16


class LargestTensor(TorchDispatchMode):
    """Sees every tensor that any operation makes, in the forward and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return out


def inputs(num: int = N, vocab: int = V, size: int = E) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num, size, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(vocab, size, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (num,), generator=generator)


def some_support(chosen: Tensor, vocab: int = V) -> Support:
    """Subsets of 1 to 7 tokens, always with the chosen one."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for i, token in enumerate(chosen.tolist()):
        others = torch.randperm(vocab, generator=generator)[: i % 7]
        rows.append(torch.unique(torch.cat([others, torch.tensor([token])])))
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Support(torch.cat(rows).int(), offsets)


def reference(hidden: Tensor, weight: Tensor, chosen: Tensor, temperature: float, support: Support | None) -> Tensor:
    logits = hidden @ weight.T / temperature
    if support is not None:
        masked = torch.full_like(logits, float("-inf"))
        for i, (first, last) in enumerate(pairwise(support.offsets.tolist())):
            ids = support.ids[first:last].long()
            masked[i, ids] = logits[i, ids]
        logits = masked
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(chosen)), chosen]


@pytest.mark.parametrize("with_support", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_rows", [1, 7, 22, 23, 24, 1000])
def test_equal_to_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, temperature: float, with_support: bool
):
    monkeypatch.setattr(policy_module, "CHUNK_ELEMENTS", chunk_rows * V + V - 1)
    hidden, weight, chosen = inputs()
    support = some_support(chosen) if with_support else None
    upstream = torch.randn(2, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = chosen_logprobs(hidden, weight, chosen, temperature, support)
    theirs = tuple(reference(hidden, weight, chosen, temperature, s) for s in (support, None))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)
    for gradient, expected in zip(
        *(torch.autograd.grad(found, (hidden, weight), tuple(upstream)) for found in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


def test_a_chunk_too_small_for_one_row_still_takes_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_module, "CHUNK_ELEMENTS", V // 2)
    hidden, weight, chosen = inputs()
    torch.testing.assert_close(
        chosen_logprobs(hidden, weight, chosen, 1.0)[0],
        reference(hidden, weight, chosen, 1.0, None),
        rtol=0,
        atol=1e-10,
    )


def test_a_sole_survivor_is_certain_and_has_no_gradient():
    hidden, weight, chosen = inputs()
    support = Support(chosen.int(), torch.arange(N + 1))
    ours, _ = chosen_logprobs(hidden, weight, chosen, 0.7, support)
    assert (ours == 0).all()
    for gradient in torch.autograd.grad(ours.sum(), (hidden, weight)):
        assert (gradient == 0).all()


def test_no_tokens_give_no_logprobs():
    hidden, weight, chosen = inputs()
    ours, _ = chosen_logprobs(hidden[:0], weight, chosen[:0], 1.0)
    assert ours.shape == (0,)
    (gradient,) = torch.autograd.grad(ours.sum(), weight)
    assert (gradient == 0).all()


@pytest.mark.parametrize("with_support", [False, True])
def test_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch, with_support: bool):
    num, vocab, size, chunk_elements = 300, 500, 8, 5000
    monkeypatch.setattr(policy_module, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, chosen = inputs(num, vocab, size)
    support = some_support(chosen, vocab) if with_support else None
    with LargestTensor() as largest:
        torch.stack(chosen_logprobs(hidden, weight, chosen, 0.9, support)).sum().backward()
    assert weight.grad is not None
    inputs_size = max(hidden.numel(), weight.numel())
    assert inputs_size < chunk_elements < num * vocab
    assert largest.num_elements == chunk_elements
    with LargestTensor() as control:
        reference(hidden, weight, chosen, 0.9, None)
    assert control.num_elements == num * vocab


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
def test_low_precision_is_widened_before_the_softmax():
    """bfloat16 log-probs would be off by 2^-8 of their size; only the logits may be that coarse."""
    hidden, weight, chosen = (x.detach() for x in inputs())
    coarse_hidden, coarse_weight = hidden.bfloat16(), weight.bfloat16()
    ours, _ = chosen_logprobs(coarse_hidden, coarse_weight, chosen, 0.7)
    assert ours.dtype == torch.float32
    logits = torch.nn.functional.linear(coarse_hidden, coarse_weight).double() / 0.7
    expected = logits.log_softmax(-1)[torch.arange(N), chosen]
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("with_support", [False, True])
def test_policy_logprobs_are_those_of_the_next_token(make_policy: Callable[..., Policy], with_support: bool):
    policy = make_policy(dtype=torch.float64)
    stock = (
        type(policy.model)._from_config(copy.deepcopy(policy.model.config), attn_implementation="sdpa").double().eval()
    )
    stock.load_state_dict(policy.model.state_dict())
    precise_norms(stock)
    lengths = [6, 11, 3]
    ids = torch.randint(3, 99, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    at = torch.tensor([2, 5, 7, 8, 16, 19])
    support = some_support(ids[at], 99) if with_support else None
    with torch.no_grad():
        ours, _ = policy.logprobs(ids, PackedPlan(lengths, policy.device), at, 0.8, support)
        logits = torch.cat([stock(input_ids=s[None]).logits[0] for s in ids.split(lengths)])
        expected = reference(logits[at - 1], torch.eye(99, dtype=torch.float64), ids[at], 0.8, support)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)

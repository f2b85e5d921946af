"""The experts that a mixture model chooses: noted as chosen, forced as told, with gates and gradients of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import DEEPSEEK, MIXTURES, routers_of, watched
from torch import Tensor

from headrace.errors import ModelError
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.policy.routes import Routes

Maker = Callable[..., Policy]
GROUPED = DEEPSEEK | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 0}
FORMS = MIXTURES | {"DeepseekV2": GROUPED}
IDS = torch.randint(3, 99, (40,), generator=torch.Generator().manual_seed(1))
each_mixture = pytest.mark.parametrize("architecture", FORMS)


def forward(policy: Policy, routes: Routes | None) -> Tensor:
    plan = PackedPlan([25, 15], policy.device)
    return policy.hidden(IDS, plan.positions, plan, routes)


def some_routes(policy: Policy, seed: int) -> Tensor:
    """Experts that no router asked for, each at most once per token."""
    generator = torch.Generator().manual_seed(seed)
    num_layers, count = policy.routers.shape
    return torch.rand(len(IDS), num_layers, policy.routers.num_experts, generator=generator).topk(count).indices


def gates(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """What each architecture makes of the scores of chosen experts."""
    name = type(router).__name__
    if name.startswith("DeepseekV3"):
        scores = logits.sigmoid().gather(1, chosen)
        return 2.5 * scores / scores.sum(-1, keepdim=True)
    scores = logits.softmax(-1).gather(1, chosen)
    if name.startswith("DeepseekV2"):
        return 2.5 * scores
    return scores / scores.sum(-1, keepdim=True) if name.startswith("Mixtral") else scores


@each_mixture
@torch.no_grad()
def test_what_is_noted_is_what_the_experts_get(make_policy: Maker, architecture: str):
    policy, routes = make_policy(architecture, **FORMS[architecture]), Routes()
    with watched(policy.model) as seen:
        noting = forward(policy, routes)
    assert routes.chosen is not None
    assert routes.chosen.dtype == torch.uint8
    assert torch.equal(routes.chosen.long(), seen.routes)
    assert len(seen.routes.unique()) == policy.routers.num_experts
    assert torch.equal(noting, forward(policy, None))


@each_mixture
@torch.no_grad()
def test_forcing_what_the_model_would_choose_changes_nothing(make_policy: Maker, architecture: str):
    policy, routes = make_policy(architecture, **FORMS[architecture]), Routes()
    free = forward(policy, routes)
    assert torch.equal(forward(policy, Routes(routes.chosen)), free)


@each_mixture
@torch.no_grad()
def test_forced_experts_get_the_gates_of_their_own_scores(make_policy: Maker, architecture: str):
    policy = make_policy(architecture, **FORMS[architecture])
    forced, logits = some_routes(policy, 5), []
    for router in routers_of(policy.model):
        router.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    with watched(policy.model) as seen:
        forward(policy, Routes(forced.to(torch.uint8)))
    assert torch.equal(seen.routes, forced)
    for layer, router in enumerate(routers_of(policy.model)):
        expected = gates(router, logits[layer], forced[:, layer])
        torch.testing.assert_close(seen.weights[layer], expected, rtol=1e-5, atol=1e-6)


@each_mixture
@torch.no_grad()
def test_tokens_that_are_not_known_stay_free(make_policy: Maker, architecture: str):
    policy, free, mixed = make_policy(architecture, **FORMS[architecture]), Routes(), Routes()
    before = forward(policy, free)
    assert free.chosen is not None
    known = torch.arange(len(IDS)) % 3 == 0
    torch.testing.assert_close(forward(policy, Routes(free.chosen, known)), before)
    forced = some_routes(policy, 6).to(torch.uint8)
    mixed = Routes(forced, known)
    forward(policy, mixed)
    assert mixed.chosen is not None
    assert torch.equal(mixed.chosen[known], forced[known])
    # what the first layer sees does not depend on any expert
    assert torch.equal(mixed.chosen[~known, 0], free.chosen[~known, 0])


@each_mixture
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_reach_the_routers_of_forced_experts(make_policy: Maker, architecture: str, checkpointed: bool):
    policy = make_policy(architecture, **FORMS[architecture])
    forced = some_routes(policy, 7).to(torch.uint8)
    forward(policy, Routes(forced)).square().sum().backward()
    expected = [router.weight.grad.clone() for router in routers_of(policy.model)]
    assert all(grad.abs().sum() > 0 for grad in expected)
    policy.model.zero_grad()
    if checkpointed:  # layers are computed again in the backward pass, after the routes were followed
        policy.checkpoint_activations()
        forward(policy, Routes(forced)).square().sum().backward()
        for router, grad in zip(routers_of(policy.model), expected, strict=True):
            torch.testing.assert_close(router.weight.grad, grad)


def test_many_experts_are_told_apart(make_policy: Maker):
    policy, routes = make_policy("Qwen3Moe", num_experts=300, num_experts_per_tok=8), Routes()
    assert policy.routers.dtype == np.uint16
    with torch.no_grad():
        free = forward(policy, routes)
        recorded = policy.routers.to_host(routes, len(IDS))
        assert recorded.dtype == np.uint16
        assert recorded.max() > 255
        assert torch.equal(forward(policy, Routes(policy.routers.to_device(recorded, policy.device))), free)


def test_a_copy_of_the_model_chooses_for_itself(make_policy: Maker):
    policy = make_policy("Qwen3Moe")
    other = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    with torch.no_grad():
        free = forward(other, None)
        with policy.routers.follow(Routes(some_routes(policy, 8))):
            assert torch.equal(forward(other, None), free)


def test_an_error_inside_leaves_nothing_behind(make_policy: Maker):
    policy, broken = make_policy("Qwen3Moe"), some_routes(make_policy("Qwen3Moe"), 9)[:7]
    free = forward(policy, None)
    with pytest.raises(RuntimeError):
        forward(policy, Routes(broken))
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.equal(forward(policy, None), free)


def test_a_dense_model_has_no_routes(policy: Policy):
    routes = Routes()
    forward(policy, routes)
    assert policy.routers.shape == (0, 0)
    assert routes.chosen is None
    assert policy.routers.to_host(routes, len(IDS)).shape == (len(IDS), 0, 0)


def test_refuses_a_mixture_whose_choice_does_not_show(make_policy: Maker):
    with pytest.raises(ModelError, match=r"PhimoeSparseMoeBlock chooses cannot be recorded.* saw 0 in 2 layers"):
        make_policy("Phimoe", num_local_experts=4, num_experts_per_tok=2)


def test_refuses_experts_in_an_unknown_form(make_policy: Maker):
    with pytest.raises(ModelError, match="JetMoeModel seems to choose experts in JetMoeMoE"):
        make_policy("JetMoe", kv_channels=8, num_local_experts=4, num_experts_per_tok=2)

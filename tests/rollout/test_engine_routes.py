"""The experts of every token come back with a generation, whatever happened to its row on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import MIXTURES, watched
from plain_forward import (
    PromptGroup,
    assert_right,
    assert_same,
    finish,
    make_engine,
    mixed_groups,
    next_logits,
    perturb,
    prompt_ids,
    requests,
    run,
    stock_model,
)

from headrace.policy.policy import Policy
from headrace.rollout.rows import Generation
from headrace.types import IntArray, RouteArray, Sampling

pytestmark = pytest.mark.usefixtures("endless")
Maker = Callable[..., Policy]
each_mixture = pytest.mark.parametrize("architecture", MIXTURES)
LONG: PromptGroup = (prompt_ids(23), requests("a", [Sampling(max_new_tokens=n) for n in (9, 30, 17)]))


def recorded(generation: Generation) -> RouteArray:
    assert generation.replay is not None
    assert generation.replay.routes is not None
    return generation.replay.routes


def plain_routes(model: Any, prompt: IntArray, generation: Generation) -> RouteArray:
    """What the experts of a stock model are given, in one pass over the whole sequence."""
    with watched(model) as seen:
        next_logits(model, np.concatenate([prompt, generation.token_ids]))
    return seen.routes.numpy()


@each_mixture
def test_routes_are_those_of_a_plain_forward(make_policy: Maker, architecture: str):
    """Prompts in chunks, groups that share them, rows that move when others end."""
    policy = make_policy(architecture, **MIXTURES[architecture])
    groups, model = mixed_groups(), stock_model(policy)
    found = run(make_engine(policy, prefill_tokens=10), *groups)
    assert_right(model, groups, found)
    for prompt, members in groups:
        for request in members:
            routes, expected = recorded(found[request.id]), plain_routes(model, prompt, found[request.id])
            assert routes.shape == expected.shape
            assert routes.dtype == np.uint8
            np.testing.assert_array_equal(routes[:-1], expected[:-1], err_msg=request.id)
            assert not routes[-1].any()


def test_truncated_sampling_keeps_support_and_routes(make_policy: Maker):
    policy = make_policy("Qwen3Moe")
    group = prompt_ids(5), requests("a", [Sampling(max_new_tokens=6, top_p=0.7)])
    generation = run(make_engine(policy), group)["a/0"]
    np.testing.assert_array_equal(
        recorded(generation)[:-1], plain_routes(stock_model(policy), group[0], generation)[:-1]
    )
    assert generation.replay is not None
    assert generation.replay.support_offsets is not None
    assert len(generation.replay.support_offsets) == 7


def test_a_dense_model_records_nothing(policy: Policy):
    assert run(make_engine(policy), LONG)["a/0"].replay is None


@pytest.mark.parametrize("new_weights", [False, True])
def test_a_parked_row_is_computed_again_with_the_experts_it_had(make_policy: Maker, new_weights: bool):
    policy = make_policy("Qwen3Moe")
    undisturbed = run(make_engine(policy), LONG)
    engine = make_engine(policy, prefill_tokens=7)
    engine.submit(*LONG)
    early: dict[str, Generation] = {}
    while min(engine._rows.lengths, default=0) < 28:
        assert not engine.advance(max_steps=1)
    had = {engine._rows.sequences[r].request.id: engine._rows.park(r, 0.0).routes for r in range(len(engine._rows))}
    with torch.inference_mode():
        engine._make_room()
        engine._make_room()
    if new_weights:
        perturb(policy, 1)
        engine.weights_changed(1)
    early |= finish(engine)
    assert engine.counts.preemptions == 2
    for id, generation in early.items():
        np.testing.assert_array_equal(recorded(generation)[: len(had[id])], had[id])
        if not new_weights:
            assert_same(generation, undisturbed[id])
            np.testing.assert_array_equal(recorded(generation), recorded(undisturbed[id]))


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_old_rows_stay_when_the_weights_change(make_policy: Maker, on_update: str):
    policy = make_policy("Qwen3Moe")
    old = stock_model(policy)
    engine = make_engine(policy, on_update=on_update)
    engine.submit(*LONG)
    for _ in range(6):
        engine.advance(max_steps=1)
    perturb(policy, 1)
    engine.weights_changed(1)
    new, num_changed = stock_model(policy), 0
    for generation in finish(engine).values():
        num_old = generation.spans[0].end - 1  # the newest token was not computed with yet
        routes = recorded(generation)
        np.testing.assert_array_equal(routes[:num_old], plain_routes(old, LONG[0], generation)[:num_old])
        num_changed += int((routes[:num_old] != plain_routes(new, LONG[0], generation)[:num_old]).sum())
    assert num_changed > 50


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_a_prompt_half_computed_gets_new_routes_with_new_weights(make_policy: Maker, on_update: str):
    policy = make_policy("Qwen3Moe")
    engine = make_engine(policy, prefill_tokens=10, on_update=on_update)
    engine.submit(*LONG)
    engine.advance(max_steps=1)
    perturb(policy, 1)
    engine.weights_changed(1)
    model = stock_model(policy)
    for generation in finish(engine).values():
        np.testing.assert_array_equal(recorded(generation)[:-1], plain_routes(model, LONG[0], generation)[:-1])

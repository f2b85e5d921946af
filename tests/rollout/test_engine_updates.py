"""Weights that change under way: which version sampled which token, and what its cache was computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from plain_forward import (
    Doubles,
    PromptGroup,
    assert_right,
    assert_same,
    finish,
    make_engine,
    perturb,
    plain_logprobs,
    prompt_ids,
    requests,
    stock_model,
)
from transformers import DynamicCache

from headrace.policy.policy import Policy
from headrace.policy.routes import Routers, Routes
from headrace.rollout.rows import Generation
from headrace.types import FinishReason, IntArray, Sampling, Span

pytestmark = pytest.mark.usefixtures("endless")  # so that the length of an answer is known

MODES = ["keep", "recompute"]
Maker = Callable[..., Policy]
Updates = Sequence[tuple[int, int]]  # (the step before which it comes, the version)

SHORT = [Sampling(max_new_tokens=n) for n in (3, 9, 30)]
# two that run at once, one whose prompt takes six steps, two that wait for room
GROUPS: list[PromptGroup] = [
    (prompt_ids(5), requests("a", SHORT)),
    (prompt_ids(12), requests("b", SHORT[1:])),
    (prompt_ids(50), requests("c", SHORT[1:])),
    (prompt_ids(7), requests("d", SHORT)),
    (prompt_ids(21), requests("e", SHORT[:2])),
]


def drive(
    policy: Policy,
    updates: Updates,
    *,
    on_update: str,
    groups: list[PromptGroup] | None = None,
    abort_at: int | None = None,
    change: Callable[[Policy, int], None] = perturb,
) -> tuple[dict[str, Generation], dict[int, Any]]:
    """All generations, and a stock model of each version."""
    groups = GROUPS if groups is None else groups
    engine = make_engine(policy, max_running=9, prefill_tokens=10, on_update=on_update)
    models = {0: stock_model(policy)}
    for group in groups:
        engine.submit(*group)
    found: dict[str, Generation] = {}
    step = 0
    while engine.has_work:
        for _, version in (update for update in updates if update[0] == step):
            change(policy, version)
            models[version] = stock_model(policy)
            engine.weights_changed(version)
        if step == abort_at:
            engine.abort({request.id for _, members in groups for request in members})
        found |= {generation.id: generation for generation in engine.advance(max_steps=1)}
        step += 1
    return found, models


def logprobs_by_span(
    models: dict[int, Any], prompt: IntArray, generation: Generation, sampling: Sampling
) -> list[tuple[Span, Doubles]]:
    """For each span, the log-probs of its tokens had its version computed all that stands before them.

    A mixture model sends tokens to the experts they had when they were first computed.
    """
    routes = None if generation.replay is None else generation.replay.routes
    found = []
    for span in generation.spans:
        model = models[span.version]
        with Routers(model.get_decoder()).follow(None if routes is None else Routes(torch.from_numpy(routes))):
            logprobs = plain_logprobs(model, prompt, generation.token_ids, sampling)
        found.append((span, logprobs[_within(span, prompt)]))
    return found


def _within(span: Span, prompt: IntArray) -> slice:
    return slice(span.start - len(prompt), span.end - len(prompt))


@torch.no_grad()
def with_old_cache(old: Any, new: Any, prompt: IntArray, generation: Generation, num_old: int) -> Doubles:
    """Log-probs of the tokens after the first `num_old`, with everything the old weights had cached by then."""
    ids = torch.from_numpy(np.concatenate([prompt, generation.token_ids]).astype(np.int64))[None]
    cached = len(prompt) + num_old - 1  # the newest token is cached when the next one is computed
    cache = old(input_ids=ids[:, :cached], past_key_values=DynamicCache(config=old.config)).past_key_values
    logits = new(input_ids=ids[:, cached:-1], past_key_values=cache).logits[0].double()
    chosen = ids[0, cached + 1 :, None]
    logprobs: Doubles = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
    return logprobs


# ---- spans


@pytest.mark.parametrize("on_update", MODES)
def test_spans_change_exactly_at_the_update(make_policy: Maker, on_update: str):
    updates = [(2, 1), (8, 2), (9, 5)]
    found, _ = drive(make_policy(), updates, on_update=on_update)
    # how many tokens each had when an update came: what an abort at that step gives back
    had = [
        drive(make_policy(), updates[:i], on_update=on_update, abort_at=step)[0] for i, (step, _) in enumerate(updates)
    ]
    num_spans = set()
    for prompt, members in GROUPS:
        for request in members:
            generation, start = found[request.id], len(prompt)
            cuts = [0, *(len(partial[request.id].token_ids) for partial in had), request.sampling.max_new_tokens]
            expected = [
                Span(version=version, start=start + a, end=start + b)
                for version, a, b in zip((0, 1, 2, 5), cuts[:-1], cuts[1:], strict=True)
                if b > a
            ]
            assert generation.spans == tuple(expected)
            assert sum(span.end - span.start for span in generation.spans) == len(generation.token_ids)
            num_spans.add(len(expected))
    assert num_spans == {1, 2, 3, 4}


@pytest.mark.parametrize("on_update", MODES)
def test_two_updates_between_two_tokens_leave_no_empty_span(make_policy: Maker, on_update: str):
    found, _ = drive(make_policy(), [(5, 1), (5, 2)], on_update=on_update)
    assert {span.version for generation in found.values() for span in generation.spans} == {0, 2}
    assert all(span.end > span.start for generation in found.values() for span in generation.spans)


def test_an_update_of_an_idle_engine_is_stamped_on_what_comes_next(make_policy: Maker):
    policy = make_policy()
    engine = make_engine(policy)
    for version in (3, 4):
        perturb(policy, version)
        engine.weights_changed(version)
        engine.submit(*GROUPS[0])
        found = finish(engine)
        assert {g.spans[0].version for g in found.values()} == {version}
        assert_right(stock_model(policy), GROUPS[:1], found)


@pytest.mark.parametrize("on_update", MODES)
def test_an_abort_right_after_the_update_has_only_the_old_version(make_policy: Maker, on_update: str):
    found, models = drive(make_policy(), [(4, 1)], on_update=on_update, abort_at=4)
    aborted = [g for g in found.values() if g.finish is FinishReason.ABORT]
    assert {span.version for g in aborted for span in g.spans} == {0}
    for prompt, members in GROUPS:
        for request in members:
            generation = found[request.id]
            expected = plain_logprobs(models[0], prompt, generation.token_ids, request.sampling)
            np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=1e-5)


# ---- recompute


@pytest.mark.parametrize(
    ("architecture", "changes"), [("Qwen3", {}), ("Mistral", {"sliding_window": 6}), ("Qwen3Moe", {})]
)
def test_recompute_is_a_plain_forward_of_the_version_that_sampled(
    make_policy: Maker, architecture: str, changes: dict[str, Any]
):
    found, models = drive(make_policy(architecture, **changes), [(2, 1), (8, 2)], on_update="recompute")
    compared = {0: 0, 1: 0, 2: 0}
    for prompt, members in GROUPS:
        for request in members:
            generation = found[request.id]
            for span, expected in logprobs_by_span(models, prompt, generation, request.sampling):
                ours = generation.logprobs[_within(span, prompt)]
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5, err_msg=f"{request.id} {span}")
                compared[span.version] += len(ours)
    assert min(compared.values()) > 10


def test_recompute_with_the_same_weights_changes_nothing(make_policy: Maker):
    untouched, _ = drive(make_policy(), [], on_update="recompute")
    found, _ = drive(make_policy(), [(7, 1)], on_update="recompute", change=lambda policy, version: None)
    assert found.keys() == untouched.keys()
    for id, generation in found.items():
        np.testing.assert_array_equal(generation.token_ids, untouched[id].token_ids)
        np.testing.assert_allclose(generation.logprobs, untouched[id].logprobs, rtol=0, atol=1e-5)
    assert max(len(g.spans) for g in found.values()) == 2


# ---- keep


def test_keep_goes_on_with_the_old_cache(make_policy: Maker):
    untouched, _ = drive(make_policy(), [], on_update="keep")
    found, models = drive(make_policy(), [(6, 1)], on_update="keep")
    num_split = 0
    for prompt, members in GROUPS:
        for request in members:
            generation = found[request.id]
            spans = {span.version: _within(span, prompt) for span in generation.spans}
            if 0 in spans:
                before = spans[0]
                np.testing.assert_array_equal(generation.token_ids[before], untouched[request.id].token_ids[before])
                np.testing.assert_array_equal(generation.logprobs[before], untouched[request.id].logprobs[before])
            if len(spans) == 2:
                num_split += 1
                after = generation.logprobs[spans[1]]
                expected = with_old_cache(models[0], models[1], prompt, generation, spans[0].stop)
                np.testing.assert_allclose(after, expected, rtol=0, atol=1e-5, err_msg=request.id)
                recomputed = plain_logprobs(models[1], prompt, generation.token_ids, request.sampling)[spans[1]]
                assert np.abs(after - recomputed).max() > 1e-3
    assert num_split >= 4


def test_keep_and_recompute_part_only_after_the_update(make_policy: Maker):
    kept, _ = drive(make_policy(), [(6, 1)], on_update="keep")
    recomputed, _ = drive(make_policy(), [(6, 1)], on_update="recompute")
    num_parted = 0
    for id, generation in kept.items():
        first = generation.spans[0]
        assert recomputed[id].spans == generation.spans
        if len(generation.spans) == 1:
            continue
        num_old = first.end - first.start
        np.testing.assert_array_equal(generation.logprobs[:num_old], recomputed[id].logprobs[:num_old])
        num_parted += not np.allclose(
            generation.logprobs[num_old:], recomputed[id].logprobs[num_old:], rtol=0, atol=1e-4
        )
    assert num_parted >= 4


# ---- what has sampled nothing yet


@pytest.mark.parametrize("on_update", MODES)
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_prompt_half_computed_begins_again(make_policy: Maker, on_update: str, step: int):
    """No token of it would bear the old version's name, so none of its cache may come from there."""
    groups = [(prompt_ids(60), requests("long", SHORT)), (prompt_ids(48), requests("next", SHORT))]
    found, models = drive(make_policy(), [(step, 1)], on_update=on_update, groups=groups)
    for generation in found.values():
        assert [span.version for span in generation.spans] == [1]
    assert_right(models[1], groups, found)


@pytest.mark.parametrize("on_update", MODES)
def test_what_waits_is_computed_by_the_new_version_alone(make_policy: Maker, on_update: str):
    found, models = drive(make_policy(), [(4, 1)], on_update=on_update)
    late = [group for group in GROUPS if all(found[r.id].spans[0].version == 1 for r in group[1])]
    assert len(late) >= 2
    assert_right(models[1], late, {r.id: found[r.id] for _, members in late for r in members})


@pytest.mark.parametrize("on_update", MODES)
def test_an_update_does_not_move_the_noise(make_policy: Maker, on_update: str):
    """A request that starts after the update samples what it would on an engine that had these weights all along."""
    found, _ = drive(make_policy(), [(4, 1)], on_update=on_update)
    fresh = make_policy()
    perturb(fresh, 1)
    engine = make_engine(fresh)
    engine.version = 1
    engine.submit(*GROUPS[4])
    for id, generation in finish(engine).items():
        assert_same(found[id], generation)

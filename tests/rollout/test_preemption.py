"""Preemption: out of cache in mid-run, sequences wait and are resumed, and nothing they sampled is lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from plain_forward import (
    PromptGroup,
    assert_right,
    assert_same,
    finish,
    make_engine,
    prompt_ids,
    requests,
    run,
    stock_model,
    tight_engine,
)

from headrace.errors import ConfigError
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Burst, Generation, Rows
from headrace.types import FinishReason, Sampling, Span

pytestmark = pytest.mark.usefixtures("endless")

GROUPS: list[PromptGroup] = [
    (prompt_ids(40), requests("a", [Sampling(max_new_tokens=200), Sampling(max_new_tokens=190, top_k=5)])),
    (prompt_ids(70), requests("b", [Sampling(max_new_tokens=180)] * 2)),
    (prompt_ids(64), requests("c", [Sampling(max_new_tokens=170)])),
]
NO_ROUTES = np.zeros((5, 0, 0), np.uint8)
IDS = {r.id for _, members in GROUPS for r in members}


def squeezed(policy: Policy, **changes: object) -> Engine:
    """An engine that has the groups and has had to preempt one of them."""
    engine, store = tight_engine(policy, 12 * 64, **changes)
    for group in GROUPS:
        engine.submit(*group)
    while not engine.counts.preemptions:
        assert not engine.advance(max_steps=1)
    assert len(store.tables.rows) == len(engine._rows)
    return engine


def test_preempted_sequences_come_to_what_they_would_have_come_to(policy: Policy):
    roomy = run(make_engine(policy), *GROUPS)
    engine, store = tight_engine(policy, 12 * 64)
    found = run(engine, *GROUPS)
    assert engine.counts.preemptions >= 2
    assert found.keys() == roomy.keys()
    for id, generation in found.items():
        assert_same(generation, roomy[id])
        assert (generation.replay is None) == (roomy[id].replay is None)
    support, expected = found["a/1"].replay, roomy["a/1"].replay
    assert support is not None
    assert expected is not None
    np.testing.assert_array_equal(support.support_offsets, expected.support_offsets)
    np.testing.assert_array_equal(support.support_ids, expected.support_ids)
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())
    assert store.tables.pages.num_free == 12, "every page came back"
    assert_right(stock_model(policy), GROUPS, found)


def test_a_released_cache_is_made_again_and_every_answer_goes_on(policy: Policy):
    undisturbed = run(make_engine(policy), *GROUPS)
    engine = make_engine(policy)
    for group in GROUPS:
        engine.submit(*group)
    found: dict[str, Generation] = {}
    for _ in range(4):
        found |= {g.id: g for g in engine.advance(max_steps=20)}
        engine.release_cache()
        assert "_store" not in vars(engine)
        assert not len(engine._rows)
    found |= finish(engine)
    assert found.keys() == undisturbed.keys()
    for id, generation in found.items():
        assert_same(generation, undisturbed[id])
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())
    assert engine.counts.preemptions == 0, "the cache was not too small"


def test_the_first_token_is_announced_once(policy: Policy):
    engine, _ = tight_engine(policy, 12 * 64)
    run(engine, *GROUPS)
    assert engine.counts.preemptions
    assert sorted(id for id, _ in engine.begun) == sorted(IDS)


def test_an_abort_of_a_preempted_sequence_keeps_what_it_sampled(policy: Policy):
    undisturbed = run(make_engine(policy), *GROUPS)
    engine = squeezed(policy)
    running = {engine._rows.sequences[row].request.id for row in range(len(engine._rows))}
    waiting = IDS - running
    assert waiting
    engine.abort(IDS)
    found = finish(engine)
    assert found.keys() == IDS
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values()), "the books have all of them"
    assert any(len(found[id].token_ids) for id in waiting)
    for id, generation in found.items():
        count = len(generation.token_ids)
        assert generation.finish is FinishReason.ABORT
        np.testing.assert_array_equal(generation.token_ids, undisturbed[id].token_ids[:count])
        assert sum(span.end - span.start for span in generation.spans) == count


def test_the_experts_of_a_mixture_survive(make_policy: Callable[..., Policy]):
    policy = make_policy("Qwen3Moe")
    roomy = run(make_engine(policy), *GROUPS)
    engine, _ = tight_engine(policy, 12 * 64)
    found = run(engine, *GROUPS)
    assert engine.counts.preemptions
    aborting = squeezed(policy)
    aborting.abort(IDS)
    for id, generation in found.items():
        assert_same(generation, roomy[id])
        np.testing.assert_array_equal(generation.replay.routes, roomy[id].replay.routes)
    for id, generation in finish(aborting).items():
        known = len(generation.replay.routes) - 1  # of the newest token nothing is known yet
        np.testing.assert_array_equal(generation.replay.routes[:known], roomy[id].replay.routes[:known])


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_while_a_sequence_waits_leaves_its_spans_right(make_policy: Callable[..., Policy], on_update: str):
    policy = make_policy()
    engine = squeezed(policy, on_update=on_update)
    group = engine._waiting[0]
    assert group.parked is not None
    (id,), count = [r.id for r in group.requests], len(group.parked.sampled)
    num_prompt = len(group.prompt) - count
    engine.weights_changed(3)
    generation = finish(engine)[id]
    end = num_prompt + len(generation.token_ids)
    expected = (
        Span(version=0, start=num_prompt, end=num_prompt + count),
        Span(version=3, start=num_prompt + count, end=end),
    )
    assert generation.spans == expected


def test_an_update_while_a_sequence_is_computed_again_begins_that_anew(policy: Policy):
    """With the same weights before and after, the answer must be what it would have been."""
    undisturbed = run(make_engine(policy), *GROUPS)
    engine = squeezed(policy, prefill_tokens=32)
    while not (half := [f for f in engine._prefilling if f.parked is not None and f.done]):
        engine.advance(max_steps=1)
    engine.weights_changed(1)
    assert half[0].done == 0
    for id, generation in finish(engine).items():
        np.testing.assert_array_equal(generation.token_ids, undisturbed[id].token_ids)
        np.testing.assert_allclose(generation.logprobs, undisturbed[id].logprobs, rtol=0, atol=1e-5)


def test_a_prompt_half_computed_makes_room_before_any_answer(policy: Policy):
    engine, store = tight_engine(policy, 15 * 64, prefill_tokens=2)
    old = (prompt_ids(60), requests("old", [Sampling(max_new_tokens=130)] * 4))
    new = (prompt_ids(300), requests("new", [Sampling(max_new_tokens=20)]))
    engine.submit(*old)
    engine.submit(*new)
    found: dict[str, Generation] = {}
    computed = []  # tokens of the new prompt, at each step
    while engine.has_work:
        found |= {g.id: g for g in engine.advance(max_steps=1)}
        computed.append(sum(f.done for f in [*engine._prefilling, *engine._waiting] if len(f.prompt) == 300))
    assert any(before and not after for before, after in pairwise(computed[:-30])), "it had to begin again"
    assert engine.counts.preemptions == 0, "and no answer had to go"
    assert_right(stock_model(policy), [old, new], found)
    assert store.tables.pages.num_free == 15


def test_the_one_that_started_last_makes_room(policy: Policy):
    rows = Rows()
    for name in "abc":
        rows.add(prompt_ids(5), requests(name, [Sampling(max_new_tokens=9)]), 1.0, NO_ROUTES)  # all at the same moment
    rows.remove(0)  # `c` is row 0 now
    assert rows.sequences[rows.youngest()].request.id == "c/0"
    rows.add(prompt_ids(5), requests("d", [Sampling(max_new_tokens=9)]), 1.0, NO_ROUTES)
    rows.append(0, Burst(np.full((1, 3), 7), np.zeros((1, 3), np.float32), np.ones(3, np.int64)), 0)
    parked = rows.park(0, now_s=2.0)
    rows.remove(0)
    assert rows.sequences[rows.youngest()].request.id == "d/0"
    rows.resume(parked, 3.0, np.zeros((6, 0, 0), np.uint8))
    assert rows.sequences[rows.youngest()].request.id == "d/0", "the one that was parked has not become younger"


def test_an_answer_that_cannot_fit_even_alone_is_an_error_that_names_the_setting(policy: Policy):
    engine, _ = tight_engine(policy, 2 * 64)
    with pytest.raises(ConfigError, match=r"128 tokens: raise rollout\.kv_tokens"):
        run(engine, (prompt_ids(40), requests("a", [Sampling(max_new_tokens=150)])))


def test_the_decode_batch_shrinks_with_the_sequences_that_run(policy: Policy):
    engine, store = tight_engine(policy, 10**5)
    samplings = [Sampling(max_new_tokens=n) for n in (30, 5, 12, 5, 20)]
    run(engine, (prompt_ids(6), requests("a", samplings)))
    # the first token comes with the prompt's pass; in step k run those that want more than k + 1
    assert store.batches == [sum(s.max_new_tokens > k + 1 for s in samplings) for k in range(29)]
    assert store.tables.rows == []

"""A turn of an episode goes on from the cache of the turn before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mixtures import MIXTURES
from plain_forward import make_engine, perturb, tight_engine
from played_turns import asked, assert_as_from_scratch, play, run, words

from headrace.policy.policy import Policy
from headrace.rollout.store import Arena, Chunk, PrefillPlan

pytestmark = pytest.mark.usefixtures("endless")


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
def test_only_the_new_tokens_of_a_turn_are_computed(make_policy: Callable[..., Policy], architecture: str):
    policy = make_policy(architecture, exact=True, **MIXTURES.get(architecture, {}))
    engine = make_engine(policy, prefill_tokens=13)
    played = play(engine, num_sessions=3, num_turns=4)
    assert_as_from_scratch(partial(make_engine, policy), played)
    contexts = [len(question[0]) for question, _ in played.values()]
    # of an earlier turn everything is cached but its newest token, which was no input yet
    new = [7 + 1 if int(id.partition("#")[2]) > 1 else len(question[0]) for id, (question, _) in played.items()]
    assert engine.counts.prompt_tokens == sum(contexts)
    assert engine.counts.cached_tokens == sum(contexts) - sum(new)


def test_a_branch_goes_on_from_what_it_shares_with_an_earlier_turn(make_policy: Callable[..., Policy]):
    policy = make_policy(exact=True)
    engine = make_engine(policy)
    played = play(engine, num_sessions=1, num_turns=2)
    cached = engine.counts.cached_tokens
    first = played["0#1"][0][0]
    edited = np.concatenate([first[:15], words(12, 5)])
    question = asked(0, 9, edited)
    (answer,) = run(engine, question).values()
    assert engine.counts.cached_tokens - cached == 15
    assert_as_from_scratch(partial(make_engine, policy), {"0#9": (question, answer)})


def test_what_goes_on_is_kept_longer_than_other_branches_of_its_episode(policy: Policy):
    engine = make_engine(policy, kv_tokens=560, prefill_tokens=512)
    (context, *_), cached = asked(0, 1, words(90)), 0
    (main,) = run(engine, asked(0, 1, context)).values()
    for turn in (2, 3):  # of other agents, which take the room
        run(engine, asked(0, turn, words(90, turn)))
    for turn in (4, 5, 6):
        before, context = len(context) + len(main.token_ids), np.concatenate([context, main.token_ids, words(60, turn)])
        (main,) = run(engine, asked(0, turn, context)).values()
        assert engine.counts.cached_tokens - cached == before - 1
        cached = engine.counts.cached_tokens


def test_short_chunks_attend_together_unless_most_of_that_is_padding(policy: Policy):
    heads, of_keys, width = policy.model.config.num_attention_heads, policy.num_kv_heads, policy.head_size

    def num_alone(*of: tuple[int, int, int]) -> int:
        """Of these chunks (row, start, size), those that attend by themselves. All attend to what they should."""
        chunks = [Chunk(row, start, start + size, words(start + size)) for row, start, size in of]
        arena = Arena(policy, 10**6)
        arena.reserve(16, 500)
        arena.keys.normal_(), arena.values.normal_()
        inputs = [torch.randn(sum(c.size for c in chunks), n, width) for n in (heads, of_keys, of_keys)]
        plan, alone = PrefillPlan(arena, chunks, 48), PrefillPlan(arena, chunks)
        for window in (0, 7):
            torch.testing.assert_close(plan.attend(0, *inputs, 0.3, window), alone.attend(0, *inputs, 0.3, window))
        assert len(alone._long) == len(chunks)
        return len(plan._long)

    alike = [(row, 20 + row, 5) for row in range(8)]
    assert num_alone(*alike) == 0
    assert num_alone(alike[0], (8, 0, 100), *alike[1:]) == 1
    assert num_alone((9, 0, 60), (3, 10, 49)) == 2
    assert num_alone((12, 400, 5)) == 1  # rows 0 to 11 would be padding
    assert num_alone(*alike, (8, 480, 5)) == 9  # and here what seven of them see


def test_what_was_kept_goes_before_anybody_is_preempted(make_policy: Callable[..., Policy]):
    policy = make_policy(exact=True)
    for kv_tokens in (320, 64 * 14):
        engine, store = tight_engine(policy, kv_tokens)
        played = play(engine, num_sessions=4, num_turns=4, told=30)
        assert_as_from_scratch(partial(make_engine, policy), played)
        assert engine.counts.preemptions == 0
        assert 0 <= engine.counts.cached_tokens < engine.counts.prompt_tokens
    engine.forget({"s0", "s1", "s2", "s3"})
    engine.step()
    assert store.tables.pages.num_free == store.tables.num_pages


@pytest.mark.parametrize(("on_update", "is_kept"), [("keep", True), ("recompute", False), ("drain", False)])
def test_an_update_of_the_weights_decides_about_the_cache_as_within_an_answer(
    make_policy: Callable[..., Policy], on_update: str, is_kept: bool
):
    policy = make_policy(exact=True)
    engine = make_engine(policy, on_update=on_update)
    context, (request,), _ = asked(0, 1, words(30))
    (first,) = run(engine, (context, [request], None)).values()
    perturb(policy, 1)
    engine.weights_changed(1)
    question = asked(0, 2, np.concatenate([context, first.token_ids, words(5)]))
    (second,) = run(engine, question).values()
    assert engine.counts.cached_tokens == (30 + 9 - 1 if is_kept else 0)
    assert {span.version for span in second.spans} == {1}
    if not is_kept:
        assert_as_from_scratch(partial(make_engine, policy), {"0#2": (question, second)})


def test_episodes_that_ask_one_by_one_for_the_same_prompt_share_its_prefill(policy: Policy):
    engine = make_engine(policy, prefill_tokens=512)
    prompt: Any = words(40)
    for session in range(6):
        engine.submit(*asked(session, 1, prompt))
    found = run(engine)
    assert len(found) == 6
    assert engine.counts.prompt_tokens == 40
    assert len({tuple(g.token_ids.tolist()) for g in found.values()}) > 1

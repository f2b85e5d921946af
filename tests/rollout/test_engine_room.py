"""Requests come and go: aborts, queues, a cache of limited size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plain_forward import (
    PromptGroup,
    Steps,
    assert_right,
    assert_same,
    finish,
    make_engine,
    mixed_groups,
    most_at_once,
    prompt_ids,
    requests,
    run,
    stock_model,
)

from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine, kv_budget
from headrace.rollout.rows import Generation
from headrace.types import FinishReason, Sampling, Span

# ---- abort


def abort_scene(policy: Policy) -> tuple[Engine, list[PromptGroup]]:
    """After three steps: `run` decodes, `fill` is half-way through its prompt, `wait` is queued."""
    engine = make_engine(policy, max_running=7, prefill_tokens=10)
    groups = [
        (prompt_ids(6), requests("run", [Sampling(max_new_tokens=30)] * 3)),
        (prompt_ids(90), requests("fill", [Sampling(max_new_tokens=30)] * 3)),
        (prompt_ids(8), requests("wait", [Sampling(max_new_tokens=30)] * 4)),
    ]
    for group in groups:
        engine.submit(*group)
    for _ in range(3):
        assert not engine.advance(max_steps=1)
    return engine, groups


@pytest.mark.usefixtures("endless")
def test_abort_of_running_filling_and_waiting_requests(policy: Policy):
    undisturbed = finish(abort_scene(policy)[0])
    engine, groups = abort_scene(policy)
    gone = {"run/1", "fill/0", "fill/2", "wait/3", "nobody"}
    engine.abort(gone)
    before = engine.sampled_tokens
    found = finish(engine)
    assert found.keys() == undisturbed.keys()
    for id, generation in found.items():
        if id not in gone:
            assert_same(generation, undisturbed[id])
            continue
        count = len(generation.token_ids)
        assert generation.finish is FinishReason.ABORT
        assert count == (before // 3 if id == "run/1" else 0)
        np.testing.assert_array_equal(generation.token_ids, undisturbed[id].token_ids[:count])
        np.testing.assert_allclose(generation.logprobs, undisturbed[id].logprobs[:count], rtol=0, atol=1e-5)
        spans = (Span(version=0, start=6, end=6 + count),) if count else ()
        assert generation.spans == spans
    assert len(found["run/1"].token_ids) >= 3
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())
    assert_right(stock_model(policy), groups, {id: undisturbed[id] for id in undisturbed})


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("name", ["run", "fill", "wait"])
def test_abort_of_a_whole_group(policy: Policy, name: str):
    undisturbed = finish(abort_scene(policy)[0])
    engine, groups = abort_scene(policy)
    gone = {r.id for _, members in groups for r in members if r.id.startswith(name)}
    engine.abort(gone)
    first = {g.id for g in engine.advance(max_steps=1)}
    assert first == gone, "an abort is answered at the next step"
    for id, generation in finish(engine).items():
        assert_same(generation, undisturbed[id])


def test_abort_gives_its_place_back(policy: Policy):
    """Prompts that are aborted half-way must not use up the places where prompts are computed."""
    engine = make_engine(policy, max_running=4, prefill_tokens=10)
    for round in range(12):
        members = requests(f"a{round}", [Sampling(max_new_tokens=5)] * 4)
        engine.submit(prompt_ids(25), members)
        engine.advance(max_steps=1)
        engine.abort({r.id for r in members})
        assert [g.finish for g in engine.advance()] == [FinishReason.ABORT] * 4
    last = (prompt_ids(25), requests("last", [Sampling(max_new_tokens=5)] * 4))
    assert_right(stock_model(policy), [last], run(engine, last))


def test_abort_before_the_first_step(policy: Policy):
    engine = make_engine(policy)
    members = requests("a", [Sampling(max_new_tokens=5)] * 2)
    engine.submit(prompt_ids(5), members)
    engine.abort({"a/0", "a/1"})
    assert engine.has_work
    assert {g.id: len(g.token_ids) for g in engine.advance()} == {"a/0": 0, "a/1": 0}
    assert not engine.has_work


@pytest.mark.parametrize("gone", [[0], [1], [3], [1, 2], [0, 1, 2, 3]])
def test_abort_of_any_that_wait(policy: Policy, gone: list[int]):
    engine = make_engine(policy, max_running=2)
    first = (prompt_ids(5), requests("first", [Sampling(max_new_tokens=9)] * 2))
    waiting = [(prompt_ids(7, i), requests(f"w{i}", [Sampling(max_new_tokens=4)] * 2)) for i in range(4)]
    for group in (first, *waiting):
        engine.submit(*group)
    engine.advance(max_steps=1)
    engine.abort({f"w{i}/{j}" for i in gone for j in (0, 1)})
    found = finish(engine)
    aborted = {id for id, generation in found.items() if generation.finish is FinishReason.ABORT}
    assert aborted == {f"w{i}/{j}" for i in gone for j in (0, 1)}
    stayed = [first, *(group for i, group in enumerate(waiting) if i not in gone)]
    assert_right(stock_model(policy), stayed, {id: g for id, g in found.items() if id not in aborted})


def test_what_comes_right_after_an_abort_is_not_lost(policy: Policy):
    engine = make_engine(policy)
    old = (prompt_ids(5), requests("old", [Sampling(max_new_tokens=5)] * 2))
    new = (prompt_ids(6), requests("new", [Sampling(max_new_tokens=5)] * 2))
    engine.submit(*old)
    engine.abort({"old/0", "old/1"})
    engine.submit(*new)
    found = finish(engine)
    assert found.keys() == {"old/0", "old/1", "new/0", "new/1"}
    assert_right(stock_model(policy), [new], {id: found[id] for id in ("new/0", "new/1")})


# ---- room


def test_rows_are_never_more_than_allowed(policy: Policy):
    clock = Steps()
    groups = mixed_groups()
    engine = make_engine(policy, max_running=4, clock=clock)
    found = finish(engine, [(0, *group) for group in groups], clock)
    assert most_at_once(found) == 4
    assert_right(stock_model(policy), groups, found)


def test_a_small_cache_queues_and_everything_finishes(policy: Policy):
    clock = Steps()
    groups = [
        (prompt_ids(10, i), requests(f"f{i}", [Sampling(max_new_tokens=20)] * n))
        for i, n in enumerate((2, 2, 11, 2, 1))
    ]
    engine = make_engine(policy, max_running=64, kv_tokens=4 * 30, clock=clock)
    found = finish(engine, [(0, *group) for group in groups], clock)
    assert most_at_once(found) == 4
    assert_right(stock_model(policy), groups, found)


@pytest.mark.usefixtures("endless")
def test_the_cache_stays_within_its_budget(policy: Policy):
    """Many short answers, few long ones, many short ones: neither the rows nor the length of the past is paid for."""
    engine = make_engine(policy, max_running=64, kv_tokens=1280)
    groups = [
        (prompt_ids(4), requests("short", [Sampling(max_new_tokens=16)] * 60)),
        (prompt_ids(300), requests("long", [Sampling(max_new_tokens=100)] * 3)),
        (prompt_ids(6), requests("again", [Sampling(max_new_tokens=18)] * 50)),
        (prompt_ids(60), requests("last", [Sampling(max_new_tokens=60)] * 6)),
    ]
    found: dict[str, Generation] = {}
    worst = 0
    for group in groups:
        engine.submit(*group)
    while engine.has_work:
        found |= {generation.id: generation for generation in engine.advance(max_steps=1)}
        # lengths are rounded up to eights
        arena = engine._store._arena
        worst = max(worst, arena.num_rows * (arena.capacity - 7))
        assert arena.values[0].shape[::2] == (arena.num_rows, arena.capacity)
    assert 900 < worst <= 1280
    assert_right(stock_model(policy), groups, found)


@pytest.mark.usefixtures("endless")
def test_a_tight_cache_keeps_what_runs(policy: Policy):
    """The short newcomer makes the arena allocate anew at the edge of its budget; the long ones must not be cut."""
    long = (prompt_ids(300), requests("long", [Sampling(max_new_tokens=97)] * 2))
    short = (prompt_ids(4), requests("short", [Sampling(max_new_tokens=20)]))
    engine = make_engine(policy, kv_tokens=3 * 397, prefill_tokens=300)
    found = finish(engine, [(0, *long), (60, *short)])
    assert engine._store._arena.num_rows == 3
    assert_right(stock_model(policy), [long, short], found)


def test_a_request_too_large_for_the_cache_runs_alone(policy: Policy):
    clock = Steps()
    groups = [(prompt_ids(10, i), requests(f"f{i}", [Sampling(max_new_tokens=20)])) for i in range(3)]
    found = finish(make_engine(policy, kv_tokens=1, clock=clock), [(0, *group) for group in groups], clock)
    assert most_at_once(found) == 1
    assert_right(stock_model(policy), groups, found)


def test_a_group_larger_than_the_engine(policy: Policy):
    clock = Steps()
    group = (prompt_ids(7), requests("big", [Sampling(max_new_tokens=3 + i % 9) for i in range(23)]))
    found = finish(make_engine(policy, max_running=5, clock=clock), [(0, *group)], clock)
    assert most_at_once(found) <= 5
    assert_right(stock_model(policy), [group], found)
    whole = run(make_engine(policy, max_running=32), group)
    for id, generation in whole.items():
        assert_same(found[id], generation)


def test_more_prompts_than_places_to_compute_them(policy: Policy):
    groups = [(prompt_ids(20, i), requests(f"f{i}", [Sampling(max_new_tokens=4)])) for i in range(30)]
    found = run(make_engine(policy, max_running=64, prefill_tokens=15), *groups)
    assert_right(stock_model(policy), groups, found)


def test_an_engine_is_idle_before_and_after_and_can_go_on(policy: Policy):
    engine = make_engine(policy)
    assert not engine.has_work
    assert engine.advance() == []
    for round in range(2):
        group = (prompt_ids(5), requests(f"r{round}", [Sampling(max_new_tokens=6)] * 3))
        engine.submit(*group)
        assert engine.has_work
        assert_right(stock_model(policy), [group], finish(engine))
        assert not engine.has_work


def test_only_counted_tokens_are_counted(policy: Policy):
    counted = requests("c", [Sampling(max_new_tokens=n) for n in (4, 9, 14)])
    quiet = [replace(r, counted=False) for r in requests("q", [Sampling(max_new_tokens=n) for n in (3, 11, 19)])]
    engine = make_engine(policy)
    found = run(engine, (prompt_ids(5), [counted[0], *quiet, *counted[1:]]))
    assert engine.sampled_tokens == sum(len(found[r.id].token_ids) for r in counted)
    assert all(len(found[r.id].token_ids) for r in quiet)


def test_kv_budget(policy: Policy):
    assert kv_budget(policy, 123) == 123
    # two layers of keys and values, two heads of 8 float32 each: 256 bytes a token
    assert kv_budget(policy, 0) == 2 * 2**30 // 256


@pytest.mark.usefixtures("endless")
def test_a_wave_of_prompts_starts_in_one_step(policy: Policy):
    """Prompts are computed in rounds until the step's budget is spent, so that equal answers stay side by side."""
    engine = make_engine(policy, max_running=40, prefill_tokens=400)
    for name in range(30):
        engine.submit(prompt_ids(10, seed=name), requests(str(name), [Sampling(max_new_tokens=4)]))
    engine.advance(max_steps=1)
    assert engine.sampled_tokens == 2 * 30  # the first token ends the prompt's pass, the second is decoded

    narrow = make_engine(policy, max_running=40, prefill_tokens=100)
    for name in range(30):
        narrow.submit(prompt_ids(10, seed=name), requests(str(name), [Sampling(max_new_tokens=4)]))
    narrow.advance(max_steps=1)
    assert narrow.sampled_tokens == 2 * 10

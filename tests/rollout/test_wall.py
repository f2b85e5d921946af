"""Sequences that decode for too long: cut, or parked for others and continued. Seconds here are engine steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plain_forward import (
    PromptGroup,
    Steps,
    assert_right,
    assert_same,
    finish,
    make_engine,
    most_at_once,
    prompt_ids,
    requests,
    run,
    stock_model,
    tight_engine,
)

from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Generation
from headrace.types import FinishReason, Sampling

pytestmark = pytest.mark.usefixtures("endless")

LONG = [(prompt_ids(6, i), requests(f"long{i}", [Sampling(max_new_tokens=60)])) for i in range(2)]
SHORT = [(prompt_ids(9, i), requests(f"short{i}", [Sampling(max_new_tokens=8)])) for i in range(4)]


def drive(policy: Policy, groups: list[PromptGroup], **changes: Any) -> tuple[Engine, dict[str, Generation]]:
    clock = Steps()
    engine = make_engine(policy, clock=clock, **changes)
    return engine, finish(engine, [(0, *group) for group in groups], clock)


def test_an_answer_is_cut_at_the_wall_with_what_it_has(policy: Policy):
    whole = run(make_engine(policy), *LONG, *SHORT)
    engine, found = drive(policy, [*LONG, *SHORT], max_wall_s=10)
    for id, generation in found.items():
        count = len(generation.token_ids)
        assert generation.finish is (FinishReason.WALL if id.startswith("long") else FinishReason.LENGTH)
        assert count == (11 if id.startswith("long") else 8)  # one from the prompt's pass, and one each second
        np.testing.assert_array_equal(generation.token_ids, whole[id].token_ids[:count])
        assert generation.finished_s - generation.started_s <= 10
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())


@pytest.mark.parametrize("on_wall", ["cut", "park"])
def test_what_is_not_counted_takes_the_time_it_needs(policy: Policy, on_wall: str):
    quiet = [(prompt, [replace(r, counted=False) for r in members]) for prompt, members in [*LONG, *SHORT]]
    engine, found = drive(policy, quiet, max_wall_s=10, on_wall=on_wall, max_running=2)
    assert {g.finish for g in found.values()} == {FinishReason.LENGTH}
    assert engine.counts.parks == 0


def test_parked_answers_make_room_and_come_to_what_they_would_have_come_to(policy: Policy):
    plain_engine, plain = drive(policy, [*LONG, *SHORT], max_running=2)
    engine, found = drive(policy, [*LONG, *SHORT], max_running=2, max_wall_s=10, on_wall="park")
    assert (plain_engine.counts.parks, engine.counts.preemptions) == (0, 0)
    assert engine.counts.parks >= 2
    assert most_at_once({id: g for id, g in found.items() if id.startswith("short")}) == 2
    for id, generation in found.items():
        assert_same(generation, plain[id])
        assert (generation.started_s < 30) == (plain[id].started_s < 30 or id.startswith("short"))
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())
    assert sorted(id for id, _ in engine.begun) == sorted(found)
    assert_right(stock_model(policy), [*LONG, *SHORT], found)


def test_nobody_is_parked_while_nobody_waits(policy: Policy):
    engine, _ = drive(policy, LONG, max_running=2, max_wall_s=10, on_wall="park")
    assert engine.counts.parks == 0


def test_nobody_is_parked_for_those_that_only_wait_for_their_prompts_pass(policy: Policy):
    """Twenty prompts come at once: rows are free for all of them, only places to compute prompts are few."""
    clock = Steps()
    engine = make_engine(policy, max_running=64, prefill_tokens=5, max_wall_s=10, on_wall="park", clock=clock)
    crowd = [(prompt_ids(9, i), requests(f"crowd{i}", [Sampling(max_new_tokens=8)])) for i in range(20)]
    found = finish(engine, [(0, *LONG[0]), *((15, *group) for group in crowd)], clock)
    assert engine.counts.parks == 0
    assert_right(stock_model(policy), [LONG[0], *crowd], found)


def test_long_answers_take_turns_and_none_starves(policy: Policy):
    groups = [(prompt_ids(6, i), requests(f"long{i}", [Sampling(max_new_tokens=60)])) for i in range(5)]
    engine, found = drive(policy, groups, max_running=2, max_wall_s=10, on_wall="park")
    assert max(g.started_s for g in found.values()) <= 30, "each began before any had twice its turn"
    assert_right(stock_model(policy), groups, found)
    assert engine.counts.parks <= 5 * 6, "each turn lasts as long as it should"


def test_a_group_waits_for_as_many_rows_as_it_needs(policy: Policy):
    pair = (prompt_ids(9), requests("pair", [Sampling(max_new_tokens=8)] * 2))
    engine, found = drive(policy, [*LONG, pair], max_running=2, max_wall_s=10, on_wall="park")
    assert engine.counts.parks >= 2
    assert found["pair/0"].started_s <= 13
    assert_right(stock_model(policy), [*LONG, pair], found)


def test_a_parked_answer_goes_on_under_a_newer_version_with_its_spans(make_policy: Callable[..., Policy]):
    policy, clock = make_policy(), Steps()
    engine = make_engine(policy, max_running=2, max_wall_s=10, on_wall="park", clock=clock)
    for group in [*LONG, *SHORT]:
        engine.submit(*group)
    while not engine.counts.parks:
        clock.now += 1
        assert not engine.advance(max_steps=1)
    parked = {f.requests[0].id: len(f.parked.sampled) for f in engine._waiting if f.parked is not None}
    assert parked
    engine.weights_changed(4)
    found = finish(engine, clock=clock)
    for id, count in parked.items():
        assert [(s.version, s.start - 6, s.end - 6) for s in found[id].spans] == [(0, 0, count), (4, count, 60)]


def test_an_abort_of_a_parked_answer_keeps_what_it_sampled(policy: Policy):
    clock = Steps()
    engine = make_engine(policy, max_running=2, max_wall_s=10, on_wall="park", clock=clock)
    for group in [*LONG, *SHORT]:
        engine.submit(*group)
    while not engine.counts.parks:
        clock.now += 1
        engine.advance(max_steps=1)
    engine.abort({r.id for _, members in [*LONG, *SHORT] for r in members})
    found = {g.id: g for g in engine.advance()}
    assert len(found) == 6
    assert all(g.finish is FinishReason.ABORT for g in found.values())
    assert min(len(found[f"long{i}/0"].token_ids) for i in range(2)) >= 10
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())
    assert not engine.has_work


def test_time_without_a_row_does_not_count(policy: Policy):
    """Preempted half-way through its time: it has the rest of it left when it goes on."""
    clock = Steps()
    engine, _ = tight_engine(policy, 10**5, max_wall_s=10, clock=clock)
    engine.submit(*LONG[0])
    for _ in range(5):
        clock.now += 1
        engine.advance(max_steps=1)
    engine._make_room()
    clock.now += 100
    found: list[Generation] = []
    while engine.has_work:
        clock.now += 1
        found += engine.advance(max_steps=1)
    assert [g.finish for g in found] == [FinishReason.WALL]
    assert len(found[0].token_ids) == 6 + 7  # in four seconds before, and the other six after

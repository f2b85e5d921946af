"""Drafts change how many tokens a step yields, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_forward import (
    PromptGroup,
    assert_right,
    assert_same,
    finish,
    make_engine,
    mixed_groups,
    plain_logprobs,
    prompt_ids,
    requests,
    run,
    stock_model,
)

from headrace.policy.policy import Policy
from headrace.rollout.draft import Drafter, Drafts
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Burst, Generation, Rows
from headrace.types import FinishReason, Sampling

Maker = Callable[..., Policy]


def groups(sampling: Sampling, *, count: int = 6, samples: int = 3, name: str = "s") -> list[PromptGroup]:
    """Groups of equal samplings, with prompts of 2 to 12 tokens and answers of different lengths."""
    return [
        (
            prompt_ids(2 + 2 * i),
            requests(
                f"{name}{i}",
                [replace(sampling, max_new_tokens=sampling.max_new_tokens - 5 * j) for j in range(samples)],
            ),
        )
        for i in range(count)
    ]


def both(policy: Policy, work: list[PromptGroup], **changes: Any) -> tuple[Engine, dict[str, Generation]]:
    """The engine that speculated and what it made, after comparing with one that did not."""
    plain = run(make_engine(policy, **changes), *work)
    engine = make_engine(policy, speculate=8, **changes)
    found = run(engine, *work)
    assert found.keys() == plain.keys()
    for id, generation in found.items():
        assert_same(generation, plain[id], atol=1e-4)  # a low temperature multiplies the last bits
        ours, theirs = generation.replay, plain[id].replay
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            for part in ("support_ids", "support_offsets", "routes"):
                np.testing.assert_array_equal(getattr(ours, part), getattr(theirs, part))
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in found.values())
    return engine, found


# ---- the same output


LOOPING = Sampling(max_new_tokens=90, temperature=0.05)


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize(
    "sampling",
    [
        LOOPING,
        replace(LOOPING, temperature=0.0),
        replace(LOOPING, temperature=0.2, top_k=5),
        replace(LOOPING, temperature=0.3, top_p=0.6, min_p=0.05),
    ],
)
def test_the_output_is_what_it_is_without_drafts(policy: Policy, sampling: Sampling):
    engine, _ = both(policy, groups(sampling))
    assert engine.counts.accepted_tokens > 200
    assert engine.counts.accepted_tokens <= engine.counts.drafted_tokens


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize(
    ("architecture", "changes"), [("Mistral", {"sliding_window": 6}), ("Qwen3Moe", {}), ("Llama", {})]
)
def test_other_architectures_too(make_policy: Maker, architecture: str, changes: dict[str, Any]):
    engine, _ = both(make_policy(architecture, **changes), groups(LOOPING, count=2))
    assert engine.counts.accepted_tokens > 50


@pytest.mark.usefixtures("endless")
def test_kinds_of_sampling_side_by_side(policy: Policy):
    kinds = [
        LOOPING,
        replace(LOOPING, temperature=1.0),
        replace(LOOPING, temperature=0.0),
        replace(LOOPING, temperature=0.3, top_p=0.7),
    ]
    engine, found = both(policy, [(prompt_ids(9), requests("mixed", kinds * 2))])
    assert engine.counts.accepted_tokens > 100
    assert sum(g.replay is not None for g in found.values()) == 2


def test_answers_end_where_they_do_without_drafts(policy: Policy):
    """End tokens, stop strings and the length limit come in the middle of what a step yields."""
    sampling = replace(LOOPING, top_k=5)  # so that the supports have to end there as well
    work = groups(sampling, samples=4)
    free = run(make_engine(policy), *work)
    late = [g.token_ids[60:62] for g in free.values() if len(g.token_ids) > 80]
    stop = tuple({policy.tokenizer.decode(tokens) for tokens in late[::3]})
    engine, found = both(policy, groups(replace(sampling, stop=stop), samples=4))
    assert engine.counts.accepted_tokens > 100
    assert {g.finish for g in found.values()} >= {FinishReason.STOP, FinishReason.LENGTH}

    policy.eos_ids = frozenset({int(late[0][0]), int(late[-1][1])})  # type: ignore[misc]
    engine, found = both(policy, work)
    assert engine.counts.accepted_tokens > 100
    assert {g.finish for g in found.values()} >= {FinishReason.EOS, FinishReason.LENGTH}


def test_mixed_lengths_and_many_requests(policy: Policy):
    work = mixed_groups()
    _, found = both(policy, work, max_running=6, prefill_tokens=10)
    assert_right(stock_model(policy), work, found)


@pytest.mark.usefixtures("endless")
def test_a_row_that_made_room_goes_on(policy: Policy):
    """As when the cache runs out: the row's tokens are kept and its cache is computed again."""
    work = groups(LOOPING, count=2)
    plain = run(make_engine(policy), *work)
    engine = make_engine(policy, speculate=8)
    for group in work:
        engine.submit(*group)
    found: dict[str, Generation] = {}
    for step in range(1000):
        if not engine.has_work:
            break
        if step % 7 == 6 and len(engine._rows):
            with torch.inference_mode():
                engine._make_room()
        found |= {g.id: g for g in engine.advance(max_steps=1)}
    assert engine.counts.preemptions > 3
    assert engine.counts.accepted_tokens > 50
    for id, generation in plain.items():
        assert_same(found[id], generation, atol=1e-4)


@pytest.mark.usefixtures("endless")
def test_log_probs_are_those_of_a_plain_forward(policy: Policy):
    work = groups(LOOPING, count=3)
    _, found = both(policy, work)
    assert_right(stock_model(policy), work, found, atol=2e-4)  # divided by a temperature of 0.05


# ---- weights that change


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_an_update_under_way(make_policy: Maker, on_update: str):
    """Tokens up to the update are those of the old weights; every span's log-probs are its own version's."""
    work = groups(LOOPING, count=3)
    untouched = run(make_engine(make_policy()), *work)
    policy = make_policy()
    engine = make_engine(policy, speculate=8, on_update=on_update)
    for group in work:
        engine.submit(*group)
    found: dict[str, Generation] = {}
    models = [stock_model(policy)]
    for step in range(500):
        if step == 25:
            for parameter in policy.model.parameters():
                parameter.data.mul_(1.03)
            models.append(stock_model(policy))
            engine.weights_changed(1)
        found |= {g.id: g for g in engine.advance(max_steps=1)}
        if not engine.has_work:
            break
    assert engine.counts.accepted_tokens > 50
    for prompt, members in work:
        for request in members:
            generation = found[request.id]
            assert [span.version for span in generation.spans] == [0, 1]
            cut = generation.spans[0].end - len(prompt)
            np.testing.assert_array_equal(generation.token_ids[:cut], untouched[request.id].token_ids[:cut])
            if on_update == "recompute":
                new = plain_logprobs(models[1], prompt, generation.token_ids, request.sampling)
                np.testing.assert_allclose(generation.logprobs[cut:], new[cut:], rtol=0, atol=1e-3)


@pytest.mark.usefixtures("endless")
def test_an_update_that_changes_nothing_changes_nothing(policy: Policy):
    work = groups(LOOPING, count=2)
    plain = run(make_engine(policy), *work)
    engine = make_engine(policy, speculate=8, on_update="recompute")
    engine.submit(*work[0])
    engine.submit(*work[1])
    found: dict[str, Generation] = {}
    for version in range(1, 500):
        found |= {g.id: g for g in engine.advance(max_steps=3)}
        engine.weights_changed(version)
        if not engine.has_work:
            break
    assert engine.counts.accepted_tokens > 50
    for id, generation in plain.items():
        np.testing.assert_array_equal(found[id].token_ids, generation.token_ids)
        assert found[id].spans[-1].end == generation.spans[-1].end


# ---- drafting


@pytest.mark.usefixtures("endless")
def test_an_answer_that_repeats_itself_takes_few_steps(policy: Policy):
    engine = make_engine(policy, speculate=8)
    engine.submit(prompt_ids(6), requests("loop", [Sampling(max_new_tokens=300, temperature=0.0)]))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps < 150
    assert engine.counts.accepted_tokens / engine.num_drafts > 3


def test_random_answers_are_hardly_drafted(policy: Policy):
    engine = make_engine(policy, speculate=8, max_running=64)
    run(engine, *groups(Sampling(max_new_tokens=60), count=8, samples=8))
    assert engine.counts.drafted_tokens < 0.02 * engine.sampled_tokens


def sequence(rows: Rows, prompt: Any, tokens: Any, name: str, limit: int = 1000) -> int:
    """A row that has sampled these tokens."""
    row = len(rows)
    rows.add(prompt, requests(name, [Sampling(max_new_tokens=limit)]), 0.0, np.empty((len(prompt), 0, 0), np.uint8))
    extend(rows, row, tokens)
    return row


def extend(rows: Rows, row: int, tokens: Any, drafter: Drafter | None = None) -> None:
    """A drafter learns from each token before the next."""
    for token in tokens:
        rows.append(row, Burst(np.array([[token]]), np.zeros((1, 1), np.float32), np.ones(1, np.int64)), 0)
        if drafter is not None:
            drafter.learn(rows)


def drafted(drafter: Drafter, rows: Rows, row: int) -> list[int]:
    """Several looks, because the drafter rests after one that found nothing."""
    for _ in range(40):
        drafts = drafter.propose(rows, 1)
        if drafts is not None:
            return drafts.tokens[row, : drafts.counts[row]].tolist()
    return []


def make_drafter() -> Drafter:
    return Drafter(longest=8, max_running=128, device="cpu")


ANSWER = np.random.default_rng(0).integers(3, 99, 60)


def test_it_learns_from_a_sibling_that_is_ahead():
    drafter, rows, prompt = make_drafter(), Rows(), prompt_ids(10)
    sequence(rows, prompt, ANSWER, "ahead")
    drafter.learn(rows)
    behind = sequence(rows, prompt, ANSWER[:20], "behind")
    assert drafted(drafter, rows, behind) == ANSWER[20:28].tolist()


def test_it_learns_from_an_earlier_epoch_of_the_same_prompt_only():
    drafter, prompt = make_drafter(), prompt_ids(10)
    for _ in range(2):
        rows = Rows()
        sequence(rows, prompt, ANSWER, "earlier")
        drafter.learn(rows)
    rows = Rows()
    same = sequence(rows, prompt, ANSWER[:1], "later")
    assert drafted(drafter, rows, same) == ANSWER[1:9].tolist()
    rows = Rows()
    other = sequence(rows, prompt_ids(10, seed=1), ANSWER[:20], "other")
    assert drafted(drafter, rows, other) == []


def test_it_copies_from_the_prompt():
    drafter, rows = make_drafter(), Rows()
    prompt = ANSWER.astype(np.int32)
    drafter.read(prompt)
    row = sequence(rows, prompt, ANSWER[10:30], "copy")
    assert drafted(drafter, rows, row) == ANSWER[30:38].tolist()
    other = sequence(rows, prompt_ids(10), ANSWER[10:30], "other")
    assert drafted(drafter, rows, other) == []


def test_it_stops_when_its_guesses_turn_out_wrong():
    drafter, rows, prompt = make_drafter(), Rows(), prompt_ids(10)
    row = sequence(rows, prompt, [], "row")
    extend(rows, row, np.tile(ANSWER[:10], 4), drafter)
    assert drafted(drafter, rows, row) == ANSWER[:8].tolist()
    # a context of three that was seen before, and another token after it, again and again
    rng = np.random.default_rng(1)
    for _ in range(100):
        extend(rows, row, [*ANSWER[:3], *rng.integers(100, 10**6, 3)], drafter)
    extend(rows, row, ANSWER[:3], drafter)
    assert drafted(drafter, rows, row) == []


@pytest.mark.parametrize("num_rows", [1, 8, 64, 200])
def test_more_rows_get_shorter_drafts(num_rows: int):
    drafter, rows, prompt = make_drafter(), Rows(), prompt_ids(10)
    sequence(rows, prompt, ANSWER, "ahead")
    drafter.learn(rows)
    rows = Rows()
    for i in range(num_rows):
        sequence(rows, prompt, ANSWER[:20], str(i))
    drafts = drafter.propose(rows, 1)
    total = 0 if drafts is None else int(drafts.counts.sum())
    assert total + num_rows <= max(128, num_rows)
    if num_rows <= 8:
        assert total == 8 * num_rows


def test_a_draft_ends_before_the_length_limit():
    drafter, rows, prompt = make_drafter(), Rows(), prompt_ids(10)
    row = sequence(rows, prompt, [], "row", limit=200)
    extend(rows, row, [*np.tile(ANSWER[:10], 19), *ANSWER[:6]], drafter)  # 196
    assert drafted(drafter, rows, row) == ANSWER[6:9].tolist()


def test_drafts_are_judged_up_to_the_first_wrong_token():
    drafts = Drafts(np.array([[5, 6, 7], [8, 9, 0], [1, 0, 0], [0, 0, 0]]), np.array([3, 2, 1, 0]))
    which, ahead = drafts.cells
    assert which.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert ahead.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]
    assert drafts.inputs(np.array([50, 51, 52, 53])).tolist() == [50, 5, 6, 7, 51, 8, 9, 52, 1, 53]
    #                    right, wrong, (right), -   right, right, -   wrong, -   -
    drawn = np.array([5, 60, 7, 4, 8, 9, 2, 3, 3, 1])
    burst = drafts.accepted(Burst(drawn[None], np.arange(10, dtype=np.float32)[None], np.ones(10, np.int64)))
    assert (burst.counts - 1).tolist() == [1, 2, 0, 0]
    answers = [burst.tokens[:count, row].tolist() for row, count in enumerate(burst.counts)]
    assert answers == [[5, 60], [8, 9, 2], [3], [1]]
    assert burst.logprobs[1:3, 1].tolist() == [5, 6]


def test_speculation_is_off_unless_asked_for(policy: Policy):
    engine = make_engine(policy)
    finish(engine, [(0, *group) for group in groups(LOOPING, count=1)])
    assert engine.counts.drafted_tokens == 0

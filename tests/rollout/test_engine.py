"""Continuous batching gives what a plain forward pass gives, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from plain_forward import (
    allowed_ids,
    assert_right,
    assert_same,
    finish,
    make_engine,
    mixed_groups,
    next_logits,
    prompt_ids,
    requests,
    run,
    stock_model,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.policy.policy import Policy
from headrace.rollout import store as store_module
from headrace.rollout.rows import Generation
from headrace.rollout.store import Arena, Chunk, DecodePlan, PrefillPlan
from headrace.types import FinishReason, Sampling, Span

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 6},
    "Qwen3Moe": {},
    "Cohere": {"logit_scale": 0.3},  # factors of the logits
    "Granite": {"logits_scaling": 3.0},
    "Cohere2": {"logit_scale": 0.3, "sliding_window": 6},
}


# ---- log-probs


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES.items(), ids=ARCHITECTURES.keys())
def test_logprobs_are_those_of_a_plain_forward(
    make_policy: Callable[..., Policy],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    changes: dict[str, Any],
):
    policy = make_policy(architecture, **changes)
    events: list[str] = []

    class RecordedPrefill(PrefillPlan):
        def __init__(self, arena: Arena, chunks: list[Chunk], num_short: int) -> None:
            super().__init__(arena, chunks, num_short)
            events.extend("later chunk" if chunk.start else "first chunk" for chunk in chunks)

    class RecordedDecode(DecodePlan):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            events.append("decode")

    monkeypatch.setattr(store_module, "PrefillPlan", RecordedPrefill)
    monkeypatch.setattr(store_module, "DecodePlan", RecordedDecode)
    groups = mixed_groups()
    engine = make_engine(policy, max_running=5, prefill_tokens=7)
    found = finish(engine, [(4 * i, *group) for i, group in enumerate(groups)])
    assert_right(stock_model(policy), groups, found)
    # prompts were cut, and decoding went on between their parts
    assert "later chunk, decode, later chunk" in ", ".join(events)
    assert max(len(g.token_ids) for g in found.values()) > 12


def test_a_window_is_what_makes_the_difference(make_policy: Callable[..., Policy]):
    """Without the window the comparison with the windowed model fails, so the sequences are long enough to tell."""
    groups = mixed_groups()
    windowed = stock_model(make_policy("Mistral", sliding_window=6))
    found = run(make_engine(make_policy("Mistral", sliding_window=None)), *groups)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_right(windowed, groups, found)


def test_many_layers_of_truncation_and_temperature_in_one_batch(policy: Policy):
    samplings = [
        Sampling(max_new_tokens=12),
        Sampling(max_new_tokens=12, temperature=0.6),
        Sampling(max_new_tokens=12, temperature=1.5, top_k=4),
        Sampling(max_new_tokens=12, top_p=0.7),
        Sampling(max_new_tokens=12, temperature=1.3, top_k=20, top_p=0.9, min_p=0.1),
    ]
    groups = [(prompt_ids(n), requests(f"p{n}", samplings)) for n in (4, 15)]
    assert_right(stock_model(policy), groups, run(make_engine(policy), *groups))


@pytest.mark.usefixtures("endless")
def test_the_arena_grows_under_way(policy: Policy):
    """Beyond 64 and 128 tokens, by decoding and by a prompt that is still being computed."""
    groups = [
        (prompt_ids(3), requests("long", [Sampling(max_new_tokens=190), Sampling(max_new_tokens=20)])),
        (prompt_ids(170), requests("late", [Sampling(max_new_tokens=30)] * 2)),
    ]
    engine = make_engine(policy, prefill_tokens=50)
    engine.submit(*groups[0])
    engine.advance(max_steps=1)
    first = engine._store._arena.capacity
    found = finish(engine, [(5, *groups[1])])
    assert 3 < first < 170
    assert engine._store._arena.capacity > 170
    assert_right(stock_model(policy), groups, found)
    assert len(found["long/0"].token_ids) == 190


@pytest.mark.usefixtures("endless")
def test_long_tailed_lengths_leave_no_holes(policy: Policy):
    """Rows end in every order; whoever moves into a hole keeps its own tokens, cache, seed and limit."""
    lengths = [int(x) for x in np.random.default_rng(0).pareto(1.0, 30) * 4 + 1]
    limits = [min(x, 70) for x in lengths]
    assert (min(limits), max(limits)) == (1, 70)
    group = (prompt_ids(6), requests("tail", [Sampling(max_new_tokens=n, temperature=1 + n / 100) for n in limits]))
    found = run(make_engine(policy, max_running=30), group)
    assert [len(found[r.id].token_ids) for r in group[1]] == limits
    assert_right(stock_model(policy), [group], found)


# ---- batch invariance


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
def test_a_request_samples_the_same_in_any_batch(make_policy: Callable[..., Policy], architecture: str):
    policy = make_policy(architecture)
    groups = mixed_groups()
    crowd = run(make_engine(policy, max_running=64, prefill_tokens=4096), *groups)
    alone: dict[str, Generation] = {}
    for prompt, members in groups:
        for request in members:
            alone |= run(make_engine(policy), (prompt, [request]))
    others = {
        "another order": run(make_engine(policy, max_running=64), *((p, m[::-1]) for p, m in groups[::-1])),
        "queueing": run(make_engine(policy, max_running=3), *groups),
        "little cache": run(make_engine(policy, max_running=64, kv_tokens=900), *groups),
        "chunked prefill": run(make_engine(policy, prefill_tokens=3), *groups),
        "one by one": finish(make_engine(policy), [(9 * i, *group) for i, group in enumerate(groups)]),
        "alone": alone,
    }
    for found in others.values():
        assert found.keys() == crowd.keys()
        for id, generation in crowd.items():
            assert_same(found[id], generation)


def test_a_request_samples_the_same_beside_other_samplings(policy: Policy):
    """A truncating neighbour takes the batch down another path; a plain request must not notice."""
    prompt = prompt_ids(9)
    for sampling in (
        Sampling(max_new_tokens=20),
        Sampling(max_new_tokens=20, temperature=0.7),
        Sampling(max_new_tokens=20, top_p=0.8),
        Sampling(max_new_tokens=20, temperature=0.0),
    ):
        (request,) = requests("it", [sampling])
        neighbours = requests("n", [Sampling(max_new_tokens=15, top_k=3), Sampling(max_new_tokens=25, temperature=0.0)])
        alone = run(make_engine(policy), (prompt, [request]))["it/0"]
        beside = run(make_engine(policy), (prompt, [neighbours[0], request, neighbours[1]]))["it/0"]
        assert_same(beside, alone)
        assert (beside.replay is None) == (alone.replay is None) == (not sampling.truncates)


def test_different_seeds_sample_differently(policy: Policy):
    group = (prompt_ids(9), requests("s", [Sampling(max_new_tokens=12)] * 12))
    found = run(make_engine(policy), group)
    assert len({tuple(g.token_ids) for g in found.values()}) == 12


# ---- replay


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=15, top_p=0.8),
        Sampling(max_new_tokens=15, top_k=6, temperature=1.4),
        Sampling(max_new_tokens=15, min_p=0.15, temperature=0.8),
        Sampling(max_new_tokens=15, top_k=30, top_p=0.9, min_p=0.05, temperature=1.2),
    ],
    ids=["top_p", "top_k", "min_p", "all"],
)
def test_replay_holds_what_could_be_sampled(policy: Policy, sampling: Sampling):
    model, prompt = stock_model(policy), prompt_ids(11)
    members = requests("r", [sampling, Sampling(max_new_tokens=9), sampling, replace(sampling, max_new_tokens=4)])
    found = run(make_engine(policy), (prompt, members))
    sizes = set()
    for request in members:
        generation = found[request.id]
        if not request.sampling.truncates:
            assert generation.replay is None
            continue
        assert generation.replay is not None
        ids, offsets = generation.replay.support_ids, generation.replay.support_offsets
        assert ids is not None
        assert offsets is not None
        assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
        assert len(offsets) == len(generation.token_ids) + 1
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        logits = next_logits(model, np.concatenate([prompt, generation.token_ids]))[len(prompt) - 1 : -1]
        for i, token in enumerate(generation.token_ids):
            subset = ids[offsets[i] : offsets[i + 1]]
            np.testing.assert_array_equal(np.sort(subset), np.sort(allowed_ids(logits[i], request.sampling)))
            assert token in subset
            sizes.add(len(subset))
    assert max(sizes) < 99


def test_no_replay_when_nothing_truncates(policy: Policy):
    members = requests("r", [Sampling(max_new_tokens=5, temperature=0.5), Sampling(max_new_tokens=5, temperature=0.0)])
    assert all(g.replay is None for g in run(make_engine(policy), (prompt_ids(5), members)).values())


# ---- ends


def test_eos_and_length_end_an_answer(policy: Policy):
    (eos,) = policy.eos_ids
    group = (prompt_ids(4), requests("e", [Sampling(max_new_tokens=60, temperature=1.5)] * 40))
    found = run(make_engine(policy, max_running=40), group)
    for generation in found.values():
        ended = generation.token_ids[-1] == eos
        assert eos not in generation.token_ids[:-1]
        assert generation.finish is (FinishReason.EOS if ended else FinishReason.LENGTH)
        assert ended or len(generation.token_ids) == 60
        assert generation.spans == (Span(version=0, start=4, end=4 + len(generation.token_ids)),)
    assert {g.finish for g in found.values()} == {FinishReason.EOS, FinishReason.LENGTH}


def test_eos_as_the_last_allowed_token_is_eos(policy: Policy):
    (eos,) = policy.eos_ids
    group = (prompt_ids(4), requests("e", [Sampling(max_new_tokens=60, temperature=1.5)] * 40))
    found = run(make_engine(policy, max_running=40), group)
    exact = [
        replace(r, sampling=replace(r.sampling, max_new_tokens=len(found[r.id].token_ids)))
        for r in group[1]
        if found[r.id].finish is FinishReason.EOS
    ]
    again = run(make_engine(policy), (group[0], exact))
    assert len(again) > 5
    assert {(g.finish, g.token_ids[-1]) for g in again.values()} == {(FinishReason.EOS, eos)}


@pytest.mark.usefixtures("endless")
def test_a_stop_string_over_several_tokens_ends_an_answer(policy: Policy):
    prompt = prompt_ids(5)
    (free,) = requests("s", [Sampling(max_new_tokens=50)])
    tokens = run(make_engine(policy), (prompt, [free]))["s/0"].token_ids
    pieces = [policy.tokenizer.decode([token]) for token in tokens]
    stop = "".join(pieces[20:24])
    assert [len(piece) for piece in pieces[20:24]] == [1, 1, 1, 1]
    assert stop not in "".join(pieces[:23])
    beside = requests("other", [Sampling(max_new_tokens=50)] * 3)
    for stops in ((stop,), ("never in there", stop, "".join(pieces[40:]))):
        stopping = replace(free, sampling=replace(free.sampling, stop=stops))
        found = run(make_engine(policy), (prompt, [beside[0], stopping, *beside[1:]]))
        np.testing.assert_array_equal(found["s/0"].token_ids, tokens[:24])
        assert found["s/0"].finish is FinishReason.STOP
        assert policy.tokenizer.decode(found["s/0"].token_ids).endswith(stop)
        assert all(len(found[r.id].token_ids) == 50 for r in beside)


def test_a_stop_string_may_begin_and_end_inside_a_token(policy: Policy):
    pieces = ["<eos>", *("".join(letters) for n in (1, 2, 3, 4) for letters in product("xyz", repeat=n))][:99]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<eos>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)
    policy = Policy(policy.model, tokenizer)
    sampling = Sampling(max_new_tokens=40, temperature=2.0)
    free = requests("f", [sampling] * 8)
    stopping = [replace(r, sampling=replace(sampling, stop=("yxxyz", "zzyz"))) for r in free]
    without = run(make_engine(policy), (prompt_ids(3), free))
    found = run(make_engine(policy), (prompt_ids(3), stopping))
    reasons = []
    for r in free:
        tokens = without[r.id].token_ids
        texts = [tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
        ends = [n for n, text in enumerate(texts) if "yxxyz" in text or "zzyz" in text]
        expected = tokens[: ends[0]] if ends else tokens
        np.testing.assert_array_equal(found[r.id].token_ids, expected)
        reasons.append(found[r.id].finish)
        if ends and tokens[ends[0] - 1] not in policy.eos_ids:
            assert found[r.id].finish is FinishReason.STOP
    assert reasons.count(FinishReason.STOP) >= 4
    assert reasons.count(FinishReason.STOP) < 8

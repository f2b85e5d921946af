"""Everything at once: whatever meets in an engine, no request and no token is lost, counted twice or misnamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from plain_forward import (
    PromptGroup,
    Steps,
    make_engine,
    perturb,
    plain_logprobs,
    prompt_ids,
    requests,
    run,
    stock_model,
    tight_engine,
)

from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Generation, Request
from headrace.types import FinishReason, IntArray, Sampling

PAGES = 8
KINDS = (
    Sampling(max_new_tokens=1),
    Sampling(max_new_tokens=1, temperature=0.05),
    Sampling(max_new_tokens=1, temperature=0.0),
    Sampling(max_new_tokens=1, temperature=0.3, top_k=7),
    Sampling(max_new_tokens=1, temperature=0.5, top_p=0.8, min_p=0.02),
    Sampling(max_new_tokens=1, stop=("7", "ab", "=", "q")),
)
CUT = (FinishReason.ABORT, FinishReason.WALL)


@dataclass(frozen=True)
class Scene:
    """What comes to an engine at which step, and how the engine is set.

    Example:
        Scene(arrivals=[(0, prompt, requests)], aborts=[(9, {"f0/1"})], updates=[12], squeezes=[15],
            settings={"speculate": 8})
    """

    arrivals: list[tuple[int, IntArray, list[Request]]]
    aborts: list[tuple[int, set[str]]]
    updates: list[int]
    squeezes: list[int]
    settings: dict[str, Any]
    versions: dict[int, Any] = field(default_factory=dict)  # a stock model of each, as the scene is played

    @property
    def groups(self) -> list[PromptGroup]:
        """All that arrives."""
        return [(prompt, members) for _, prompt, members in self.arrivals]


def scene(seed: int, *, num_updates: int, truncated: bool) -> Scene:
    rng = np.random.default_rng(seed)
    kinds = KINDS if truncated else tuple(kind for kind in KINDS if not kind.truncates)
    arrivals = []
    for i in range(6):
        lengths = rng.choice([1, 30, 100, 150], rng.integers(1, 5))
        samplings = [replace(kinds[rng.integers(len(kinds))], max_new_tokens=int(n)) for n in lengths]
        members = [replace(r, counted=bool(rng.random() < 0.8)) for r in requests(f"f{i}", samplings, seed)]
        arrivals.append((int(rng.integers(20)), prompt_ids(int(rng.integers(1, 70)), seed), members))
    ids = [r.id for _, _, members in arrivals for r in members]
    settings: dict[str, Any] = {
        "max_running": int(rng.integers(4, 9)),
        "prefill_tokens": int(rng.choice([9, 40, 400])),
        "on_update": str(rng.choice(["keep", "recompute"])),
        "max_wall_s": float(rng.choice([0, 0, 8, 20])),
        "on_wall": str(rng.choice(["park", "park", "cut"])),
        "speculate": int(rng.choice([0, 3, 8])),
        "most_steps": int(rng.choice([1, 5, 16])),
    }
    return Scene(
        arrivals=sorted(arrivals, key=lambda arrival: arrival[0]),
        aborts=[(int(rng.integers(60)), {str(id) for id in rng.choice(ids, 2)}) for _ in range(2)],
        updates=rng.integers(1, 60, num_updates).tolist(),
        squeezes=rng.integers(1, 60, 6).tolist(),
        settings=settings,
    )


def play(policy: Policy, scene: Scene, **changes: Any) -> tuple[Engine, dict[str, Generation], list[tuple[str, int]]]:
    """The engine at its end, what came back from it, and what it said had begun."""
    clock, found = Steps(), {}
    engine, store = tight_engine(policy, PAGES * 64, clock=clock, **(scene.settings | changes))
    scene.versions[0] = stock_model(policy)
    while engine.has_work or clock.now < 60:
        for _, prompt, members in (a for a in scene.arrivals if a[0] == clock.now):
            engine.submit(prompt, members)
        for _, ids in (a for a in scene.aborts if a[0] == clock.now):
            engine.abort(ids)
        if clock.now in scene.updates:
            perturb(policy, engine.version + 1)
            engine.weights_changed(engine.version + 1)
            scene.versions[engine.version] = stock_model(policy)
        if clock.now in scene.squeezes and len(engine._rows):
            with torch.inference_mode():
                engine._make_room()
        clock.now += 1
        for generation in engine.advance(max_steps=1):
            assert generation.id not in found, "it came back twice"
            found[generation.id] = generation
        assert clock.now < 3000, "the engine does not come to an end"
    assert store.tables.pages.num_free == PAGES, "a page did not come back"
    assert not store.tables.rows
    return engine, found, list(engine.begun)


def assert_books(scene: Scene, engine: Engine, found: dict[str, Generation], begun: list[tuple[str, int]]) -> None:
    """Every request came back, and its tokens were counted once and named by the version that sampled them."""
    members = {r.id: (prompt, r) for prompt, group in scene.groups for r in group}
    assert found.keys() == members.keys()
    counted = [g for id, g in found.items() if members[id][1].counted]
    assert engine.sampled_tokens == sum(len(g.token_ids) for g in counted)
    assert len(begun) == len(dict(begun))
    assert dict(begun) == {id: g.spans[0].version for id, g in found.items() if len(g.token_ids)}
    for id, (prompt, request) in members.items():
        generation = found[id]
        versions = [span.version for span in generation.spans]
        assert versions == sorted(set(versions))
        edges = [len(prompt), *(span.end for span in generation.spans)]
        assert [span.start for span in generation.spans] == edges[:-1]
        assert edges[-1] == len(prompt) + len(generation.token_ids) == len(prompt) + len(generation.logprobs)
        assert (generation.finish is FinishReason.LENGTH) <= (
            len(generation.token_ids) == request.sampling.max_new_tokens
        )
        if request.sampling.truncates and len(generation.token_ids):
            assert generation.replay is not None
            assert generation.replay.support_ids is not None
            supports = np.split(generation.replay.support_ids, generation.replay.support_offsets)[1:-1]
            assert all(token in ids for token, ids in zip(generation.token_ids, supports, strict=True))


def assert_prefix(ours: Generation, whole: Generation) -> None:
    """As far as it goes, it is what an engine that is never disturbed makes of it."""
    count = len(ours.token_ids)
    assert count == len(whole.token_ids) or ours.finish in CUT
    np.testing.assert_array_equal(ours.token_ids, whole.token_ids[:count])
    np.testing.assert_allclose(ours.logprobs, whole.logprobs[:count], rtol=0, atol=2e-4)
    if ours.finish not in CUT:
        assert ours.finish is whole.finish
    if count and ours.replay is not None and whole.replay is not None and ours.replay.routes is not None:
        known = len(ours.replay.routes) - 1
        np.testing.assert_array_equal(ours.replay.routes[:known], whole.replay.routes[:known])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_without_updates_every_answer_is_that_of_an_undisturbed_engine(make_policy: Callable[..., Policy], seed: int):
    policy = make_policy("Qwen3Moe" if seed % 3 == 2 else "Qwen3")
    mix = scene(seed, num_updates=0, truncated=bool(seed % 2))
    whole = run(make_engine(policy), *mix.groups)
    outcome = play(policy, mix)
    assert_books(mix, *outcome)
    for id, generation in outcome[1].items():
        assert_prefix(generation, whole[id])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 18))
def test_with_updates_every_token_has_the_log_prob_of_its_version(make_policy: Callable[..., Policy], seed: int):
    policy = make_policy()
    mix = scene(seed, num_updates=3, truncated=bool(seed % 2))
    outcome = play(policy, mix)
    assert_books(mix, *outcome)
    for prompt, members in mix.groups:
        for request in members:
            generation = outcome[1][request.id]
            if request.sampling.temperature == 0.0:
                assert not generation.logprobs.any()
                continue
            if len(generation.spans) > 1 and mix.settings["on_update"] == "keep":
                continue  # part of its cache is an older version's
            for span in generation.spans:
                part = slice(span.start - len(prompt), span.end - len(prompt))
                expected = plain_logprobs(mix.versions[span.version], prompt, generation.token_ids, request.sampling)
                np.testing.assert_allclose(generation.logprobs[part], expected[part], rtol=0, atol=5e-4)


@pytest.mark.usefixtures("endless")
def test_new_weights_never_wait_for_more_than_one_burst(policy: Policy):
    engine, _ = tight_engine(policy, PAGES * 64, most_steps=16)
    engine.submit(prompt_ids(5), requests("a", [Sampling(max_new_tokens=100)]))
    before = 1  # that of the prompt's pass
    while not engine.advance():
        assert engine.sampled_tokens - before <= 16
        before = engine.sampled_tokens


@pytest.mark.usefixtures("endless")
def test_what_a_burst_samples_beyond_an_answers_end_is_thrown_away(policy: Policy):
    prompt, plain = prompt_ids(5), Sampling(max_new_tokens=60)
    (free,) = run(make_engine(policy), (prompt, requests("a", [plain]))).values()
    ends = [13, 33, 60, 1, 2, 23]
    stops = [replace(plain, stop=(policy.tokenizer.decode(free.token_ids[end - 3 : end]),)) for end in ends[:3]]
    cut = [replace(plain, max_new_tokens=n) for n in ends[3:]]
    (seed,) = {r.seed for r in requests("a", [plain])}
    members = [Request(id=str(i), sampling=s, seed=seed) for i, s in enumerate([*stops, *cut])]
    engine, _ = tight_engine(policy, 10**4, most_steps=16)
    found = run(engine, (prompt, members))
    for id, end in enumerate(ends):
        np.testing.assert_array_equal(found[str(id)].token_ids, free.token_ids[:end])
        assert found[str(id)].finish is (FinishReason.STOP if id < 3 else FinishReason.LENGTH)
    assert engine.sampled_tokens == sum(ends)

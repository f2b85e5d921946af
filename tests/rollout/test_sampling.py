"""Tokens come as often as the distribution says, and the log-probs are those of that distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from plain_forward import Doubles, allowed_ids, distribution, finish, make_engine, next_logits, prompt_ids, stock_model

from headrace.policy.policy import Policy
from headrace.rollout.rows import Generation, Request, request_seed, uniforms
from headrace.rollout.store import draw
from headrace.types import Sampling

NUM_DRAWS, FAMILY = 20_000, 250
CASES = {
    "plain": Sampling(max_new_tokens=1),
    "cool": Sampling(max_new_tokens=1, temperature=0.6),
    "hot": Sampling(max_new_tokens=1, temperature=1.7),
    "top_k": Sampling(max_new_tokens=1, top_k=7),
    "top_p": Sampling(max_new_tokens=1, top_p=0.6),
    "min_p": Sampling(max_new_tokens=1, min_p=0.2),
    "all": Sampling(max_new_tokens=1, temperature=1.4, top_k=40, top_p=0.8, min_p=0.1),
}
PROMPT = prompt_ids(6)


@pytest.fixture
def sharp(policy: Policy) -> Policy:
    """A policy with strong opinions: its most likely token is hundreds of times likelier than its least likely."""
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(4)
    return policy


def chi_square(counts: npt.NDArray[np.int64], probs: Doubles) -> float:
    """How many standard deviations Pearson's statistic lies above its mean, by Wilson and Hilferty's cube root.

    Cells that expect less than 5 are pooled.
    """
    expected = probs * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def fits(counts: npt.NDArray[np.int64], probs: Doubles) -> bool:
    """At three and a half standard deviations: a chance of 1 in 4,000 to refuse what is right."""
    return bool((counts[probs == 0] == 0).all()) and chi_square(counts, probs) < 3.5


def draws(
    policy: Policy, samplings: Sequence[Sampling], seed: int, count: int = NUM_DRAWS
) -> list[tuple[Sampling, Generation]]:
    """`count` answers to one prompt; the samplings take turns, and so do four run seeds."""
    members = [
        Request(
            id=str(i),
            sampling=samplings[i % len(samplings)],
            seed=request_seed(seed + i % 4, 1, i // FAMILY, i % FAMILY),
        )
        for i in range(count)
    ]
    engine = make_engine(policy, max_running=8 * FAMILY)
    for start in range(0, count, FAMILY):
        engine.submit(PROMPT, members[start : start + FAMILY])
    found = finish(engine)
    return [(request.sampling, found[request.id]) for request in members]


def assert_drawn_from(found: list[Generation], logits: Doubles, sampling: Sampling) -> None:
    probs = distribution(logits, sampling)
    tokens = np.array([g.token_ids[0] for g in found])
    counts = np.bincount(tokens, minlength=len(probs))
    assert fits(counts, probs)
    logprobs = np.array([g.logprobs[0] for g in found])
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), rtol=0, atol=1e-5)
    # the test can tell: a little more heat would be noticed
    warmer = distribution(logits, replace(sampling, temperature=1.15 * sampling.temperature))
    assert not fits(counts, warmer)
    if sampling.truncates:
        assert 1 < (probs > 0).sum() < len(probs) / 2
        assert (counts[probs > 0] > 0).all()


# ---- frequencies


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sampling"), CASES.items(), ids=CASES.keys())
def test_frequencies_are_the_distribution(sharp: Policy, name: str, sampling: Sampling):
    logits = next_logits(stock_model(sharp), PROMPT)[-1]
    found = draws(sharp, [sampling], seed=100 * list(CASES).index(name))
    assert_drawn_from([generation for _, generation in found], logits, sampling)


def test_frequencies_with_another_sampling_in_every_row(sharp: Policy):
    logits = next_logits(stock_model(sharp), PROMPT)[-1]
    samplings = [CASES["plain"], CASES["cool"], CASES["top_k"], CASES["top_p"], CASES["all"]]
    found = draws(sharp, samplings, seed=7)
    for sampling in samplings:
        assert_drawn_from([g for s, g in found if s is sampling], logits, sampling)


def test_frequencies_of_three_tokens_in_a_row(sharp: Policy):
    """The second and the third come from decoding, each with noise of its own: 27 answers, each with its frequency."""
    sampling = Sampling(max_new_tokens=3, top_k=3, temperature=1.5)
    model = stock_model(sharp)
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for answer, prob in probs.items():
            step = distribution(next_logits(model, np.concatenate([PROMPT, np.array(answer, np.int32)]))[-1], sampling)
            longer |= {(*answer, int(t)): prob * step[t] for t in np.flatnonzero(step)}
        probs = longer
    eos = sharp.eos_ids
    assert not any(eos & set(answer) for answer in probs), "an answer that ends early would need another count"
    found = [tuple(g.token_ids.tolist()) for _, g in draws(sharp, [sampling], seed=3, count=6_000)]
    assert set(found) <= probs.keys()
    counts = np.array([found.count(answer) for answer in probs])
    assert fits(counts, np.array(list(probs.values())))
    assert not fits(counts, np.full(27, 1 / 27))


def test_greedy_takes_the_most_likely_token_and_is_certain(sharp: Policy):
    model = stock_model(sharp)
    members = [
        Request(id=str(i), sampling=Sampling(max_new_tokens=12, temperature=t), seed=i) for i, t in enumerate([0, 1, 0])
    ]
    engine = make_engine(sharp)
    engine.submit(PROMPT, members)
    found = finish(engine)
    np.testing.assert_array_equal(found["0"].token_ids, found["2"].token_ids)
    tokens = found["0"].token_ids
    logits = next_logits(model, np.concatenate([PROMPT, tokens]))[len(PROMPT) - 1 : -1]
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    assert (found["0"].logprobs == 0).all()
    assert (found["1"].logprobs < 0).all()


# ---- one draw


def some_logits(num: int = 40, vocab: int = 60) -> torch.Tensor:
    return 2 * torch.randn(num, vocab, generator=torch.Generator().manual_seed(0))


def test_allowed_sets_row_by_row():
    logits = some_logits()
    samplings = [
        Sampling(
            max_new_tokens=1,
            temperature=[0.5, 1.0, 1.8][i % 3],
            top_k=[0, 3, 25, 60, 500][i % 5],
            top_p=[1.0, 0.3, 0.9][i % 4 % 3],
            min_p=[0.0, 0.05][i % 2],
        )
        for i in range(len(logits))
    ]
    outcome = draw(logits, samplings, np.linspace(0.01, 0.99, len(logits)))
    assert outcome.allowed is not None
    for row, sampling in enumerate(samplings):
        expected = np.sort(allowed_ids(logits[row].double().numpy(), sampling))
        np.testing.assert_array_equal(np.flatnonzero(outcome.allowed[row]), expected, err_msg=str(sampling))
        probs = distribution(logits[row].double().numpy(), sampling)
        token = int(outcome.tokens[row])
        assert outcome.logprobs[row].item() == pytest.approx(np.log(probs[token]), abs=1e-5)


@pytest.mark.parametrize("beside", [Sampling(max_new_tokens=1, top_k=3), Sampling(max_new_tokens=1, min_p=0.9)])
def test_top_p_of_one_never_cuts(beside: Sampling):
    """The most likely token holds all that float32 can see of the probability; the others may be sampled, too."""
    logits = torch.zeros(2, 20)
    logits[:, 4] = 40.0
    top_k = Sampling(max_new_tokens=1, top_k=5)
    for sampling, size in ((Sampling(max_new_tokens=1), 20), (top_k, 5)):
        outcome = draw(logits, [sampling, beside], np.array([0.5, 0.5]))
        assert outcome.allowed is not None
        assert int(outcome.allowed[0].sum()) == size


def test_the_most_likely_token_survives_every_truncation():
    logits = some_logits()
    for sampling in (
        Sampling(max_new_tokens=1, top_k=1),
        Sampling(max_new_tokens=1, top_p=1e-9),
        Sampling(max_new_tokens=1, min_p=0.999999),
    ):
        outcome = draw(logits, [sampling] * len(logits), np.linspace(1e-6, 1 - 1e-6, len(logits)))
        assert torch.equal(outcome.tokens, logits.argmax(dim=1))
        assert (outcome.logprobs == 0).all()


def test_equal_logits_leave_exactly_k():
    outcome = draw(torch.zeros(1, 10), [Sampling(max_new_tokens=1, top_k=4)], np.array([0.5]))
    assert outcome.allowed is not None
    assert int(outcome.allowed.sum()) == 4
    assert outcome.logprobs.item() == pytest.approx(np.log(0.25))


@pytest.mark.parametrize("noise", [2.0**-54, 1.0 - 2.0**-53, 1.0])
def test_extreme_noise_never_leaves_the_support(noise: float):
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(max_new_tokens=1, top_k=9)
    outcome = draw(logits, [sampling], np.array([noise]))
    assert outcome.allowed is not None
    assert bool(outcome.allowed[0, outcome.tokens[0]])
    plain = draw(logits, [Sampling(max_new_tokens=1)], np.array([noise]))
    assert 0 <= int(plain.tokens[0]) < 50_000
    assert plain.allowed is None


def test_rare_tokens_of_a_large_vocabulary_keep_their_share():
    """The second half holds a millionth of the probability, spread over 100,000 tokens: float32 sums would lose it."""
    logits = torch.zeros(1, 200_000)
    logits[0, 100_000:] = float(np.log(1e-6))
    noise = (np.arange(60) + 0.5) / 60 * 2e-6 + 1 - 2e-6
    tokens = draw(logits.expand(60, -1), [Sampling(max_new_tokens=1)] * 60, noise).tokens
    rare = tokens[tokens >= 100_000]
    assert abs(len(rare) - 30) <= 1
    assert len(rare.unique()) == len(rare)


# ---- noise


def noise_table() -> Doubles:
    """Seeds that follow each other, the hardest case, by positions that do."""
    seeds = np.repeat(np.arange(1_000, dtype=np.uint64), 400)
    return uniforms(seeds, np.tile(np.arange(400, dtype=np.int64), 1_000)).reshape(1_000, 400)


def test_noise_is_uniform():
    table = noise_table()
    assert 0 < table.min() < 1e-4
    assert 1 - 1e-4 < table.max() < 1
    assert len(np.unique(table)) == table.size
    for part in (table, table[:25], table[:, :10], table[::7, 3::11]):
        assert fits(np.histogram(part, bins=100, range=(0, 1))[0], np.full(100, 0.01))


def test_noise_has_no_memory():
    table = noise_table() - 0.5
    neighbours = {
        "next position": (table[:, :-1], table[:, 1:]),
        "next seed": (table[:-1], table[1:]),
        "diagonal": (table[:-1, :-1], table[1:, 1:]),
        "antidiagonal": (table[:-1, 1:], table[1:, :-1]),
        "two positions on": (table[:, :-2], table[:, 2:]),
        "64 seeds on": (table[:-64], table[64:]),
    }
    for name, (a, b) in neighbours.items():
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 4 / a.size**0.5, name
        pairs = np.histogram2d(a.ravel(), b.ravel(), bins=16, range=[[-0.5, 0.5]] * 2)[0]
        assert fits(pairs.ravel().astype(np.int64), np.full(256, 1 / 256)), name


def test_noise_of_request_seeds():
    seeds = np.array([request_seed(r, 1, s, i) for r in range(4) for s in range(50) for i in range(50)], np.uint64)
    assert len(np.unique(seeds)) == 10_000
    for position in (0, 1, 5, 1000):
        values = uniforms(seeds, np.full(10_000, position, np.int64))
        assert fits(np.histogram(values, bins=50, range=(0, 1))[0], np.full(50, 0.02))
    assert request_seed(1, 2) != request_seed(2, 1)


def test_noise_belongs_to_seed_and_position_alone():
    seeds = np.array([2**64 - 1, 5, 2**63, 0], np.uint64)
    positions = np.array([3, 0, 2**31, 7], np.int64)
    together = uniforms(seeds, positions)
    for i in range(4):
        assert uniforms(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    np.testing.assert_array_equal(uniforms(seeds[::-1], positions[::-1]), together[::-1])

"""Exact mode: the learner's recomputed log-probs have the bits that the engine recorded, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_forward import Arrival, finish, make_engine, prompt_ids, requests
from tiny_runs import Workshop, play, rows_of

from headrace.policy.attention import PackedPlan
from headrace.policy.logprobs import Support
from headrace.policy.policy import Policy
from headrace.rollout.request import Generation
from headrace.rollout.sampling import Sampling
from headrace.types import FloatArray, IntArray

TEMPERATURE = 0.7
Sample = tuple[IntArray, Generation]


def arrivals(num_groups: int, max_new_tokens: int, spread_steps: int, top_p: float = 1.0) -> list[Arrival]:
    """Groups of 1 to 7 with prompts of 1 to 150 tokens and answers of up to `max_new_tokens`, that come over time."""
    rng = np.random.default_rng(0)
    return [
        (
            int(rng.integers(0, spread_steps)),
            prompt_ids(int(rng.integers(1, 150)), i),
            requests(
                f"g{i}",
                [
                    Sampling(max_new_tokens=int(n), temperature=TEMPERATURE, top_p=top_p)
                    for n in rng.integers(1, max_new_tokens, rng.integers(1, 8))
                ],
            ),
        )
        for i in range(num_groups)
    ]


def samples(policy: Policy, wanted: list[Arrival], **settings: int) -> list[Sample]:
    prompts = {request.id: prompt for _, prompt, members in wanted for request in members}
    return [(prompts[g.id], g) for g in finish(make_engine(policy, **settings), wanted).values()]


def recomputed(policy: Policy, pack: Sequence[Sample]) -> FloatArray:
    """What the learner computes for the sampled tokens of one micro-batch."""
    sequences = [np.concatenate([prompt, g.token_ids]) for prompt, g in pack]
    sampled = np.concatenate([np.arange(len(s)) >= len(prompt) for s, (prompt, _) in zip(sequences, pack, strict=True)])
    support = None
    if pack[0][1].replay is not None:
        replays = [g.replay for _, g in pack]
        sizes = np.concatenate([np.diff(r.support_offsets) for r in replays])
        ids = np.concatenate([r.support_ids for r in replays])
        support = Support(torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])))
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    plan = PackedPlan([len(s) for s in sequences], policy.device)
    at = torch.from_numpy(np.flatnonzero(sampled))
    return policy.logprobs(tokens, plan, at, TEMPERATURE, support).detach().numpy()


def gaps(policy: Policy, found: list[Sample], num_per_pack: int) -> FloatArray:
    """|recomputed - sampled| of every token."""
    order = np.random.default_rng(num_per_pack).permutation(len(found))
    packs = [[found[i] for i in order[a : a + num_per_pack]] for a in range(0, len(order), num_per_pack)]
    return np.concatenate([np.abs(recomputed(policy, p) - np.concatenate([g.logprobs for _, g in p])) for p in packs])


@pytest.mark.usefixtures("endless")
def test_a_hundred_thousand_tokens_without_a_bit_of_difference(make_policy: Callable[..., Policy]):
    policy = make_policy(exact=True, num_hidden_layers=1, intermediate_size=40)
    wanted = arrivals(num_groups=300, max_new_tokens=180, spread_steps=150)
    found = samples(policy, wanted, max_running=256, prefill_tokens=97)
    for num_per_pack in (len(found) // 12, len(found) // 40):
        difference = gaps(policy, found, num_per_pack)
        assert len(difference) >= 100_000
        assert difference.max() == 0.0


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize(("architecture", "window"), [("Qwen3", 0), ("Mistral", 70), ("Qwen2", 0), ("Llama", 0)])
def test_no_difference_for_any_model_sampling_or_packing(
    make_policy: Callable[..., Policy], architecture: str, window: int, top_p: float
):
    changes = {"sliding_window": window} if window else {}
    policy = make_policy(architecture, exact=True, **changes)
    wanted = arrivals(num_groups=8, max_new_tokens=100, spread_steps=40, top_p=top_p)
    found = samples(policy, wanted, max_running=12, prefill_tokens=13)
    for num_per_pack in (1, 3, len(found)):
        assert gaps(policy, found, num_per_pack).max() == 0.0


@pytest.mark.usefixtures("endless")
def test_the_default_mode_differs(policy: Policy):
    """So the tests above can fail."""
    found = samples(policy, arrivals(num_groups=8, max_new_tokens=100, spread_steps=40), prefill_tokens=13)
    difference = gaps(policy, found, 3)
    assert (difference > 0).mean() > 0.05
    assert difference.max() < 1e-4


async def test_a_run_has_no_mismatch_at_all(tmp_path: Path):
    workshop = Workshop(tmp_path)
    for name, exact in (("exact", "true"), ("default", "false")):
        config = workshop.config(name, f"model.exact={exact}", "rollout.top_p=0.9", "rollout.temperature=0.8")
        await play(config)
    mismatches = [row.mismatch_mean for row in rows_of(tmp_path / "exact")]
    assert mismatches == [0.0, 0.0, 0.0]
    assert all(row.mismatch_mean > 0 for row in rows_of(tmp_path / "default"))

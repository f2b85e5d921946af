"""Exact mode: the learner's recomputed log-probs have the bits that the engine recorded, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exact_runs import busy_run, gaps
from mixtures import MIXTURES
from tiny_runs import Workshop, play, rows_of

from headrace.errors import ConfigError
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine

SMALL = {"num_groups": 8, "max_new_tokens": 100, "spread_steps": 40}


@pytest.mark.usefixtures("endless")
def test_a_hundred_thousand_tokens_without_a_bit_of_difference(make_policy: Callable[..., Policy]):
    policy = make_policy(exact=True, num_hidden_layers=1, intermediate_size=40)
    found = busy_run(policy, num_groups=300, max_new_tokens=180, spread_steps=150, max_running=256, prefill_tokens=97)
    for num_per_pack in (len(found) // 12, len(found) // 40):
        difference = gaps(policy, found, num_per_pack)
        assert len(difference) >= 100_000
        assert difference.max() == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("architecture", ["Qwen3", "Mistral", "Qwen2", "Llama", "Qwen3Moe", "Mixtral"])
def test_no_difference_for_any_model_sampling_or_packing(
    make_policy: Callable[..., Policy], architecture: str, top_p: float
):
    changes = {"sliding_window": 70} if architecture == "Mistral" else MIXTURES.get(architecture, {})
    policy = make_policy(architecture, exact=True, **changes)
    found = busy_run(policy, **SMALL, top_p=top_p, max_running=12, prefill_tokens=13)
    for num_per_pack in (1, 3, len(found)):
        assert gaps(policy, found, num_per_pack).max() == 0.0


@pytest.mark.usefixtures("endless")
def test_the_default_mode_differs(policy: Policy):
    """So the tests above can fail."""
    found = busy_run(policy, **SMALL, prefill_tokens=13)
    difference = gaps(policy, found, 3)
    assert (difference > 0).mean() > 0.05
    assert difference.max() < 1e-4


def test_drafts_on_a_cpu_have_no_exact_form(make_policy: Callable[..., Policy]):
    with pytest.raises(ConfigError, match=r"model\.exact = true and rollout\.speculate = 4"):
        Engine(make_policy(exact=True), max_running=4, prefill_tokens=9, kv_tokens=100, on_update="keep", speculate=4)


async def test_a_run_has_no_mismatch_at_all(tmp_path: Path):
    workshop = Workshop(tmp_path)
    for name, exact in (("exact", "true"), ("default", "false")):
        config = workshop.config(name, f"model.exact={exact}", "rollout.top_p=0.9", "rollout.temperature=0.8")
        await play(config)
    mismatches = [row.mismatch_mean for row in rows_of(tmp_path / "exact")]
    assert mismatches == [0.0, 0.0, 0.0]
    assert all(row.mismatch_mean > 0 for row in rows_of(tmp_path / "default"))

"""Adapters: trained in place of the model's own weights, decoded with, and merged when a model is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from mixtures import MIXTURES
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.config import LearnerSection, ModelSection
from headrace.learner.learner import Learner
from headrace.learner.ranks import Intake
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import ADAPTER_DIR, Policy, load_policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request
from headrace.types import Group, Sampling

LORA = LearnerSection(lora_rank=4, lora_alpha=8.0)
Maker = Callable[..., Policy]
each_model = pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe", "Starcoder2"])


def adapted(make_policy: Maker, directory: Path, architecture: str, *, moved: bool = True) -> Policy:
    """A policy with adapters, which do something once they have been moved."""
    make_policy(architecture, **MIXTURES.get(architecture, {})).save(directory)
    policy = load_policy(ModelSection(path=str(directory), device="cpu"), LORA, seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if moved and ".lora_B." in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return policy


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


@torch.no_grad()
def logprobs(policy: Policy) -> Tensor:
    tokens = torch.randint(3, 90, (24,), generator=torch.Generator().manual_seed(0))
    return policy.logprobs(tokens, PackedPlan([24], policy.device), torch.arange(1, 24), 1.0)[0]


def sampled(policy: Policy) -> Group:
    """Eight answers to one prompt, as the engine gives them."""
    prompt = np.random.default_rng(0).integers(3, 99, 8).astype(np.int32)
    engine = Engine(policy, max_running=8, prefill_tokens=5, kv_tokens=10**5, on_update="keep")
    engine.submit(prompt, [Request(id=str(i), sampling=Sampling(max_new_tokens=20), seed=i) for i in range(8)])
    answers = []
    while engine.has_work:
        for g in engine.advance():
            reward = float(g.token_ids.sum() % 5)
            bare = trajectory(index=int(g.id), prompt=prompt, answer=g.token_ids, logprobs=g.logprobs, reward=reward)
            answers.append(replace(bare, replay=g.replay))
    return group_of(*answers)


@each_model
def test_adapters_begin_as_the_model_was_and_follow_from_the_seed(
    make_policy: Maker, tmp_path: Path, architecture: str
):
    policy = adapted(make_policy, tmp_path, architecture, moved=False)
    torch.testing.assert_close(logprobs(policy), logprobs(make_policy(architecture)), rtol=0, atol=1e-6)
    again, other = (
        weights_of(load_policy(ModelSection(path=str(tmp_path), device="cpu"), LORA, seed)) for seed in (1, 2)
    )
    assert all(torch.equal(again[name], weight) for name, weight in weights_of(policy).items())
    assert not all(torch.equal(other[name], weight) for name, weight in weights_of(policy).items())


@each_model
def test_engine_and_learner_compute_with_the_adapters(make_policy: Maker, tmp_path: Path, architecture: str):
    policy = adapted(make_policy, tmp_path, architecture)
    assert (logprobs(policy) - logprobs(make_policy(architecture))).abs().max() > 0.1
    group = sampled(policy)
    learner = Learner(policy, LearnerSection(), temperatures=(1.0,), max_new_tokens=20, total_steps=1)
    found = learner.mismatch(group.trajectories)
    assert found.count > 50
    assert found.mean_abs < 1e-5


@each_model
def test_a_step_changes_the_adapters_alone(make_policy: Maker, tmp_path: Path, architecture: str):
    policy = adapted(make_policy, tmp_path, architecture)
    before, group = weights_of(policy), sampled(policy)
    section = LearnerSection(lr=1e-2)
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=20, total_steps=1)
    intake = Intake(learner.section)
    for items in [*intake.add(group), *intake.rest()]:
        learner.accumulate(items)
    assert learner.finish().grad_norm > 0
    changed = {name for name, weight in weights_of(policy).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert changed == {name for name, _ in learner.weights(torch.float32, trained_only=True)}
    assert changed == {name.split(".", 1)[1] for name in learner.tensors()}


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe", "Starcoder2", "DeepseekV3"])
def test_a_saved_model_has_the_adapters_in_its_weights(make_policy: Maker, tmp_path: Path, architecture: str):
    policy = adapted(make_policy, tmp_path / "base", architecture)
    before = weights_of(policy)
    policy.save(tmp_path / "merged")
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(policy).items())
    merged = load_policy(ModelSection(path=str(tmp_path / "merged"), device="cpu"))
    assert not any("lora" in name or "base_layer" in name for name in weights_of(merged))
    torch.testing.assert_close(logprobs(merged), logprobs(policy), rtol=0, atol=1e-4)


@each_model
def test_the_adapters_alone_load_in_peft(make_policy: Maker, tmp_path: Path, architecture: str):
    policy = adapted(make_policy, tmp_path / "base", architecture)
    policy.save(tmp_path / "merged")
    modes = {path.stat().st_mode for path in (tmp_path / "merged").rglob("*.*")}
    assert len(modes) == 1  # who may read one file may read all
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, tmp_path / "merged" / ADAPTER_DIR)
        found = torch.log_softmax(loaded(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(found, logprobs(policy), rtol=0, atol=1e-4)

"""What the engine chose besides tokens, replayed by the learner and not: experts, and what could be sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from mixtures import MIXTURES, routers_of
from torch import Tensor

from headrace.config import LearnerSection
from headrace.learner.batch import pack
from headrace.learner.learner import Learner
from headrace.learner.ranks import Intake
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request
from headrace.types import Group, Item, Sampling

Maker = Callable[..., Policy]
each_mixture = pytest.mark.parametrize("architecture", MIXTURES)


def sampled(policy: Policy, sampling: Sampling = Sampling(max_new_tokens=30)) -> Group:  # noqa: B008 (frozen)
    """Sixteen answers to one prompt, as the engine gives them."""
    prompt = np.random.default_rng(0).integers(3, 99, 8).astype(np.int32)
    engine = Engine(policy, max_running=16, prefill_tokens=5, kv_tokens=10**6, on_update="keep")
    engine.submit(prompt, [Request(id=str(i), sampling=sampling, seed=i) for i in range(16)])
    answers = []
    while engine.has_work:
        for g in engine.advance():
            reward = float(g.token_ids.sum() % 5)
            bare = trajectory(index=int(g.id), prompt=prompt, answer=g.token_ids, logprobs=g.logprobs, reward=reward)
            answers.append(replace(bare, replay=g.replay))
    assert sum(t.num_sampled_tokens for t in answers) > 200
    return group_of(*answers)


@torch.no_grad()
def move_routers(policy: Policy, share: float) -> None:
    """Add noise to the routers alone, of this share of their weights' size."""
    generator = torch.Generator().manual_seed(0)
    for router in routers_of(policy.model):
        router.weight.add_(share * router.weight.std() * torch.randn(router.weight.shape, generator=generator))


@torch.no_grad()
def gaps(policy: Policy, group: Group, *, replayed: bool) -> Tensor:
    """|log ratio| of each token between the policy as it is and the one that sampled."""
    batch = pack([Item(trajectory=t, advantage=0.0) for t in group.trajectories], policy.device, policy.routers)
    routes = batch.routes if replayed else None
    return (policy.logprobs(batch.token_ids, batch.plan, batch.at, 1.0, None, routes)[0] - batch.behaviour).abs()


@torch.no_grad()
def test_replay_of_the_support_keeps_the_ratio_at_one(policy: Policy):
    group = sampled(policy, Sampling(max_new_tokens=30, top_p=0.8))
    batch = pack([Item(trajectory=t, advantage=0.0) for t in group.trajectories], policy.device)
    replayed, free = (
        (policy.logprobs(batch.token_ids, batch.plan, batch.at, 1.0, support)[0] - batch.behaviour).exp()
        for support in (batch.support, None)
    )
    assert (replayed - 1).abs().max() < 1e-5
    # without it, every ratio is the probability that top-p left: 0.8 and a little more
    assert free.min() > 0.8 - 1e-5
    assert free.mean() < 0.9


@each_mixture
def test_replay_keeps_the_ratio_near_one_when_routers_move(make_policy: Maker, architecture: str):
    policy = make_policy(architecture, **MIXTURES[architecture])
    group = sampled(policy)
    assert gaps(policy, group, replayed=True).max() < 1e-5
    assert gaps(policy, group, replayed=False).max() < 1e-5
    move_routers(policy, 0.05)
    replayed, free = gaps(policy, group, replayed=True), gaps(policy, group, replayed=False)
    assert replayed.max() < 0.02  # gates have moved a little
    assert free.max() > 0.1  # some tokens go to other experts
    assert free.mean() > 3 * replayed.mean()


@each_mixture
def test_the_learner_replays_by_itself_and_trains_the_routers(make_policy: Maker, architecture: str):
    policy = make_policy(architecture, **MIXTURES[architecture])
    group = sampled(policy)
    move_routers(policy, 0.05)
    expected = gaps(policy, group, replayed=True).mean()
    section = LearnerSection(lr=1e-3, micro_batch_tokens=128, kl_coef=0.1)
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=30, total_steps=1)
    intake = Intake(learner.section)
    batches = [*intake.add(group, learner.reference_logprobs(group)), *intake.rest()]
    assert len(batches) > 1
    for items in batches:
        learner.accumulate(items)
    assert all(router.weight.grad.abs().sum() > 0 for router in routers_of(policy.model))
    stats = learner.finish()
    assert stats.mismatch.mean_abs == pytest.approx(float(expected), rel=1e-3)


def test_the_reference_chooses_its_own_experts(make_policy: Maker):
    policy = make_policy("Qwen3Moe")
    group = sampled(policy)
    move_routers(policy, 0.05)
    section = LearnerSection(lr=1e-3, kl_coef=0.1)
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=30, total_steps=1)
    reference = np.concatenate(learner.reference_logprobs(group))
    behaviour = np.concatenate([t.logprobs[t.sampled] for t in group.trajectories])
    free = gaps(policy, group, replayed=False).numpy()
    np.testing.assert_allclose(np.abs(reference - behaviour), free, rtol=0, atol=1e-5)


def test_answers_without_their_experts_are_not_trained_on(make_policy: Maker):
    policy = make_policy("Qwen3Moe")
    learner = Learner(policy, LearnerSection(), temperatures=(1.0,), max_new_tokens=30, total_steps=1)
    with pytest.raises(ValueError, match="0:p0/1 lacks the expert routing"):
        learner.accumulate([Item(trajectory=trajectory(index=1), advantage=1.0)])

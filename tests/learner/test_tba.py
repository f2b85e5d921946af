"""Trajectory balance (`learner.loss = "tba"`): the gradient of the squared residuals, with log Z from the group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_work import on_ranks, take_steps
from test_learner_step import clone, learner_for, logprobs_alone, make_groups, stock, take_step
from torch import Tensor

from headrace.config import LearnerSection
from headrace.config_file import load_config
from headrace.errors import ConfigError
from headrace.learner.objective import LOSSES, LossInput, balance
from headrace.policy.policy import Policy
from headrace.types import Group

TBA = LearnerSection(loss="tba", kl_coef=0.05, kl_in="reward", lr=1e-3, aggregation="constant", grad_clip=0)


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy("Starcoder2", dtype=torch.float64)


def residuals(logprobs: list[Tensor], references: list[Tensor], rewards: list[float], coef: float) -> Tensor:
    """log Z + log(current) - log(reference) - reward / coef of one group's answers; log Z is their own estimate."""
    parts = [c.sum() - r.sum() - reward / coef for c, r, reward in zip(logprobs, references, rewards, strict=True)]
    stacked = torch.stack(parts)
    return stacked - stacked.mean()


def test_the_gradient_is_that_of_half_the_squared_residuals():
    rng, coef = torch.Generator().manual_seed(0), 0.03
    groups = [[3, 1, 5], [2, 2], [4, 6, 1, 2]]
    loss, worth, packed, answers = torch.zeros((), dtype=torch.float64), {}, [], []
    for number, lengths in enumerate(groups):
        current = [torch.randn(n, generator=rng, dtype=torch.float64, requires_grad=True) for n in lengths]
        reference = [torch.randn(n, generator=rng, dtype=torch.float64) for n in lengths]
        rewards = torch.rand(len(lengths), generator=rng, dtype=torch.float64).tolist()
        loss = loss + 0.5 * residuals(current, reference, rewards, coef).square().sum()
        for i, (c, r, reward) in enumerate(zip(current, reference, rewards, strict=True)):
            worth[f"{number}:p/{i}"] = reward - coef * float((c.detach() - r).sum())
        packed += current
        answers += [f"{number}:p/{i}" for i in range(len(lengths))]
    expected = torch.autograd.grad(loss, packed)
    found = balance(worth)
    flat = torch.cat([c.detach() for c in packed]).requires_grad_()
    advantage = torch.tensor(np.repeat([found[id] for id in answers], [len(c) for c in packed]))
    ids = torch.arange(len(packed)).repeat_interleave(torch.tensor([len(c) for c in packed]))
    given = LossInput(flat, flat.detach(), flat.detach() - 3.0, advantage, ids, 0.2, 0.2)  # however old the samples are
    terms = LOSSES["tba"](given)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), flat)
    torch.testing.assert_close(gradient / coef, torch.cat(expected), rtol=0, atol=1e-10)
    assert not terms.clipped.any()


def test_a_policy_that_is_balanced_stays():
    """Where current = reference x exp(reward / coef) / Z, nothing pulls."""
    rewards, coef = {"1:a/0": 1.0, "1:a/1": 0.0, "2:b/0": 0.25}, 0.5
    logs = {id: reward / coef - 0.7 for id, reward in rewards.items()}  # log(current / reference)
    assert balance({id: rewards[id] - coef * logs[id] for id in rewards}) == pytest.approx(dict.fromkeys(rewards, 0.0))


def test_by_hand():
    assert balance({"4:p/0": 1.0, "4:p/1": 0.0, "10:p/0": 5.0}) == {"4:p/0": 0.5, "4:p/1": -0.5, "10:p/0": 0.0}


def by_hand(policy: Policy, groups: list[Group], references: list[list[np.ndarray]]) -> list[Tensor]:
    model, coef = stock(policy), TBA.kl_coef
    num_answers = sum(len(group.trajectories) for group in groups)
    for group, known in zip(groups, references, strict=True):
        current = [logprobs_alone(model, t) for t in group.trajectories]
        rewards = [float(t.reward or 0.0) for t in group.trajectories]
        found = residuals(current, [torch.from_numpy(k).double() for k in known], rewards, coef)
        (0.5 * coef * found.square().sum() / 12 / num_answers).backward()  # 12: the constant length
    return [p.grad for p in model.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("budget", [10**6, 31])  # with the second a group lies in several micro-batches
@pytest.mark.parametrize("off_by", [0.0, 0.5])
def test_a_step_is_that_of_the_formula(policy: Policy, budget: int, off_by: float):
    groups = make_groups(policy, off_by=off_by)
    rng = np.random.default_rng(1)
    references = [
        [
            (t.logprobs[t.sampled] + 0.2 * rng.standard_normal(t.num_sampled_tokens)).astype(np.float32)
            for t in g.trajectories
        ]
        for g in groups
    ]
    learner = learner_for(clone(policy), TBA.model_copy(update={"micro_batch_tokens": budget}))
    outcome, _ = take_step(learner, groups, references)
    for mine, expected in zip(outcome.gradients, by_hand(policy, groups, references), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-8)
    assert outcome.stats.clipped_share == 0


@pytest.mark.slow
def test_ranks_take_the_same_step(make_policy: Callable[..., Policy], tmp_path: Path):
    policy = make_policy("Qwen3")
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    groups = make_groups(policy, off_by=0.1)
    steps = [groups[1:2], groups]  # the answers of a single group go to both ranks
    alone = take_steps(None, tmp_path, TBA, steps)
    for outcome in on_ranks(2, take_steps, tmp_path, TBA, steps):
        torch.testing.assert_close(outcome.weights, alone.weights, rtol=0, atol=1e-6)
        assert [s.loss for s in outcome.stats] == pytest.approx([s.loss for s in alone.stats], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["learner.kl_in=reward"], "needs learner.kl_coef"),
        (["learner.kl_coef=0.1"], "needs learner.kl_in = 'reward'"),
        (["learner.kl_coef=0.1", "learner.kl_in=reward", "learner.credit=turn"], "learner.credit = 'episode'"),
        (["learner.kl_coef=0.1", "learner.kl_in=reward", "learner.advantage=gae"], "learner.advantage = 'grpo'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(words: list[str], told: str):
    with pytest.raises(ConfigError) as error:
        load_config(None, ["learner.loss=tba", *words])
    assert told in str(error.value)

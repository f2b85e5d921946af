"""PPO: a critic, generalised advantage estimation, several updates per step; and a user's own loss and advantage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import trajectory
from test_learner_step import TEMPERATURE, clone, learner_for, make_groups, stock, take_step
from torch import Tensor, nn

from headrace.config import LearnerSection
from headrace.config_file import load_config
from headrace.errors import ConfigError, ModelError
from headrace.learner.credit import token_rewards
from headrace.learner.objective import gae, value_loss
from headrace.learner.ranks import Intake
from headrace.policy.demo import build_demo
from headrace.policy.policy import Policy
from headrace.types import FinishReason, Group, Trajectory, Turn

PPO = LearnerSection(advantage="gae", gae_lambda=0.9, discount=0.97, value_lr=3e-3, lr=1e-3, betas=(0.8, 0.9))


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy("Starcoder2", dtype=torch.float64)


# ---- the formulas


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_sum_of_its_definition(discount: float, decay: float):
    rng = np.random.default_rng(0)
    rewards = [rng.standard_normal(size) for size in (1, 7, 30)]
    values = [rng.standard_normal(size) for size in (1, 7, 30)]
    found = gae(rewards, values, discount=discount, decay=decay)
    for reward, value, advantage in zip(rewards, values, found, strict=True):
        after = [*value[1:], 0.0]
        deltas = [r + discount * v1 - v0 for r, v0, v1 in zip(reward, value, after, strict=True)]
        for t in range(len(reward)):
            summed = sum((discount * decay) ** k * delta for k, delta in enumerate(deltas[t:]))
            assert advantage[t] == pytest.approx(summed, abs=1e-10)


def test_gae_with_a_decay_of_one_is_the_return_less_the_value():
    (found,) = gae([np.array([0.0, 1.0, 2.0])], [np.array([0.5, 0.25, 4.0])], discount=1.0, decay=1.0)
    assert found.tolist() == [2.5, 2.75, -2.0]


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (1.25, 0.5 * 0.75**2, -0.75),  # near the start: the plain error
        (1.5, 0.5 * 0.7**2, 0.0),  # clipped at 1.3, which is further from the return of 2: no gradient
        (3.5, 0.5 * 1.5**2, 1.5),  # its own error is larger than that of 1.3
        (0.5, 0.5 * 1.5**2, -1.5),  # it went away from the return: not held back
    ],
)
def test_the_value_loss_at_both_sides_of_its_clip(value: float, loss: float, gradient: float):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    start, returns = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 2.0))
    found = value_loss(values, start, returns, low=0.2, high=0.3)
    found.sum().backward()
    assert values.grad is not None
    assert (float(found.detach()), float(values.grad)) == (pytest.approx(loss), pytest.approx(gradient))


def test_rewards_come_with_the_last_token_of_their_turn():
    plain = trajectory(serial=0, prompt=[5], answer=[6, 7, 8], reward=2.0)
    assert token_rewards(plain).tolist() == [0, 0, 2]
    turns = tuple(Turn(start=a, end=b, reward=r, finish=FinishReason.STOP) for a, b, r in ((1, 3, 0.5), (3, 4, None)))
    assert token_rewards(replace(plain, turns=turns)).tolist() == [0, 0.5, 1.5]


# ---- whole steps


def hidden_and_logprobs(model: Policy, t: Trajectory) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(t.token_ids.astype(np.int64))
    out = model.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    at = torch.from_numpy(np.flatnonzero(t.sampled))
    logprobs = (out.logits[0, at - 1] / TEMPERATURE).log_softmax(-1).gather(1, ids[at][:, None])[:, 0]
    return out.hidden_states[-1][0, at - 1], logprobs


def by_hand(policy: Policy, steps: list[list[Group]], s: LearnerSection, critic: Policy | None = None) -> list[Tensor]:
    """PPO's updates, sequence by sequence with the model's own attention, and plain AdamW."""
    model, own = stock(policy), None if critic is None else stock(critic)
    head = nn.Linear((own or model).config.hidden_size, 1, dtype=torch.float64)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    optimizers = [
        torch.optim.AdamW(module.parameters(), lr=lr, betas=s.betas, weight_decay=0.0)
        for module, lr in ((model.model, s.lr), (head, s.value_lr), *([(own.body, s.value_lr)] if own else []))
    ]

    def values_of(hidden: Tensor, t: Trajectory) -> Tensor:
        if own is None:
            assert isinstance(s.critic, float)
            return head(s.critic * hidden + (1 - s.critic) * hidden.detach())[:, 0]  # type: ignore[no-any-return]
        return head(hidden_and_logprobs(own, t)[0])[:, 0]  # type: ignore[no-any-return]

    for groups in steps:
        answers = [t for g in groups for t in g.trajectories]
        known, raw = [], []
        for t in answers:
            with torch.no_grad():
                hidden, proximal = hidden_and_logprobs(model, t)
                values = values_of(hidden, t)
            rewards = [0.0] * (len(values) - 1) + [t.reward]
            (advantage,) = gae([np.array(rewards)], [values.numpy()], discount=s.discount, decay=s.gae_lambda)
            known.append((proximal, values, values + torch.from_numpy(advantage)))
            raw.append(advantage)
        flat = np.concatenate(raw)
        white = [torch.from_numpy(((a - flat.mean()) / (flat.std() + 1e-6)).astype(np.float32)) for a in raw]
        for k in [*range(s.minibatches)] * s.epochs:
            chosen = [i for i in range(len(answers)) if i * s.minibatches // len(answers) == k]
            for i in chosen:
                proximal, start, returns = known[i]
                hidden, current = hidden_and_logprobs(model, answers[i])
                behaviour = torch.from_numpy(answers[i].logprobs[answers[i].sampled]).double()
                about = proximal if s.loss == "decoupled-ppo" else behaviour
                ratio = (current - about).exp()
                bound = ratio.clamp(1 - s.clip[0], 1 + s.clip[1])
                terms = -torch.minimum(ratio * white[i], bound * white[i])
                if s.loss == "decoupled-ppo":
                    terms = (proximal - behaviour).exp() * terms
                terms = terms + value_loss(values_of(hidden, answers[i]), start, returns, low=s.clip[0], high=s.clip[1])
                (terms.sum() / sum(len(white[j]) for j in chosen)).backward()
            for optimizer in optimizers:
                parameters = optimizer.param_groups[0]["params"]
                torch.nn.utils.clip_grad_norm_(parameters, s.grad_clip)
                optimizer.step()
                optimizer.zero_grad()
    bodies = model.model.parameters(), head.parameters(), () if own is None else own.body.parameters()
    return [p.detach() for parameters in bodies for p in parameters]


@pytest.mark.parametrize("loss", ["ppo", "decoupled-ppo"])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("budget", [10**6, 31])
def test_updates_are_those_of_the_formulas(policy: Policy, loss: str, epochs: int, minibatches: int, budget: int):
    section = PPO.model_copy(update={"loss": loss, "epochs": epochs, "minibatches": minibatches})
    steps = [make_groups(policy, off_by=0.1), make_groups(policy, off_by=0.2)]
    learner = learner_for(clone(policy), section.model_copy(update={"micro_batch_tokens": budget}))
    for groups in steps:
        stats = take_step(learner, groups)[0].stats
    assert learner._critic is not None
    found = [*learner.policy.model.parameters(), *learner._critic.head.parameters()]
    for mine, expected in zip(found, by_hand(policy, steps, section), strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=0, atol=1e-6 if budget < 100 else 1e-7)
    assert learner.step_index == 2
    assert stats.value_loss > 0
    assert stats.mismatch.count == sum(t.num_sampled_tokens for g in steps[1] for t in g.trajectories)


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_can_be_a_model_of_its_own(
    make_policy: Callable[..., Policy], policy: Policy, tmp_path: Path, tied: bool
):
    critic = make_policy("Qwen3", dtype=torch.float64, hidden_size=32, num_hidden_layers=1, tie_word_embeddings=tied)
    critic.save(tmp_path / "critic")
    section = PPO.model_copy(update={"critic": str(tmp_path / "critic"), "minibatches": 2, "micro_batch_tokens": 31})
    steps = [make_groups(policy, off_by=0.1), make_groups(policy, off_by=0.2)]
    learner = learner_for(clone(policy), section)
    for groups in steps:
        take_step(learner, groups)
    assert learner._critic is not None
    assert learner._critic.body is not None
    parts = learner.policy.model, learner._critic.head, learner._critic.body.body
    found = [p for module in parts for p in module.parameters()]
    for mine, expected in zip(found, by_hand(policy, steps, section, critic), strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=0, atol=1e-5)  # a step is 3e-3
    trained = {name for name in learner.tensors() if name.startswith("value.body.master.")}
    assert "value.body.master.lm_head.weight" not in trained
    assert len(trained) == len(list(learner._critic.body.body.parameters()))


def test_a_critic_reads_the_tokens_of_the_policy(make_policy: Callable[..., Policy], policy: Policy, tmp_path: Path):
    build_demo(tmp_path / "demo", seed=0, chat=True)
    with pytest.raises(ModelError, match=r"learner\.critic = .* has another vocabulary than the policy"):
        learner_for(policy, PPO.model_copy(update={"critic": str(tmp_path / "demo")}))
    with pytest.raises(ModelError, match=r"learner\.critic = 'nowhere': no such directory or file"):
        Intake(PPO.model_copy(update={"critic": "nowhere"}))


def test_the_clip_of_decoupled_ppo_acts_after_the_first_update(policy: Policy):
    section = LearnerSection(lr=2e-2, loss="decoupled-ppo", epochs=1)
    groups = make_groups(policy, off_by=0.0)
    once = take_step(learner_for(clone(policy), section), groups)[0].stats
    twice = take_step(learner_for(clone(policy), section.model_copy(update={"epochs": 3})), groups)[0].stats
    assert once.clipped_share == 0 < twice.clipped_share


def test_a_critic_learns_the_return(policy: Policy):
    section = PPO.model_copy(update={"lr": 0.0, "value_lr": 3e-2, "gae_lambda": 1.0, "discount": 1.0, "epochs": 4})
    learner, groups = learner_for(clone(policy), section), make_groups(policy)
    errors = [take_step(learner, groups)[0].stats.value_loss for _ in range(40)]
    assert errors[-1] < errors[0] / 10


def test_an_update_that_is_not_finite_leaves_the_critic_alone(policy: Policy):
    learner = learner_for(clone(policy), PPO)
    groups = make_groups(policy)
    take_step(learner, groups)
    before = copy.deepcopy(learner.tensors())
    broken = [replace(t, logprobs=np.where(t.sampled, np.float32("nan"), t.logprobs)) for t in groups[0].trajectories]
    stats = take_step(learner, [replace(groups[0], trajectories=tuple(broken)), *groups[1:]])[0].stats
    assert stats.skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.tensors().items())


# ---- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["learner.advantage=gae", "learner.credit=turn"], ["learner.credit = 'turn'", "each token itself"]),
        (
            ["learner.minibatches=9", "loop.groups_per_step=8"],
            ["learner.minibatches", "loop.groups_per_step", "group of its own"],
        ),
        (["learner.critic=my/critic"], ["learner.critic = 'my/critic' needs learner.advantage = 'gae'"]),
        (["learner.critic=-1"], ["learner.critic", "-1"]),
        (["learner.advantage=gea"], ["learner.advantage = 'gea' is none of", "'gae'", "file.py:function"]),
        (["learner.loss=ppo2"], ["learner.loss = 'ppo2' is none of", "'ppo'"]),
    ],
)
def test_what_cannot_be(settings: list[str], words: list[str]):
    with pytest.raises(ConfigError) as refused:
        load_config(None, settings)
    assert all(word in str(refused.value) for word in words)


# ---- functions of users

OWN = """
import numpy as np
from headrace.learner.objective import ppo

def loss(x):
    return ppo(x)

def centred(rewards):
    return [r - r.mean() for r in rewards]

def short(rewards):
    return rewards[:-1]

def one(rewards):
    return 1.0

def first(x):
    return x.current[:1], x.current[:1] > 0

def alone(x):
    return x.current

def nothing(x):
    return None
"""


def test_a_loss_and_an_advantage_of_ones_own(policy: Policy, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    given = {"loss": f"{tmp_path}/own.py:loss", "advantage": f"{tmp_path}/own.py:centred"}
    groups = make_groups(policy)
    outcomes: list[Any] = []
    for settings in ({"loss": "ppo", "advantage": "dr-grpo"}, given):
        outcomes.append(take_step(learner_for(clone(policy), LearnerSection(lr=1e-3, **settings)), groups)[0])
    outcomes[1].assert_equals(outcomes[0])
    for name in ("short", "one"):
        wrong = LearnerSection(advantage=f"{tmp_path}/own.py:{name}")
        with pytest.raises(ConfigError, match=r"learner\.advantage.*as many numbers as each group has rewards"):
            take_step(learner_for(clone(policy), wrong), groups)
    for name in ("first", "alone", "nothing"):
        wrong = LearnerSection(loss=f"{tmp_path}/own.py:{name}")
        with pytest.raises(ConfigError, match=r"learner\.loss.*must return LossTerms"):
            take_step(learner_for(clone(policy), wrong), groups)

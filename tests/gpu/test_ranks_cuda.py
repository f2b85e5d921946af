"""A learner's rank, and adapters, on a CUDA device. One device has one rank: NCCL takes no second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from torch.distributed import TCPStore

from headrace.config import LearnerSection, ModelSection
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Sharding
from headrace.learner.ranks import Intake
from headrace.policy.policy import Policy, load_policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request
from headrace.types import Group, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
SECTION = LearnerSection(lr=1e-4, micro_batch_tokens=128)


@pytest.fixture
def sharding() -> Iterator[Sharding]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seat = Sharding(rank=0, shape=(1, 1), store=store, device=torch.device("cuda", 0), timeout_s=60)
    yield seat
    torch.distributed.destroy_process_group()


def sampled(policy: Policy) -> Group:
    prompt = np.random.default_rng(0).integers(3, 99, 8).astype(np.int32)
    engine = Engine(policy, max_running=16, prefill_tokens=16, kv_tokens=10**5, on_update="keep")
    engine.submit(prompt, [Request(id=str(i), sampling=Sampling(max_new_tokens=30), seed=i) for i in range(16)])
    answers = []
    while engine.has_work:
        for g in engine.advance():
            made = {"prompt": prompt, "answer": g.token_ids, "logprobs": g.logprobs}
            answers.append(trajectory(index=int(g.id), reward=float(g.token_ids.sum() % 5), replay=g.replay, **made))
    return group_of(*answers)


def learner_of(policy: Policy, sharding: Sharding | None) -> Learner:
    return Learner(policy, SECTION, temperatures=(1.0,), max_new_tokens=30, total_steps=1, sharding=sharding)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
def test_a_rank_takes_the_step_of_one_process(
    make_policy: Callable[..., Policy], sharding: Sharding, architecture: str, tmp_path: Path
) -> None:
    make_policy(architecture, **SHAPE).save(tmp_path)
    section = ModelSection(path=str(tmp_path), device="cuda", dtype="bfloat16")
    policy, other = load_policy(section), load_policy(section, mesh=sharding.mesh)
    group = sampled(policy)
    stats, weights = [], []
    for learner in (learner_of(policy, None), learner_of(other, sharding)):
        intake = Intake(learner.section)
        for items in [*intake.add(group), *intake.rest()]:
            learner.accumulate(items)
        stats.append(learner.finish())
        weights.append({name: weight.float() for name, weight in learner.weights(torch.bfloat16)})
    assert stats[1].grad_norm == pytest.approx(stats[0].grad_norm, rel=0.05)
    assert stats[1].mismatch.mean_abs < 0.05
    assert all((weights[1][name] - weight).abs().max() < 0.02 for name, weight in weights[0].items())
    assert all(tensor.dtype is torch.float32 for tensor in learner.tensors().values())


def test_engine_and_learner_agree_on_adapters(make_policy: Callable[..., Policy]) -> None:
    peft = pytest.importorskip("headrace.policy.adapters_peft")
    cpu = make_policy("Qwen3", **SHAPE)
    model = cpu.model.to("cuda", torch.bfloat16)
    peft.add_adapters(model, rank=8, alpha=16.0, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    policy = Policy(model, cpu.tokenizer)
    learner = learner_of(policy, None)
    group = sampled(policy)
    assert learner.mismatch(group.trajectories).mean_abs < 0.02
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    intake = Intake(learner.section)
    for items in [*intake.add(group), *intake.rest()]:
        learner.accumulate(items)
    assert learner.finish().grad_norm > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert learner.mismatch(sampled(policy).trajectories).mean_abs < 0.02

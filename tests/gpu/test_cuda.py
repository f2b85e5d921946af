"""What only a CUDA device can show. Run on a GPU machine: pytest -m gpu."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory

from headrace.config import LearnerSection
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Optimizer
from headrace.learner.ranks import Intake
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.policy.routes import Routes
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Generation, Request
from headrace.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}


def on_cuda(make_policy: Callable[..., Policy], architecture: str, dtype: torch.dtype, **changes: object) -> Policy:
    cpu = make_policy(architecture, **SHAPE, **changes)
    return Policy(cpu.model.to("cuda", dtype), cpu.tokenizer)


def generate(policy: Policy, prompts: list[np.ndarray], kept: list[object] | None = None) -> dict[str, Generation]:
    engine = Engine(policy, max_running=32, prefill_tokens=16, kv_tokens=10**5, on_update="keep")
    if kept is not None:
        kept.append(engine)
    for i, prompt in enumerate(prompts):
        sampling = Sampling(max_new_tokens=8 + 7 * i)
        engine.submit(prompt, [Request(id=f"{i}/{k}", sampling=sampling, seed=100 * i + k) for k in range(4)])
    found: dict[str, Generation] = {}
    while engine.has_work:
        found |= {g.id: g for g in engine.advance()}
    return found


def recorded(policy: Policy, generations: dict[str, Generation]) -> torch.Tensor | None:
    """The experts of all sequences, end to end."""
    if not policy.routers.num_layers:
        return None
    found = [g.replay.routes for g in generations.values() if g.replay is not None and g.replay.routes is not None]
    assert len(found) == len(generations)
    return policy.routers.to_device(np.concatenate(found), policy.device)


def test_an_engine_that_nobody_uses_may_be_collected_while_another_records(make_policy: Callable[..., Policy]) -> None:
    policy, prompts = on_cuda(make_policy, "Qwen3", torch.bfloat16), [np.arange(3, 12, dtype=np.int32)]
    cycle: list[object] = []
    expected = generate(policy, prompts, cycle)
    cycle.append(cycle)  # with the engine: only the garbage collector frees it
    del cycle
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        found = generate(policy, prompts)
    finally:
        gc.set_threshold(*thresholds)
    assert all(np.array_equal(found[id].token_ids, g.token_ids) for id, g in expected.items())


@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"),
    [
        ("Qwen3", torch.float32, 2e-3),  # the GPU multiplies float32 in tf32 or in another order
        ("Qwen3", torch.bfloat16, 0.1),
        ("Llama", torch.bfloat16, 0.1),
        ("Qwen3Moe", torch.bfloat16, 0.3),
        ("Mistral", torch.bfloat16, 0.1),
    ],
)
def test_the_learner_finds_the_log_probs_that_were_sampled(
    make_policy: Callable[..., Policy], architecture: str, dtype: torch.dtype, tolerance: float
) -> None:
    changes = {"sliding_window": 12} if architecture == "Mistral" else {}
    policy = on_cuda(make_policy, architecture, dtype, **changes)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, size=n).astype(np.int32) for n in (5, 21, 40)]
    generations = generate(policy, prompts)
    sequences = [np.concatenate([prompts[int(g.id[0])], g.token_ids]) for g in generations.values()]
    plan = PackedPlan([len(s) for s in sequences], policy.device)
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(policy.device)
    starts = np.cumsum([0, *(len(s) for s in sequences[:-1])])
    at = [
        np.arange(start + len(s) - len(g.token_ids), start + len(s))
        for start, s, g in zip(starts, sequences, generations.values(), strict=True)
    ]
    with torch.no_grad():
        where, routes = torch.from_numpy(np.concatenate(at)).to(policy.device), recorded(policy, generations)
        ours, _ = policy.logprobs(tokens, plan, where, 1.0, None, routes)
        if routes is not None:
            own = Routes()
            policy.hidden(tokens, plan.positions, plan, own)
            assert own.chosen is not None
            # rounding decides between experts that are nearly as good
            assert (own.chosen == routes).float().mean() > 0.9
    sampled = np.concatenate([g.logprobs for g in generations.values()])
    difference = np.abs(ours.float().cpu().numpy() - sampled)
    assert difference.max() < tolerance
    assert difference.mean() < tolerance / 5


@pytest.mark.parametrize("window", [0, 9])
def test_the_varlen_kernel_agrees_with_rectangles(window: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [3, 17, 17, 40]
    q, k, v = (torch.randn(sum(lengths), h, 64, device="cuda", generator=generator) for h in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    plan = PackedPlan(lengths, torch.device("cuda"))
    exact = plan.attend(0, *inputs, 0.125, window)
    fast = plan.attend(0, *halves, 0.125, window)
    assert (exact - fast.float()).abs().max() < 0.05
    for output in (exact, fast):
        output.float().square().sum().backward()
    for precise, half in zip(inputs, halves, strict=True):
        assert precise.grad is not None
        assert half.grad is not None
        error = (precise.grad - half.grad.float()).norm() / precise.grad.norm()
        assert error < 0.03


@pytest.mark.parametrize("top_k", [0, 5])
def test_drafts_do_not_change_what_is_sampled(make_policy: Callable[..., Policy], top_k: int) -> None:
    """Plain sampling goes through graphs, top-k does not."""
    policy = on_cuda(make_policy, "Qwen3", torch.float32)
    policy.eos_ids = frozenset()  # type: ignore[misc]
    sampling = Sampling(max_new_tokens=150, temperature=0.05, top_k=top_k)
    prompts = [np.random.default_rng(n).integers(3, 90, size=n).astype(np.int32) for n in (5, 61)]
    found: list[dict[str, Generation]] = []
    for speculate in (0, 8):
        engine = Engine(
            policy, max_running=4, prefill_tokens=64, kv_tokens=10**4, on_update="keep", speculate=speculate
        )
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, [Request(id=f"{i}/{k}", sampling=sampling, seed=100 * i + k) for k in range(2)])
        found.append({})
        while engine.has_work:
            found[-1] |= {g.id: g for g in engine.advance()}
        assert (engine.counts.accepted_tokens > 100) == (speculate > 0)
    plain, drafted = found
    for id, generation in drafted.items():
        np.testing.assert_array_equal(generation.token_ids, plain[id].token_ids)
        np.testing.assert_allclose(generation.logprobs, plain[id].logprobs, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_critic_learns_beside_the_policy(make_policy: Callable[..., Policy], dtype: torch.dtype) -> None:
    policy, rng = on_cuda(make_policy, "Qwen3", dtype), np.random.default_rng(0)
    section = LearnerSection(advantage="gae", lr=1e-5, value_lr=3e-3, epochs=2, minibatches=2)
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=12, total_steps=30)
    groups = []
    for serial in range(4):
        answers = [rng.integers(3, 90, size=size) for size in (3, 9, 5)]
        prompt = rng.integers(3, 90, size=6).tolist()
        rewards = [float(serial % 2), 1.0, 0.5]
        groups.append(
            group_of(
                *(
                    trajectory(serial=serial, index=i, prompt=prompt, answer=answer, reward=rewards[i])
                    for i, answer in enumerate(answers)
                ),
                serial=serial,
            )
        )
    losses = []
    for _ in range(30):
        intake = Intake(section)
        for one in groups:
            assert intake.add(one) == []
        for items in intake.rest():
            learner.accumulate(items)
        stats = learner.finish()
        assert not stats.skipped
        losses.append(stats.value_loss)
    assert losses[-1] < losses[0] / 2
    assert all(tensor.is_cuda for name, tensor in learner.tensors().items() if name.startswith("value.master"))


def test_weights_of_two_types_are_updated_as_on_a_cpu() -> None:
    """A few architectures have weights in float32 beside those in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(8, 16, generator=generator).bfloat16(), torch.randn(16, generator=generator)]
    gradients = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in given]

    def updated(device: str) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(t.clone().to(device)) for t in given]
        optimizer = Optimizer([("a", weights[0]), ("b", weights[1])], LearnerSection(lr=1e-2))
        for _ in range(3):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.to(device, copy=True)  # it is scaled in place
            optimizer.step(lr=1e-2, scale=0.5, clip=1.0)
        return [master.detach().cpu() for master in optimizer.masters]

    for ours, theirs in zip(updated("cuda"), updated("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

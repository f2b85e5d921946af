"""Exact mode on a GPU: not a bit of difference between what was sampled and what is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exact_runs import TEMPERATURE, busy_run, gaps
from hand_made import trajectory
from mixtures import MIXTURES
from played_turns import assert_as_from_scratch, play

from headrace.config import LearnerSection, ModelSection
from headrace.errors import ModelError
from headrace.learner.batch import pack
from headrace.policy.policy import Policy, load_policy
from headrace.rollout.engine import Engine
from headrace.types import Item, Replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("endless"),
]
if torch.cuda.is_available():
    from headrace.kernels.block import FEW, linear
SHAPE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 3072, "max_position_embeddings": 2048}
EXPERTS = {"Qwen3Moe": {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}}


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    monkeypatch.setattr(Policy, "eos_ids", property(lambda self: frozenset()))


def on_cuda(make_policy: Callable[..., Policy], architecture: str, exact: bool, **changes: Any) -> Policy:
    shape = SHAPE | MIXTURES.get(architecture, {}) | EXPERTS.get(architecture, {}) | changes
    cpu = make_policy(architecture, **shape)
    cpu.model.resize_token_embeddings(128)
    return Policy(cpu.model.to("cuda", torch.bfloat16), cpu.tokenizer, exact=exact)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
def test_a_hundred_thousand_tokens_without_a_bit_of_difference(make_policy: Callable[..., Policy], architecture: str):
    policy = on_cuda(make_policy, architecture, True)
    found = busy_run(policy, num_groups=300, max_new_tokens=180, spread_steps=40, max_running=256, prefill_tokens=97)
    for num_per_pack in (len(found) // 12, len(found) // 40):
        difference = gaps(policy, found, num_per_pack)
        assert len(difference) >= 100_000
        assert difference.max() == 0.0


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(4096, 1024), (1024, 3072), (1152, 896), (896, 4864), (2560, 2560)])
def test_few_rows_are_multiplied_with_the_bits_of_many(
    make_policy: Callable[..., Policy], columns: int, width: int, biased: bool
):
    on_cuda(make_policy, "Qwen3", True)  # cuBLAS does not split sums from now on
    x, weight, bias = (torch.randn(n, width, device="cuda").bfloat16() for n in (8192, columns, columns))
    matrix = SimpleNamespace(weight=weight, bias=bias[:, 0].contiguous() if biased else None, adapters=None)
    with torch.inference_mode():
        for gated in (False, True):
            whole = linear(matrix, x, gated)
            for rows in (1, 2, 7, 8, FEW, 17):
                assert torch.equal(linear(matrix, x[:rows], gated), whole[:rows])


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("architecture", ["Qwen3", "Mistral", "Qwen2", "Llama", "Mixtral"])
def test_no_difference_for_any_model_or_sampling(make_policy: Callable[..., Policy], architecture: str, top_p: float):
    changes = {"sliding_window": 70} if architecture == "Mistral" else {}
    policy = on_cuda(make_policy, architecture, True, **changes)
    found = busy_run(
        policy, num_groups=8, max_new_tokens=700, spread_steps=8, top_p=top_p, max_running=12, prefill_tokens=200
    )
    for num_per_pack in (1, len(found)):
        assert gaps(policy, found, num_per_pack).max() == 0.0


@pytest.mark.parametrize(
    ("architecture", "window"), [("Qwen3", None), ("Mistral", 70), ("Mistral", 600), ("Qwen3Moe", None)]
)
def test_common_prefixes_are_computed_once_with_the_same_bits(
    make_policy: Callable[..., Policy], architecture: str, window: int | None
):
    policy = on_cuda(make_policy, architecture, True, **({"sliding_window": window} if window else {}))
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 90, n).tolist() for n in (530, 100, 37, 64, 65, 200, 1)]
    routes = np.argsort(rng.random((900, 2, 16)), axis=2)[..., :4].astype(np.uint8)
    answers = [trajectory(index=i, prompt=texts[0], answer=texts[1] + text) for i, text in enumerate(texts[2:])]
    answers += [trajectory(serial=1, prompt=texts[0][:300] + texts[5], answer=texts[3])]
    if policy.routers.num_layers:
        answers = [replace(t, replay=Replay(routes=routes[: len(t.token_ids)])) for t in answers]
    items = [Item(trajectory=t, advantage=0.0) for t in answers]
    batches = [pack(some, policy.device, policy.routers) for some in (items, *([item] for item in items))]
    assert max(batches[0].plan.after) >= 0
    assert len(batches[0].token_ids) == 630 + 37 + 64 + 65 + 200 + 1 + 264
    found, gradients = [], []
    for some in (batches[:1], batches[1:]):
        policy.model.zero_grad()
        parts = [policy.logprobs(b.token_ids, b.plan, b.at, 0.7, None, b.routes)[0] for b in some]
        found.append(torch.cat(parts))
        found[-1].sum().backward()
        gradients.append({n: p.grad.float() for n, p in policy.model.named_parameters() if p.grad is not None})
    assert torch.equal(*found)
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() < 0.03 * expected.norm(), name


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
def test_turns_go_on_from_the_pages_of_earlier_ones(make_policy: Callable[..., Policy], architecture: str):
    policy = on_cuda(make_policy, architecture, True)
    make = partial(Engine, policy, max_running=16, prefill_tokens=200, kv_tokens=20_000, on_update="keep")
    engine = make()
    played = play(engine, num_sessions=5, num_turns=4, told=61)
    assert_as_from_scratch(make, played)
    first = sum(len(question[0]) for id, (question, _) in played.items() if id.endswith("#1"))
    assert engine.counts.prompt_tokens - engine.counts.cached_tokens == first + 5 * 3 * (61 + 1)
    engine.forget({f"s{i}" for i in range(5)})
    engine.step()
    assert engine._store.pages.num_free == engine._store.num_pages


def test_an_output_head_of_odd_width_is_refused(make_policy: Callable[..., Policy]):
    """Its product differs in one row of some hundreds, which a check on random numbers may miss."""
    cpu = make_policy("Qwen3", **SHAPE)
    cpu.model.resize_token_embeddings(99)
    with pytest.raises(ModelError, match="sizes that 8 divides, and the output head makes 99 numbers of 256"):
        Policy(cpu.model.to("cuda", torch.bfloat16), cpu.tokenizer, exact=True)


def test_auto_is_exact_where_that_is_possible(make_policy: Callable[..., Policy], tmp_path: Path):
    def loaded(width: int, learner: LearnerSection | None = None) -> bool:
        policy = make_policy("Qwen3", **SHAPE)
        policy.model.resize_token_embeddings(width)
        policy.save(tmp_path / str(width))
        return load_policy(ModelSection(path=str(tmp_path / str(width)), device="cuda"), learner).exact

    assert loaded(128)
    assert not loaded(99)
    assert loaded(128, LearnerSection(lora_rank=8))


def adapted(policy: Policy, directory: Path, exact: bool, rank: int = 8) -> Policy:
    """The policy with adapters that are not at zero any more."""
    policy.save(directory)
    section = ModelSection(path=str(directory), device="cuda", exact=exact)
    found = load_policy(section, LearnerSection(lora_rank=rank))
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, weight in found.model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=generator, device="cuda"))
    return found


@pytest.mark.parametrize("rank", [8, 32])
@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
def test_adapters_are_exact(make_policy: Callable[..., Policy], tmp_path: Path, architecture: str, rank: int):
    """In the learner's pass with gradients, too, which adds what they make in another way."""
    policy = adapted(on_cuda(make_policy, architecture, False), tmp_path, True, rank)
    found = busy_run(policy, num_groups=60, max_new_tokens=180, spread_steps=40, max_running=64, prefill_tokens=97)
    for num_per_pack in (len(found) // 3, len(found) // 12):
        assert gaps(policy, found, num_per_pack).max() == 0.0
    batch = pack([Item(trajectory=t, advantage=1.0) for t in found], policy.device, policy.routers)
    ours, _ = policy.logprobs(batch.token_ids, batch.plan, batch.at, TEMPERATURE, batch.support, batch.routes)
    assert ours.requires_grad
    assert torch.equal(ours.detach().float(), batch.behaviour)


def test_adapters_by_the_kernels_learn_as_by_the_modules(make_policy: Callable[..., Policy], tmp_path: Path):
    policy = adapted(on_cuda(make_policy, "Qwen3", False), tmp_path, False)
    rng = np.random.default_rng(0)
    texts = [(rng.integers(3, 90, 50).tolist(), rng.integers(3, 90, 150).tolist()) for _ in range(8)]
    answers = [trajectory(index=i, prompt=prompt, answer=answer) for i, (prompt, answer) in enumerate(texts)]
    items = [Item(trajectory=answer, advantage=1.0) for answer in answers]
    batch = pack(items, policy.device, policy.routers)
    weights = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert weights
    assert all(".lora_" in name for name in weights)
    found = {}
    for by_kernels in (True, False):
        assert policy._family is not None
        policy._family.fits_kernels = by_kernels
        values, _ = policy.logprobs(batch.token_ids, batch.plan, batch.at, 1.0)
        values.float().mean().backward()
        found[by_kernels] = values.detach().float(), {name: p.grad.float() for name, p in weights.items()}
        for p in weights.values():
            p.grad = None
    assert (found[True][0] - found[False][0]).abs().max() < 0.1
    for name, grad in found[False][1].items():
        assert (found[True][1][name] - grad).norm() < 0.05 * grad.norm(), name


def test_drafts_change_nothing(make_policy: Callable[..., Policy]):
    policy = on_cuda(make_policy, "Qwen3", True)
    plain, drafted = (
        {t.id: t for t in busy_run(policy, num_groups=12, max_new_tokens=200, spread_steps=8, speculate=k)}
        for k in (0, 8)
    )
    for id, answer in plain.items():
        assert (answer.token_ids == drafted[id].token_ids).all()
        assert (answer.logprobs == drafted[id].logprobs).all()


def test_the_default_mode_differs(make_policy: Callable[..., Policy]):
    """So the tests above can fail."""
    torch.backends.cuda.preferred_blas_library("cublas")  # an exact policy before it chose otherwise, for the process
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    policy = on_cuda(make_policy, "Qwen3", False)
    found = busy_run(policy, num_groups=8, max_new_tokens=300, spread_steps=8, max_running=12, prefill_tokens=200)
    difference = gaps(policy, found, len(found))
    assert (difference > 0).mean() > 0.01
    assert difference.max() < 0.2

"""A learner in several processes takes the steps of one in a single process. Real ranks, over gloo."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from rank_work import Outcome, learner_of, load, on_ranks, take_step, take_steps
from safetensors.torch import save_file
from torch import Tensor

from headrace.config import LearnerSection, ModelSection, WarmstartSection
from headrace.errors import ModelError
from headrace.learner.batch import pack, split
from headrace.learner.learner import WarmStart
from headrace.learner.optimizer import Sharding
from headrace.learner.ranks import Intake
from headrace.policy.policy import Policy, load_policy
from headrace.policy.shards import Shards
from headrace.types import Example, Group, Item, Replay

LR = 1e-3
LORA = LearnerSection(lora_rank=4, lora_alpha=8.0)
# What another order of sums moves a weight by, in steps; 2.8e-3 was seen on Neoverse-N1. A wrong gradient moves it 1.
ROUNDING = 1e-3 if platform.machine() == "x86_64" else 4e-3
Maker = Callable[..., Policy]


@pytest.fixture
def saved(make_policy: Maker, tmp_path: Path) -> Callable[..., Path]:
    """`saved("Llama", **changes)`: the directory of a tiny model."""

    def save(architecture: str = "Qwen3", **changes: Any) -> Path:
        make_policy(architecture, **changes).save(tmp_path / architecture)
        return tmp_path / architecture

    return save


def make_steps(
    *, supported: bool = False, routes: tuple[int, int, int] | None = None, prompt_tokens: int = 4
) -> list[list[Group]]:
    """Two steps of three groups; the answers are of very different lengths."""
    rng = np.random.default_rng(3)

    def replay(answer: np.ndarray, num_tokens: int) -> Replay | None:
        if routes is not None:
            num_layers, num_experts, per_token = routes
            scores = rng.random((num_tokens, num_layers, num_experts))
            return Replay(routes=scores.argsort(-1)[..., :per_token].astype(np.uint8))
        if not supported:
            return None
        subsets = [np.unique([token, *rng.integers(3, 90, size=9)]) for token in answer]
        offsets = np.cumsum([0, *map(len, subsets)]).astype(np.int64)
        return Replay(support_ids=np.concatenate(subsets).astype(np.int32), support_offsets=offsets)

    def make(serial: int, sizes: tuple[int, ...]) -> Group:
        prompt = rng.integers(3, 90, size=prompt_tokens + serial).tolist()
        answers = []
        for i, size in enumerate(sizes):
            answer = rng.integers(3, 90, size=size)
            logprobs = -rng.random(size) * 6
            reward = float(rng.integers(0, 3)) + i / 8
            kept = replay(answer, len(prompt) + size)
            answers.append(
                trajectory(
                    serial=serial, index=i, prompt=prompt, answer=answer, logprobs=logprobs, reward=reward, replay=kept
                )
            )
        return group_of(*answers, serial=serial)

    sizes = [(5, 9, 2), (7, 1, 3, 12), (4, 30)]
    return [[make(3 * step + i, of) for i, of in enumerate(sizes)] for step in range(2)]


def assert_same(found: Outcome, expected: Outcome) -> None:
    for name, weight in expected.weights.items():
        gap = (found.weights[name] - weight).abs().max()
        assert gap < ROUNDING * LR, f"{name} differs by {gap}"
    assert found.weights.keys() == expected.weights.keys()
    for mine, theirs in zip(found.stats, expected.stats, strict=True):
        for name in ("loss", "grad_norm", "lr", "entropy", "kl_reference", "clipped_share"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-4, abs=1e-6), name
        assert mine.mismatch.count == theirs.mismatch.count
        assert mine.mismatch.mean_abs == pytest.approx(theirs.mismatch.mean_abs, rel=1e-5)


def assert_all_ranks_agree(outcomes: list[Outcome]) -> None:
    for other in outcomes[1:]:
        assert other.stats == outcomes[0].stats
        assert all(torch.equal(other.weights[name], weight) for name, weight in outcomes[0].weights.items())


@pytest.mark.parametrize("ranks", [2, 4, (2, 2)])
def test_any_number_of_ranks_takes_the_same_steps(saved: Callable[..., Path], ranks: int | tuple[int, int]):
    directory, steps = saved(), make_steps()
    section = LearnerSection(lr=LR, micro_batch_tokens=32)
    outcomes = on_ranks(ranks, take_steps, directory, section, steps)
    assert_all_ranks_agree(outcomes)
    assert_same(outcomes[0], take_steps(None, directory, section, steps))


def parts_held(sharding: Sharding, directory: Path) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in load(directory, sharding).held()}


def test_the_ranks_of_a_replica_are_on_one_node(saved: Callable[..., Path]):
    found = on_ranks((2, 2), parts_held, saved(), hosts=("a", "b", "a", "b"))
    for name, part in found[0].items():
        assert torch.equal(found[1][name], part), name  # the first of its node, too
        assert torch.equal(found[3][name], found[2][name]), name
        assert "norm" in name or found[2][name].shape != part.shape or not torch.equal(found[2][name], part), name


VARIANTS: dict[str, tuple[str, dict[str, Any], LearnerSection, dict[str, Any]]] = {
    "mixture": ("Qwen3Moe", {}, LearnerSection(lr=LR, micro_batch_tokens=32), {"routes": (2, 4, 2)}),
    "outside the family": ("Starcoder2", {}, LearnerSection(lr=LR, micro_batch_tokens=32), {}),
    "support and reference": (
        "Llama",
        {"tie_word_embeddings": False},
        LearnerSection(lr=LR, micro_batch_tokens=32, kl_coef=0.1, loss="gspo", aggregation="sequence"),
        {"supported": True},
    ),
    "recomputed": ("Qwen3", {}, LearnerSection(lr=LR, micro_batch_tokens=32, checkpoint_activations=True), {}),
    "recomputed mixture": (
        "Qwen3Moe",
        {},
        LearnerSection(lr=LR, micro_batch_tokens=32, checkpoint_activations=True),
        {"routes": (2, 4, 2)},
    ),
    "recomputed outside the family": (
        "Starcoder2",
        {},
        LearnerSection(lr=LR, micro_batch_tokens=32, checkpoint_activations=True),
        {},
    ),
    "shared prefixes": ("Qwen3", {}, LearnerSection(lr=LR, micro_batch_tokens=60), {"prompt_tokens": 36}),
    "whole step": ("Qwen3", {}, LearnerSection(lr=LR, micro_batch_tokens=32, advantage="reinforce++"), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_train_every_kind_of_model(saved: Callable[..., Path], variant: str):
    architecture, changes, section, kind = VARIANTS[variant]
    directory, steps = saved(architecture, **changes), make_steps(**kind)
    outcomes = on_ranks(2, take_steps, directory, section, steps)
    assert_all_ranks_agree(outcomes)
    assert_same(outcomes[0], take_steps(None, directory, section, steps))


def test_many_small_passes_add_up_to_one_large_one(saved: Callable[..., Path]):
    directory, steps = saved(), make_steps()
    small, large = (
        on_ranks(2, take_steps, directory, LearnerSection(lr=LR, micro_batch_tokens=budget), steps)[0]
        for budget in (16, 4096)
    )
    assert_same(small, large)


def test_the_steps_of_one_rank_have_the_bits_of_one_process(saved: Callable[..., Path]):
    directory, steps, section = saved(), make_steps(), LearnerSection(lr=LR, micro_batch_tokens=4096)
    sharded, plain = on_ranks(1, take_steps, directory, section, steps)[0], take_steps(None, directory, section, steps)
    assert sharded.stats == plain.stats
    assert all(torch.equal(sharded.weights[name], weight) for name, weight in plain.weights.items())


def bytes_held(sharding: Sharding, directory: Path, groups: list[Group]) -> tuple[int, int]:
    """Of all tensors that are alive between two passes of the second step, and of a whole model's weights."""
    section = LearnerSection(micro_batch_tokens=16)
    learner = learner_of(load(directory, sharding), section, sharding)
    take_step(learner, groups)
    intake = Intake(section, sharding.num_ranks)
    for items in [*intake.add(groups[0]), *intake.rest()]:
        learner.accumulate(split(items, sharding.num_ranks)[sharding.rank])
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    num_weights = sum(weight.numel() for _, weight in learner.weights(torch.float32))
    return sum(storages.values()), 4 * num_weights


def test_a_rank_holds_its_part_of_weights_gradients_and_moments(saved: Callable[..., Path]):
    directory, groups = saved(hidden_size=256, intermediate_size=512, head_dim=64), make_steps()[0]
    for held, weights in on_ranks(4, bytes_held, directory, groups):
        assert held < 1.05 * 4 * weights / 4
        assert held > 0.95 * 4 * weights / 4


def first_weights(sharding: Sharding, directory: Path) -> Any:
    """Of a policy that only the parts here were read for, and which of the two ways they came."""
    read = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Shards.read
        patch.setattr(Shards, "read", lambda shards, path: read.append(plain(shards, path)) or read[-1])
        policy = load(directory, sharding)
    learner = learner_of(policy, LearnerSection(), sharding)
    buffers = {name: buffer.clone() for name, buffer in policy.model.named_buffers()}
    return read, {name: weight.clone() for name, weight in learner.weights(torch.float32)} | buffers


@pytest.mark.parametrize(
    ("architecture", "is_read"), [("Qwen3", True), ("Starcoder2", True), ("Gemma", True), ("Qwen3Moe", False)]
)
def test_each_rank_loads_its_part_of_the_weights(saved: Callable[..., Path], architecture: str, is_read: bool):
    directory = saved(architecture)
    model = load(directory).model
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    for read, found in on_ranks(3, first_weights, directory):
        assert read == [is_read]  # a mixture's experts have other names and shapes in files
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_file_that_is_not_the_model_s_is_not_read(saved: Callable[..., Path]):
    directory = saved()
    expected = dict(load(directory).model.named_parameters())
    save_file({name: weight + 1 for name, weight in expected.items()}, directory / "older.safetensors")
    for read, found in on_ranks(2, first_weights, directory):
        assert read == [False]
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def refusal(sharding: Sharding, directory: Path) -> str:
    with pytest.raises(ModelError) as refused:
        load(directory, sharding)
    return str(refused.value)


def test_all_ranks_refuse_weights_that_are_not_numbers(make_policy: Maker, tmp_path: Path):
    policy = make_policy()
    weight = policy.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data[-1] = torch.nan  # in the part of the last rank
    policy.save(tmp_path)
    for told in on_ranks(2, refusal, tmp_path):
        assert "1 of the weights of Qwen3ForCausalLM hold NaN or infinity, such as model.layers.1.mlp.down_proj" in told


def warmed(sharding: Sharding | None, directory: Path, batches: list[list[Example]]) -> tuple[list[float], Any]:
    policy = load(directory, sharding)
    warming = WarmStart(policy, WarmstartSection(steps=20, lr=LR), sharding)
    losses = [warming.step(batch) for batch in batches]
    learner = learner_of(policy, LearnerSection(kl_coef=0.1), sharding)  # its reference: the weights of now
    whole = {name: weight.clone() for name, weight in learner.weights(torch.float32)}
    reference = learner.reference_tensors()
    held = dict(policy.held())
    same = all(torch.equal(getattr(t, "_local_tensor", t), held[name]) for name, t in reference.items())
    return losses, (whole, same)


def test_ranks_warm_up_together(saved: Callable[..., Path]):
    rng = np.random.default_rng(5)
    lengths = [[9, 4, 17], [6], [12, 5]]  # one example is too few for two ranks
    batches = [[(rng.integers(3, 90, n).astype(np.int32), np.arange(n) > 2) for n in of] for of in lengths]
    directory = saved()
    losses, (expected, _) = warmed(None, directory, batches)
    for found, (weights, same) in on_ranks(2, warmed, directory, batches):
        assert found == pytest.approx(losses, rel=1e-5)
        assert same
        for name, weight in expected.items():
            assert (weights[name] - weight).abs().max() < ROUNDING * LR, name


def skip_and_go_on(sharding: Sharding, directory: Path, section: LearnerSection, steps: list[list[Group]]) -> Any:
    learner = learner_of(load(directory, sharding), section, sharding)
    before = {name: weight.clone() for name, weight in learner.weights(torch.float32)}
    broken = [replace(g, trajectories=tuple(replace(t, reward=np.inf) for t in g.trajectories)) for g in steps[0]]
    skipped = take_step(learner, broken)
    unmoved = all(torch.equal(before[name], weight) for name, weight in learner.weights(torch.float32))
    return skipped.skipped, unmoved, take_step(learner, steps[1]).skipped


def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(saved: Callable[..., Path]):
    section = LearnerSection(lr=LR)
    assert on_ranks(2, skip_and_go_on, saved(), section, make_steps()) == [(True, True, False)] * 2


def mismatches(sharding: Sharding | None, directory: Path, groups: list[Group]) -> Any:
    """Of each rank's own part, before and after a step."""
    learner = learner_of(load(directory, sharding), LearnerSection(lr=LR, micro_batch_tokens=32), sharding)
    answers = [t for group in groups for t in group.trajectories]
    if sharding is not None:
        answers = answers[sharding.rank :: sharding.num_ranks]
    before = learner.mismatch(answers)
    take_step(learner, groups)
    after = learner.mismatch(answers)
    assert len(list(learner.weights(torch.float32))) > 20  # the weights are in their pieces again
    return before, after


def test_ranks_measure_the_mismatch_of_all_their_parts(saved: Callable[..., Path]):
    directory, groups = saved(), make_steps()[0]
    parts = on_ranks(2, mismatches, directory, groups)
    for of_ranks, of_one in zip(zip(*parts, strict=True), mismatches(None, directory, groups), strict=True):
        assert of_ranks[0] == of_ranks[1]
        assert of_ranks[0].count == of_one.count
        assert of_ranks[0].mean_abs == pytest.approx(of_one.mean_abs, rel=1e-6)


def logprobs(sharding: Sharding | None, directory: Path, groups: list[Group]) -> list[Any]:
    """Of all answers, in company that differs from rank to rank."""
    policy = load(directory, sharding, exact=True)
    items = [Item(trajectory=t, advantage=0.0) for group in groups for t in group.trajectories]
    first = 0 if sharding is None else sharding.rank
    order = [*items[first:], *items[:first]]
    batch = pack(order, policy.device)
    with torch.no_grad():
        found, _ = policy.logprobs(batch.token_ids, batch.plan, batch.at, 1.0)
    parts = found.split([item.trajectory.num_sampled_tokens for item in order])
    return [parts[order.index(item)].numpy() for item in items]


def test_exact_ranks_compute_the_bits_of_one_process(saved: Callable[..., Path]):
    directory, groups = saved(), make_steps()[0]
    expected = np.concatenate(logprobs(None, directory, groups))
    for found in on_ranks(2, logprobs, directory, groups):
        assert np.array_equal(np.concatenate(found), expected)


def half_precision(sharding: Sharding, directory: Path, section: LearnerSection, groups: list[Group]) -> Any:
    learner = learner_of(load(directory, sharding, dtype="bfloat16"), section, sharding)
    stats = take_step(learner, groups)
    masters = {name: tensor.full_tensor() for name, tensor in learner.tensors().items() if name.startswith("master.")}
    rounded = dict(learner.weights(torch.bfloat16))
    return stats, masters, rounded


def test_half_precision_is_trained_in_float32_shards(saved: Callable[..., Path]):
    directory, groups, section = saved(), make_steps()[0], LearnerSection(lr=1e-6, micro_batch_tokens=32)
    stats, masters, rounded = on_ranks(2, half_precision, directory, section, groups)[0]
    alone = learner_of(load(directory, dtype="bfloat16"), section, None)
    assert stats.grad_norm == pytest.approx(take_step(alone, groups).grad_norm, rel=0.03)
    start = {name: p.float() for name, p in load(directory, dtype="bfloat16").model.named_parameters()}
    for name, weight in rounded.items():
        moved = (masters[f"master.{name}"] - start[name]).abs()
        assert 0 < moved.max() < 1.1e-6  # less than bfloat16 could tell
        assert torch.equal(weight, masters[f"master.{name}"].bfloat16())


def test_every_item_goes_to_one_rank_and_loads_are_even():
    sizes = [30, 1, 7, 7, 12, 3, 9, 5]
    items = [
        Item(trajectory=trajectory(serial=i, prompt=(i,), answer=[7] * (size - 1)), advantage=0.0)
        for i, size in enumerate(sizes)
    ]
    parts = [[len(item.trajectory.token_ids) for item in part] for part in split(items, 3)]
    assert sorted(size for part in parts for size in part) == sorted(sizes)
    assert max(map(sum, parts)) - min(map(sum, parts)) <= 9
    assert split(items[:1], 3) == [items[:1], [], []]


def adapters_of(sharding: Sharding | None, directory: Path, section: LearnerSection, steps: list[list[Group]]) -> Any:
    """What is published of a learner that trains adapters, and its steps."""
    policy = load_policy(ModelSection(path=str(directory), device="cpu"), LORA, 1, sharding and sharding.mesh)
    learner = learner_of(policy, section, sharding)
    stats = [take_step(learner, groups) for groups in steps]
    trained = {name: weight.clone() for name, weight in learner.weights(torch.float32, trained_only=True)}
    frozen = {name: weight.clone() for name, weight in learner.weights(torch.float32) if name not in trained}
    return Outcome(trained, stats), frozen


def test_ranks_train_adapters_alone(saved: Callable[..., Path]):
    directory, steps, section = saved(), make_steps(), LearnerSection(lr=LR, micro_batch_tokens=32)
    (found, frozen), _ = on_ranks(2, adapters_of, directory, section, steps)
    expected, base = adapters_of(None, directory, section, steps)
    assert_same(found, expected)
    assert all(".lora_" in name for name in found.weights)
    assert frozen.keys() == base.keys()
    start = dict(load(directory).model.named_parameters())
    assert all(torch.equal(weight, start[name.replace(".base_layer.", ".")]) for name, weight in frozen.items())


def save_whole(sharding: Sharding, directory: Path, groups: list[Group], lora: Any, into: Path) -> Any:
    section = LearnerSection(lr=LR)
    policy = load_policy(ModelSection(path=str(directory), device="cpu"), lora, 1, sharding.mesh)
    learner = learner_of(policy, section, sharding)
    take_step(learner, groups)
    weights = {name: weight.clone() for name, weight in learner.weights(torch.float32)}
    if sharding.rank == 0:
        learner.policy.save(into, weights)
    return weights


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_a_policy_in_parts_is_saved_whole(saved: Callable[..., Path], tmp_path: Path, lora: LearnerSection | None):
    weights = on_ranks(2, save_whole, saved(), make_steps()[0], lora, tmp_path / "whole")[0]
    found = dict(load(tmp_path / "whole").model.named_parameters())
    if lora is None:
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        return
    base = [name for name in weights if ".base_layer." in name]
    assert base
    for name in base:
        down, up = (weights[name.replace("base_layer", f"lora_{side}.default")] for side in "AB")
        merged = weights[name] + 2.0 * (up @ down)
        torch.testing.assert_close(found[name.replace("base_layer.", "")], merged, rtol=0, atol=1e-6)
        assert not torch.equal(merged, weights[name])


# ---- a teacher


def test_the_reference_is_the_teacher(saved: Callable[..., Path], make_policy: Maker, tmp_path: Path):
    teacher, directory = tmp_path / "teacher", saved()
    make_policy("Qwen3", num_hidden_layers=3).save(teacher)
    learner = learner_of(load(directory), LearnerSection(kl_coef=1.0, teacher=str(teacher)), None)
    (group, *_), *_ = make_steps()
    (found, *_) = learner.reference_logprobs(group)
    answer = group.trajectories[0]
    model = load(teacher).model
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(answer.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = (model(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
    at = torch.from_numpy(np.flatnonzero(answer.sampled))
    expected = logprobs[at - 1].gather(1, ids[at][:, None])[:, 0]
    assert found == pytest.approx(expected.numpy(), abs=1e-5)


def test_ranks_have_the_teacher_in_parts(
    saved: Callable[..., Path], make_policy: Callable[..., Policy], tmp_path: Path
):
    make_policy("Qwen3", num_hidden_layers=3).save(tmp_path / "teacher")
    directory, steps = saved(), make_steps()
    section = LearnerSection(lr=LR, kl_coef=0.5, teacher=str(tmp_path / "teacher"), micro_batch_tokens=32)
    outcomes = on_ranks(2, take_steps, directory, section, steps)
    assert_all_ranks_agree(outcomes)
    assert_same(outcomes[0], take_steps(None, directory, section, steps))
    assert outcomes[0].stats[0].kl_reference > 0.01


# ---- a critic


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("change", [{"minibatches": 1}, {"epochs": 2, "minibatches": 3}])
def test_ranks_take_the_same_updates(saved: Callable[..., Path], change: dict[str, Any], own: bool):
    directory, steps = saved(), make_steps()
    if own:
        critic = saved("Llama", num_hidden_layers=3, tie_word_embeddings=False)
        change = change | {"critic": str(critic), "value_lr": LR}
    section = LearnerSection(advantage="gae", gae_lambda=0.9, lr=LR, micro_batch_tokens=32, **change)
    outcomes = on_ranks(2, take_steps, directory, section, steps)
    assert_all_ranks_agree(outcomes)
    assert_same(outcomes[0], take_steps(None, directory, section, steps))

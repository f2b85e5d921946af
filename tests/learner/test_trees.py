"""Common prefixes are computed once, and what is computed is what each sequence would compute alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.config import LearnerSection
from headrace.learner import tree
from headrace.learner.batch import Batch, Packer, balanced, pack, split
from headrace.learner.learner import Learner
from headrace.learner.ranks import Intake
from headrace.learner.tree import Forest
from headrace.measured import StepStats
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.types import FinishReason, Item, Replay, Segment, Span, Trajectory, Turn

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, count).tolist()


def branching(ids: Sequence[int], sampled: Sequence[bool], branches: Sequence[tuple[int, int]]) -> Trajectory:
    at = np.flatnonzero(sampled).tolist()
    return replace(
        trajectory(serial=9, prompt=ids[:1], answer=ids[1:]),
        sampled=np.array(sampled),
        spans=tuple(Span(version=0, start=i, end=i + 1) for i in at),
        segments=tuple(Segment(start=start, after=after) for start, after in branches),
    )


def rewritten(turns: int = 4, seed: int = 5) -> Trajectory:
    """An agent whose history is edited: each turn goes on after an earlier token, one after none."""
    ids, sampled, branches = tokens(40, seed), [False] * 40, []
    for turn in range(turns):
        if turn:
            branches.append((len(ids), -1 if turn == 3 else len(ids) - 7 * turn - 3))
        ids, sampled = ids + tokens(17, seed + turn), sampled + [False] * 9 + [True] * 8
    return branching(ids, sampled, branches)


def group(prompt: int = 70, answers: Sequence[int] = (20, 3, 19, 20)) -> list[Trajectory]:
    """Answers to one prompt; the first tokens of two of them are the same, too."""
    ids = [tokens(n, 100 + i) for i, n in enumerate(answers)]
    ids[2][:9] = ids[0][:9]
    return [trajectory(index=i, prompt=tokens(prompt, prompt), answer=a) for i, a in enumerate(ids)]


def unfolded(t: Trajectory) -> list[Trajectory]:
    """A sequence for each part of a tree: all tokens from its root on, sampled where the part's own were."""
    found = []
    starts = [0, *(segment.start for segment in t.segments)]
    for start, end in pairwise([*starts, len(t.token_ids)]):
        path = np.concatenate([np.arange(*part) for part in t.ranges(end - 1)])
        sampled = t.sampled[path] & (path >= start)
        spans = tuple(Span(version=0, start=i, end=i + 1) for i in np.flatnonzero(sampled).tolist())
        replay = t.replay and replace(t.replay, routes=None if t.replay.routes is None else t.replay.routes[path])
        changes: Any = {"sampled": sampled, "spans": spans, "segments": (), "replay": replay}
        if sampled.any():
            found.append(replace(t, token_ids=t.token_ids[path], logprobs=t.logprobs[path], **changes))
    return found


def items(trajectories: Sequence[Trajectory]) -> list[Item]:
    return [Item(trajectory=t, advantage=1.0) for t in trajectories]


def logprobs(policy: Policy, batch: Batch, temperature: float | Tensor = 0.7) -> Tensor:
    return policy.logprobs(batch.token_ids, batch.plan, batch.at, temperature, batch.support, batch.routes)[0]


def alone(policy: Policy, trajectories: Sequence[Trajectory]) -> Tensor:
    """The same log-probs, every sequence in a pass of its own."""
    parts = [part for t in trajectories for part in unfolded(t)]
    batches = [pack(items([part]), policy.device, policy.routers) for part in parts]
    assert all(type(batch.plan) is PackedPlan for batch in batches)
    return torch.cat([logprobs(policy, batch) for batch in batches])


def together(policy: Policy, trajectories: Sequence[Trajectory]) -> Tensor:
    batch = pack(items(trajectories), policy.device, policy.routers)
    assert max(batch.plan.after) >= 0
    assert len(batch.token_ids) < sum(len(t.token_ids) for t in trajectories) or len(trajectories) == 1
    return logprobs(policy, batch)


def gradients(policy: Policy, values: Tensor) -> dict[str, Tensor]:
    policy.model.zero_grad()
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(3), dtype=values.dtype)
    (values * weights).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def test_eight_answers_to_a_long_prompt_are_counted_once() -> None:
    answers = [trajectory(index=i, prompt=tokens(512, 1), answer=tokens(64, 10 + i)) for i in range(8)]
    batch = pack(items(answers), CPU)
    assert len(batch.token_ids) == 512 + 8 * 64
    assert batch.plan.positions[0].max() == 575
    assert batch.token_ids[batch.at].tolist() == [i for t in answers for i in t.token_ids[512:].tolist()]


def test_a_token_that_two_sampled_is_computed_once_and_counts_twice() -> None:
    prompt, first = tokens(40, 1), tokens(60, 2)
    answers = [trajectory(index=i, prompt=prompt, answer=first[:50] + tokens(10, 3 + i)) for i in range(2)]
    batch = pack([Item(trajectory=t, advantage=a) for t, a in zip(answers, (0.5, -2.0), strict=True)], CPU)
    assert len(batch.token_ids) == 40 + 50 + 2 * 10
    assert batch.at[:50].tolist() == batch.at[60:110].tolist()
    assert batch.advantage.tolist() == [0.5] * 60 + [-2.0] * 60
    assert batch.sequence_ids.tolist() == [0] * 60 + [1] * 60


@pytest.mark.parametrize("prompt", [1, 20, tree.LEAST_SHARED - 1])
def test_what_is_not_worth_sharing_is_laid_end_to_end(make_policy: Callable[..., Policy], prompt: int) -> None:
    policy, answers = make_policy(), group(prompt)
    batch = pack(items(answers), CPU)
    assert type(batch.plan) is PackedPlan
    np.testing.assert_array_equal(batch.token_ids, np.concatenate([t.token_ids for t in answers]))
    np.testing.assert_array_equal(batch.at, np.flatnonzero(np.concatenate([t.sampled for t in answers])))
    plan = PackedPlan([len(t.token_ids) for t in answers], CPU)
    before = policy.logprobs(batch.token_ids, plan, batch.at, 0.7)[0]
    assert torch.equal(logprobs(policy, batch), before)
    assert torch.equal(batch.plan.positions, plan.positions)


@pytest.mark.parametrize("make", [group, lambda: [rewritten()], lambda: [*group(), rewritten(), *group(33)]])
@pytest.mark.parametrize(("architecture", "window"), [("Qwen3", None), ("Mistral", 11), ("Mistral", 40)])
def test_the_bits_of_exact_mode_are_those_of_separate_sequences(
    make_policy: Callable[..., Policy], make: Callable[[], list[Trajectory]], architecture: str, window: int | None
) -> None:
    changes = {"sliding_window": window} if architecture == "Mistral" else {}
    policy, trajectories = make_policy(architecture, exact=True, **changes), make()
    ours, theirs = together(policy, trajectories), alone(policy, trajectories)
    assert torch.equal(ours, theirs)
    expected = gradients(policy, theirs)
    for name, gradient in gradients(policy, ours).items():
        largest = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral"])
def test_tokens_are_shared_only_if_they_went_to_the_same_experts(
    make_policy: Callable[..., Policy], architecture: str
) -> None:
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    policy = make_policy(architecture, exact=True, **(changes if architecture == "Mixtral" else {}))
    prompt_routes = RNG.permuted(np.tile(np.arange(4, dtype=np.uint8), (70, 2, 1)), axis=2)[..., :2]

    def routed(t: Trajectory, changed_at: int | None) -> Trajectory:
        own = RNG.permuted(np.tile(np.arange(4, dtype=np.uint8), (len(t.token_ids), 2, 1)), axis=2)[..., :2]
        own[:70] = prompt_routes
        if changed_at is not None:
            own[changed_at] = own[changed_at, :, ::-1]
        return replace(t, replay=Replay(routes=own))

    same = [routed(t, None) for t in group()]
    assert len(pack(items(same), CPU, policy.routers).token_ids) == 70 + 20 + 3 + 19 + 20
    other = [routed(t, at) for t, at in zip(group(), (None, 50, 10, None), strict=True)]
    assert len(pack(items(other), CPU, policy.routers).token_ids) == 70 + 20 + (20 + 3) + (70 + 19) + 20
    assert torch.equal(together(policy, same), alone(policy, same))
    assert torch.equal(together(policy, other), alone(policy, other))


def test_sampling_support_belongs_to_the_trajectory(make_policy: Callable[..., Policy]) -> None:
    """Two that share a token may have been left different tokens to sample from."""
    policy = make_policy(exact=True)

    def supported(t: Trajectory) -> Trajectory:
        subsets = [np.unique([i, *RNG.integers(3, 90, 9)]) for i in t.token_ids[t.sampled]]
        offsets = np.cumsum([0, *map(len, subsets)]).astype(np.int64)
        return replace(t, replay=Replay(support_ids=np.concatenate(subsets).astype(np.int32), support_offsets=offsets))

    answers = [supported(t) for t in group()]
    assert torch.equal(together(policy, answers), alone(policy, answers))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("window", [None, 13])
def test_the_gradient_is_that_of_separate_sequences(
    make_policy: Callable[..., Policy], window: int | None, checkpointed: bool
) -> None:
    policy = make_policy("Starcoder2", dtype=torch.float64, sliding_window=window)  # float64 throughout
    if checkpointed:
        policy.checkpoint_activations()
    trajectories = [*group(), rewritten()]
    ours, theirs = together(policy, trajectories), alone(policy, trajectories)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    expected = gradients(policy, theirs)
    for name, gradient in gradients(policy, ours).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)
    first, second = (gradients(policy, together(policy, trajectories)) for _ in range(2))
    assert all(torch.equal(first[name], gradient) for name, gradient in second.items())


@st.composite
def forests(draw: st.DrawFn) -> list[Trajectory]:
    """Trees of few different tokens, so that much is alike by chance."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(st.integers(3, 4), min_size=2, max_size=30))
        cuts = draw(st.lists(st.integers(1, len(ids) - 1), max_size=4, unique=True).map(sorted))
        branches = [(cut, draw(st.integers(-1, cut - 1))) for cut in cuts]
        roots = {0} | {start for start, after in branches if after < 0}
        wanted = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        found.append(branching(ids, [w and i not in roots for i, w in enumerate(wanted)], branches))
    return found


@settings(deadline=None, max_examples=60)
@given(trajectories=forests(), least=st.integers(1, 4))
def test_any_forest(trajectories: list[Trajectory], least: int) -> None:
    """Laid out, every token still has the tokens before it; and what sees a token follows it without a gap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "LEAST_SHARED", least)
        lengths, after, which, rows = Forest(trajectories).laid_out()
    ids = np.concatenate([t.token_ids for t in trajectories])
    previous = np.arange(len(which)) - 1
    previous[np.cumsum([0, *lengths[:-1]])] = after
    paths = [[row] for row in range(len(which))]
    for row, path in enumerate(paths):
        path[:0] = paths[previous[row]] if previous[row] >= 0 else []
    first = 0
    for t in trajectories:
        branches = {segment.start: segment.after for segment in t.segments}
        before: dict[int, list[int]] = {-1: []}
        for i, token in enumerate(t.token_ids.tolist()):
            before[i] = [*before[branches.get(i, i - 1)], token]
            assert ids[which[paths[rows[first + i]]]].tolist() == before[i]
        first += len(t.token_ids)
    for row in range(len(which)):
        seen_by = [other for other in range(len(which)) if row in paths[other]]
        assert seen_by == list(range(row, row + len(seen_by)))
    assert set(rows.tolist()) == set(range(len(which)))


def learner_of(policy: Policy, section: LearnerSection) -> Learner:
    copied = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    return Learner(copied, section, temperatures=(0.8,), max_new_tokens=12, total_steps=3)


def step(policy: Policy, section: LearnerSection, groups: Sequence[Sequence[Trajectory]]) -> tuple[StepStats, Any]:
    learner, intake = learner_of(policy, section), Intake(section)
    known = [group_of(*g, serial=i) for i, g in enumerate(groups)]
    references = [learner.reference_logprobs(g) for g in known] if learner.reference_tensors() else [None] * len(known)
    batches = [b for g, r in zip(known, references, strict=True) for b in intake.add(g, r)] + intake.rest()
    for batch in batches:
        learner.accumulate(batch)
    mismatch = learner.mismatch([t for g in groups for t in g])
    return learner.finish(), [mismatch, [p.detach() for p in learner.policy.model.parameters()], len(batches)]


@pytest.mark.parametrize("budget", [10**6, 160, 1])
@pytest.mark.parametrize(("loss", "aggregation", "kl_coef"), [("ppo", "token", 0.1), ("gspo", "sequence", 0.0)])
def test_a_step_is_that_of_separate_sequences(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch, budget: int, loss: Any, aggregation: Any,
    kl_coef: float,
) -> None:  # fmt: skip
    policy = make_policy("Starcoder2", dtype=torch.float64)
    section = LearnerSection(
        lr=1e-3, loss=loss, aggregation=aggregation, kl_coef=kl_coef, grad_clip=0.0, micro_batch_tokens=budget
    )
    rng = np.random.default_rng(0)
    groups = [
        [replace(t, id=f"{n}{t.id}", reward=float(rng.random()), logprobs=np.where(t.sampled, -4, 0).astype(np.float32))
         for t in group(n, [9, 20, 11, 7])]
        for n in (40, 60, 8)
    ]  # fmt: skip
    stats, (mismatch, weights, num_batches) = step(policy, section, groups)
    monkeypatch.setattr(tree, "LEAST_SHARED", 10**9)
    plain, (same, expected, num_plain) = step(policy, section, groups)
    assert num_batches <= num_plain
    assert (num_batches < num_plain) == (budget == 160)
    for name in ("loss", "grad_norm", "entropy", "kl_reference", "clipped_share"):
        assert getattr(stats, name) == pytest.approx(getattr(plain, name), abs=1e-9), name
    assert mismatch.mean_abs == pytest.approx(same.mean_abs, abs=1e-9)
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_tree_trains_as_its_sequences_do(make_policy: Callable[..., Policy]) -> None:
    policy, section = make_policy("Starcoder2", dtype=torch.float64), LearnerSection(lr=1e-3, advantage="dr-grpo")
    whole = [replace(rewritten(seed=s), id=f"{s}", reward=float(s)) for s in (1, 2)]
    learners, outcomes = [], []
    for some in (whole, [part for t in whole for part in unfolded(t)]):
        learner = learner_of(policy, section)
        learner.accumulate([Item(trajectory=t, advantage=0.5 - t.reward) for t in some])  # type: ignore[operator]
        learners.append(learner)
        outcomes.append(learner.finish())
    assert outcomes[0].loss == pytest.approx(outcomes[1].loss, abs=1e-10)
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, abs=1e-9)
    for ours, theirs in zip(*(learner.policy.model.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_each_turn_has_its_temperature(make_policy: Callable[..., Policy]) -> None:
    policy, t = make_policy(exact=True), rewritten()
    starts = np.flatnonzero(t.sampled[1:] & ~t.sampled[:-1]) + 1
    heats = (0.5, 1.25, 0.8, 2.0)
    turns = tuple(
        Turn(start=int(s), end=int(s) + 8, finish=FinishReason.EOS, temperature=heat)
        for s, heat in zip(starts, heats, strict=True)
    )
    batch = pack(items([replace(t, turns=turns)]), CPU, None, (0.8,))
    assert batch.temperature.tolist() == pytest.approx([heat for heat in heats for _ in range(8)])
    ours = logprobs(policy, batch, batch.temperature)
    apart = [logprobs(policy, batch, heat) for heat in heats]
    assert torch.equal(ours, torch.cat([x.split(8)[i] for i, x in enumerate(apart)]))
    weights = torch.arange(32.0) * torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(8)
    found = torch.autograd.grad((ours * weights).sum(), policy.head_weight)[0]
    torch.testing.assert_close(found, torch.autograd.grad((apart[1] * weights).sum(), policy.head_weight)[0])
    alike = tuple(replace(turn, temperature=0.8) for turn in turns)
    for same in (replace(t, turns=alike), t):
        assert pack(items([same]), CPU, None, (0.8,)).temperature.tolist() == pytest.approx([0.8] * 32)
    greedy = replace(t, turns=(*turns[:3], replace(turns[3], temperature=0.0)))
    with pytest.raises(ValueError, match="9:p9/0 has a greedy turn"):
        pack(items([greedy]), CPU)


def test_an_advantage_for_each_token() -> None:
    first, second = group()[:2]
    given = np.linspace(-1, 1, 20, dtype=np.float32)
    batch = pack([Item(trajectory=first, advantage=given), Item(trajectory=second, advantage=2.0)], CPU)
    assert batch.advantage.tolist() == [*given.tolist(), 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="shape"):
        pack([Item(trajectory=first, advantage=given[:5])], CPU)


@pytest.mark.parametrize(
    "branches", [[(50, 3), (50, 4)], [(50, 50)], [(50, 60)], [(60, 3), (50, 3)], [(50, -2)], [(500, 3)], [(0, 0)]]
)
def test_a_branch_goes_on_after_an_earlier_token(branches: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"9:p9/0 of 90 tokens has branches .* must begin behind"):
        pack(items([branching(tokens(90, 1), [False] * 89 + [True], branches)]), CPU)


def test_a_new_root_begins_with_a_token_that_was_given() -> None:
    with pytest.raises(ValueError, match="9:p9/0 begins with a sampled token"):
        pack(items([branching(tokens(90, 1), [False] * 50 + [True] * 40, [(50, -1)])]), CPU)


def test_a_budget_counts_what_is_computed() -> None:
    groups = [[replace(t, id=f"{n}{t.id}") for t in group(n, [16] * 8)] for n in (64, 100, 40)]
    sizes = [n + 8 * 16 for n in (64, 100, 40)]
    everything = items([t for g in groups for t in g])
    packer = Packer(sum(sizes[:2]))
    assert [len(b) for b in packer.add(everything) + packer.rest()] == [16, 8]
    assert [len(b) for b in balanced(everything, sum(sizes))] == [24]
    halves = balanced(everything, max(sizes[1], sizes[0] + sizes[2]))
    assert [len({i.trajectory.id[:2] for i in b}) for b in halves] == [1, 2]  # whole groups
    assert sorted(len({i.trajectory.id[:2] for i in part}) for part in split(everything, 3)) == [1, 1, 1]
    cut = split(items(groups[1]), 2)
    assert [len(part) for part in cut] == [4, 4]
    for parts in (halves, split(everything, 2), balanced(everything, 130)):
        assert sorted(i.trajectory.id for b in parts for i in b) == sorted(i.trajectory.id for i in everything)

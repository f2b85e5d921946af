"""One optimizer step, against the same step computed sequence by sequence with the model's own attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from torch import Tensor

from headrace.config import LearnerSection
from headrace.learner.learner import Learner
from headrace.learner.objective import CARRIES_WEIGHT, LOSSES, LossInput, advantages, correction_weight, kl
from headrace.learner.ranks import Intake
from headrace.measured import StepStats
from headrace.policy.policy import Policy
from headrace.types import FloatArray, Group, Replay, Span, Trajectory

TEMPERATURE, MAX_NEW_TOKENS, TOTAL_STEPS = 0.8, 12, 10
TOLERANCE = 1e-10
References = list[list[FloatArray]] | None


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    """Starcoder2, because it has no step in float32 inside: a float64 model of it is float64 throughout."""
    return make_policy("Starcoder2", dtype=torch.float64)


def clone(policy: Policy) -> Policy:
    return Policy(copy.deepcopy(policy.model), policy.tokenizer)


def logprobs_alone(policy: Policy, t: Trajectory, *, filtered: bool = True) -> Tensor:
    """Log-probs of one answer's tokens, with stock attention and a plain softmax."""
    ids = torch.from_numpy(t.token_ids.astype(np.int64))
    logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
    at = torch.from_numpy(np.flatnonzero(t.sampled))
    rows = logits[at - 1]
    if t.replay is not None and filtered:
        assert t.replay.support_ids is not None
        assert t.replay.support_offsets is not None
        forbidden = torch.ones_like(rows, dtype=torch.bool)
        for i, subset in enumerate(np.split(t.replay.support_ids, t.replay.support_offsets[1:-1])):
            forbidden[i, torch.from_numpy(subset.astype(np.int64))] = False
        rows = rows.masked_fill(forbidden, float("-inf"))
    return rows.log_softmax(-1).gather(1, ids[at][:, None]).squeeze(1)


def stock(policy: Policy) -> Policy:
    """A copy that attends with the model's own code."""
    copied = clone(policy)
    copied.model.set_attn_implementation("sdpa")
    return copied


def make_groups(policy: Policy, *, supported: bool = False, off_by: float = 0.3) -> list[Group]:
    """Three groups with behaviour log-probs a little off, as those of an older version are."""
    rng = np.random.default_rng(3)
    judge = stock(policy)
    groups = []
    for serial, sizes in enumerate([(5, 9, 2), (7, 1, 3, 12), (4, 6)]):
        prompt = rng.integers(3, 90, size=4 + serial).tolist()
        answers = []
        for i, size in enumerate(sizes):
            answer = rng.integers(3, 90, size=size)
            replay = make_support(rng, answer) if supported else None
            reward = float(rng.integers(0, 3)) + i / 8
            bare = trajectory(serial=serial, index=i, prompt=prompt, answer=answer, reward=reward, replay=replay)
            with torch.no_grad():
                exact = logprobs_alone(judge, bare).numpy()
            off = (exact + off_by * rng.standard_normal(size)).astype(np.float32)
            answers.append(replace(bare, logprobs=np.concatenate([np.zeros(len(prompt), np.float32), off])))
        groups.append(group_of(*answers, serial=serial))
    return groups


def make_support(rng: np.random.Generator, answer: np.ndarray) -> Replay:
    subsets = [np.unique([token, *rng.integers(3, 90, size=rng.integers(0, 30))]) for token in answer]
    offsets = np.cumsum([0, *map(len, subsets)]).astype(np.int64)
    return Replay(support_ids=np.concatenate(subsets).astype(np.int32), support_offsets=offsets)


@dataclass
class Outcome:
    """What a step did."""

    gradients: list[Tensor]
    weights: list[Tensor]
    stats: Any

    def assert_equals(self, other: Outcome) -> None:
        for mine, theirs in zip(self.gradients + self.weights, other.gradients + other.weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)
        for name in ("loss", "grad_norm", "lr", "entropy", "kl_reference", "clipped_share"):
            assert getattr(self.stats, name) == pytest.approx(getattr(other.stats, name), abs=1e-8), name


def learner_for(policy: Policy, section: LearnerSection) -> Learner:
    return Learner(policy, section, temperatures=(TEMPERATURE,), max_new_tokens=MAX_NEW_TOKENS, total_steps=TOTAL_STEPS)


def take_step(learner: Learner, groups: Sequence[Group], references: References = None) -> tuple[Outcome, int]:
    """The step as the loop takes it, with the gradient that reached AdamW, and how many micro-batches it took."""
    intake, num_batches = Intake(learner.section), 0
    for i, one in enumerate(groups):
        for items in intake.add(one, references[i] if references else None):
            learner.accumulate(items)
            num_batches += 1
    for items in intake.rest():
        learner.accumulate(items)
        num_batches += 1
    gradients: list[Tensor] = []
    parameters = list(learner.policy.model.parameters())

    def spy(*_: Any) -> None:
        gradients.extend(p.grad.clone() for p in parameters if p.grad is not None)

    handle = learner._optimizer.adamw.register_step_pre_hook(spy)
    stats = learner.finish()
    handle.remove()
    return Outcome(gradients, [p.detach().clone() for p in parameters], stats), num_batches


def by_hand(policy: Policy, groups: list[Group], section: LearnerSection, references: References = None) -> Outcome:
    """The same step from the formulas: every sequence by itself, then one mean, one clip and one AdamW."""
    model = stock(policy)
    rewards = [np.array([t.reward for t in g.trajectories], np.float64) for g in groups]
    if references is not None and section.kl_in == "reward":
        for g, values, refs in zip(groups, rewards, references, strict=True):
            for i, (t, ref) in enumerate(zip(g.trajectories, refs, strict=True)):
                behaviour = torch.from_numpy(t.logprobs[t.sampled])
                values[i] -= section.kl_coef * float(
                    kl(section.kl_estimator, behaviour, torch.from_numpy(ref)).double().sum()
                )
    pairs = [
        (t, a, references[i][j] if references else None)
        for i, (g, values) in enumerate(zip(groups, advantages(section.advantage, rewards), strict=True))
        for j, (t, a) in enumerate(zip(g.trajectories, values, strict=True))
    ]
    lengths = [t.num_sampled_tokens for t, _, _ in pairs]
    share = {
        "token": lambda n: 1 / sum(lengths),
        "sequence": lambda n: 1 / (n * len(lengths)),
        "constant": lambda n: 1 / (MAX_NEW_TOKENS * len(lengths)),
    }[section.aggregation]
    sums = dict.fromkeys(("loss", "entropy", "kl_reference", "clipped_share"), 0.0)
    for t, advantage, ref in pairs:
        loss = sequence_loss(model, t, float(np.float32(advantage)), ref, section, sums) * share(t.num_sampled_tokens)
        loss.backward()
        sums["loss"] += float(loss.detach())
    sums |= {name: sums[name] / sum(lengths) for name in ("entropy", "kl_reference", "clipped_share")}
    parameters = list(model.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    for gradient in gradients if section.grad_clip else []:
        gradient.mul_(min(1.0, section.grad_clip / float(norm)))
    betas = section.betas
    torch.optim.AdamW(parameters, lr=section.lr, betas=betas, weight_decay=section.weight_decay).step()
    stats = StepStats(grad_norm=float(norm), lr=section.lr, skipped=False, mismatch=None, **sums)  # type: ignore[arg-type]
    return Outcome(gradients, [p.detach().clone() for p in parameters], stats)


def sequence_loss(
    model: Policy,
    t: Trajectory,
    advantage: float,
    reference: FloatArray | None,
    s: LearnerSection,
    sums: dict[str, float],
) -> Tensor:
    """The sum of one sequence's loss terms."""
    current, behaviour = logprobs_alone(model, t), torch.from_numpy(t.logprobs[t.sampled])
    same = torch.zeros(len(current), dtype=torch.int64)
    terms = LOSSES[s.loss](
        LossInput(
            current=current,
            proximal=current.detach(),
            behaviour=behaviour,
            advantage=torch.full_like(current, advantage),
            sequence_ids=same,
            clip_low=s.clip[0],
            clip_high=s.clip[1],
        )
    )
    carried = s.loss in CARRIES_WEIGHT
    low, high = s.correction_limits
    weight, kept = correction_weight(s.correction, current, behaviour, low=low, high=high, carried=carried)
    loss = (terms.per_token * weight)[kept].sum()
    sums["entropy"] -= float(current.detach().sum())
    sums["clipped_share"] += float((terms.clipped | ~kept).sum())
    if reference is not None:
        compared = logprobs_alone(model, t, filtered=s.kl_in == "reward")
        divergence = kl(s.kl_estimator, compared, torch.from_numpy(reference)).sum()
        sums["kl_reference"] += float(divergence.detach())
        loss = loss + s.kl_coef * divergence if s.kl_in == "loss" else loss
    return loss


def check(policy: Policy, groups: list[Group], section: LearnerSection) -> Outcome:
    """One micro-batch, one per sequence, and several in another order of groups all equal the formulas."""
    expected = by_hand(policy, groups, section)
    num_sequences = sum(len(g.trajectories) for g in groups)
    for budget, order, counts in (
        (10**6, 1, {1}),
        (1, 1, {num_sequences}),
        (31, -1, range(2, num_sequences)),
    ):
        learner = learner_for(clone(policy), section.model_copy(update={"micro_batch_tokens": budget}))
        outcome, num_batches = take_step(learner, groups[::order])
        assert num_batches in counts
        outcome.assert_equals(expected)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["none", "truncated", "masked"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"tba"}))  # which needs a reference: test_tba.py
def test_a_step_does_not_depend_on_how_it_is_cut(policy: Policy, loss: Any, aggregation: Any, correction: Any):
    section = LearnerSection(
        lr=1e-3,
        loss=loss,
        aggregation=aggregation,
        correction=correction,
        correction_limits=(0.8, 1.2),
        weight_decay=0.1,
        grad_clip=0.05,
    )
    outcome = check(policy, make_groups(policy), section)
    assert outcome.stats.grad_norm > section.grad_clip  # so that clipping is part of what is compared
    if correction == "masked" or loss in ("ppo", "cispo"):
        assert 0 < outcome.stats.clipped_share < 1


def in_pieces(group: Group, rng: np.random.Generator) -> Group:
    """The group as an environment leaves it: some of the answers' tokens were not sampled, but replied."""
    trajectories = []
    for t in group.trajectories:
        sampled = t.sampled & (rng.random(len(t.sampled)) < 0.6)
        sampled[np.flatnonzero(t.sampled)[0]] = True  # at least one
        at = np.flatnonzero(sampled).tolist()
        spans = tuple(Span(version=0, start=i, end=i + 1) for i in at)
        replay = None
        if t.replay is not None:
            assert t.replay.support_ids is not None
            assert t.replay.support_offsets is not None
            subsets = np.split(t.replay.support_ids, t.replay.support_offsets[1:-1])
            kept = [subset for subset, keep in zip(subsets, sampled[t.sampled], strict=True) if keep]
            offsets = np.cumsum([0, *map(len, kept)]).astype(np.int64)
            replay = Replay(support_ids=np.concatenate(kept), support_offsets=offsets)
        logprobs = np.where(sampled, t.logprobs, 0).astype(np.float32)
        trajectories.append(replace(t, sampled=sampled, logprobs=logprobs, spans=spans, replay=replay))
    return replace(group, trajectories=tuple(trajectories))


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize(("loss", "aggregation"), [("ppo", "token"), ("gspo", "sequence")])
def test_sampled_tokens_may_lie_in_several_pieces(policy: Policy, loss: Any, aggregation: Any, supported: bool):
    rng = np.random.default_rng(5)
    groups = [in_pieces(group, rng) for group in make_groups(policy, supported=supported)]
    gaps = [np.diff(np.flatnonzero(t.sampled)) for g in groups for t in g.trajectories]
    assert sum(bool((gap > 1).any()) for gap in gaps) > 3, "there are pieces at all"
    check(policy, groups, LearnerSection(lr=1e-3, loss=loss, aggregation=aggregation, grad_clip=0.0))


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo", "rloo", "reinforce++"])
def test_advantages_over_groups_or_the_whole_step(policy: Policy, advantage: Any):
    check(policy, make_groups(policy), LearnerSection(lr=1e-3, advantage=advantage, grad_clip=0.0))


def test_sampling_support_is_replayed(policy: Policy):
    groups = make_groups(policy, supported=True, off_by=0.0)
    section = LearnerSection(lr=1e-3)
    check(policy, groups, section)
    stats = take_step(learner_for(clone(policy), section), groups)[0].stats
    assert stats.mismatch.mean_abs < 1e-6  # float32 of the same numbers
    bare = [replace(g, trajectories=tuple(replace(t, replay=None) for t in g.trajectories)) for g in groups]
    assert take_step(learner_for(clone(policy), section), bare)[0].stats.mismatch.mean_abs > 0.1


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize(
    ("estimator", "kl_in"), [("k2", "loss"), ("k3", "loss"), ("k1", "reward"), ("k2", "reward"), ("k3", "reward")]
)
def test_divergence_from_the_reference(policy: Policy, estimator: Any, kl_in: Any, supported: bool):
    section = LearnerSection(lr=1e-3, kl_coef=0.3, kl_estimator=estimator, kl_in=kl_in, grad_clip=0.0)
    start, moved = policy, clone(policy)
    with torch.no_grad():
        for i, parameter in enumerate(moved.model.parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    groups = make_groups(moved, supported=supported)
    outcomes = []
    for budget, order in ((10**6, 1), (1, 1), (31, -1)):
        learner = learner_for(clone(start), section.model_copy(update={"micro_batch_tokens": budget}))
        assert learner.reference_tensors()
        learner.policy.model.load_state_dict(moved.model.state_dict())  # training moved the policy, not the reference
        references = [learner.reference_logprobs(g) for g in groups]
        outcomes.append(take_step(learner, groups[::order], references[::order])[0])
    judge = stock(start)
    for g, found in zip(groups, references, strict=True):
        for t, values in zip(g.trajectories, found, strict=True):
            theirs = logprobs_alone(judge, t, filtered=kl_in == "reward")
            np.testing.assert_allclose(values, theirs.detach().numpy(), atol=1e-6)
    expected = by_hand(moved, groups, section, references)
    for outcome in outcomes:
        outcome.assert_equals(expected)
    without = by_hand(moved, groups, section.model_copy(update={"kl_coef": 0.0}), references)
    assert (expected.gradients[0] - without.gradients[0]).abs().max() > 1e-6  # the term is there at all


def test_no_reference_is_kept_without_a_pull(policy: Policy):
    assert not learner_for(policy, LearnerSection()).reference_tensors()


def test_mismatch_is_what_was_put_in(policy: Policy):
    section = LearnerSection(lr=1e-3)
    for off_by in (0.0, 0.1):
        outcome, _ = take_step(learner_for(clone(policy), section), make_groups(policy, off_by=off_by))
        # the mean of |N(0, s)| is 0.8 s
        assert outcome.stats.mismatch.mean_abs == pytest.approx(0.8 * off_by, rel=0.25, abs=1e-6)


def test_learning_rate_follows_the_schedule(policy: Policy):
    learner = learner_for(policy, LearnerSection(lr=1e-3, warmup_steps=2, schedule="linear"))
    groups = make_groups(policy)
    rates, moves = [], []
    for _ in range(4):
        before = [p.detach().clone() for p in policy.model.parameters()]
        outcome, _ = take_step(learner, groups)
        rates.append(outcome.stats.lr)
        moves.append(max(float((a - b).abs().max()) for a, b in zip(before, outcome.weights, strict=True)))
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3 * 7 / 8])
    assert moves[0] == pytest.approx(5e-4, rel=1e-3)  # Adam's first step is the rate itself, where gradients are clear


def test_a_step_leaves_nothing_behind(policy: Policy):
    """Two equal steps have equal statistics: no sum and no gradient survives a step."""
    section = LearnerSection(lr=0.0, micro_batch_tokens=31)
    learner = learner_for(policy, section)
    groups = make_groups(policy)
    first, second = (take_step(learner, groups)[0] for _ in range(2))
    first.assert_equals(second)
    assert first.stats.mismatch == second.stats.mismatch


def poisoned(groups: list[Group], poison: str, at: int) -> list[Group]:
    first, *others = groups[at].trajectories
    if poison == "reward":
        first = replace(first, reward=float("nan"))
    elif poison == "behaviour":
        first = replace(first, logprobs=np.where(first.sampled, np.float32("nan"), first.logprobs))
    sick = list(groups)
    sick[at] = replace(groups[at], trajectories=(first, *others))
    return sick


@pytest.mark.parametrize("poison", ["reward", "behaviour", "overflow"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_gradient_that_is_not_finite_skips_the_step(policy: Policy, poison: str, at: int):
    groups = make_groups(policy)
    learner = learner_for(policy, LearnerSection(lr=1e-3, micro_batch_tokens=31))
    take_step(learner, groups)  # so that Adam has moments to lose
    before = copy.deepcopy((policy.model.state_dict(), learner._optimizer.adamw.state_dict()))
    if poison == "overflow":
        list(policy.model.parameters())[at].grad = torch.full_like(list(policy.model.parameters())[at], float("inf"))
    stats = take_step(learner, poisoned(groups, poison, at))[0].stats
    assert stats.skipped
    assert not np.isfinite(stats.grad_norm)
    after = (policy.model.state_dict(), learner._optimizer.adamw.state_dict())
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    for i, state in before[1]["state"].items():
        assert all(torch.equal(state[name], after[1]["state"][i][name]) for name in state)
    assert all(p.grad is None for p in policy.model.parameters())
    healthy = take_step(learner, groups)[0].stats  # and the next step is an ordinary one
    assert not healthy.skipped
    assert np.isfinite([healthy.loss, healthy.entropy, healthy.grad_norm]).all()


def test_checkpointed_activations_are_computed_twice_and_give_the_same_gradient(policy: Policy):
    groups = make_groups(policy)
    outcomes, num_forwards = [], []
    for checkpointed in (False, True):
        learner = learner_for(clone(policy), LearnerSection(lr=1e-3, checkpoint_activations=checkpointed))
        forwards: list[object] = []
        learner.policy.body.layers[0].self_attn.q_proj.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        outcomes.append(take_step(learner, groups)[0])
        num_forwards.append(len(forwards))
    assert num_forwards == [1, 2]
    outcomes[1].assert_equals(outcomes[0])

"""The learner: micro-batches in, one optimizer step out.

A step is `accumulate` for each micro-batch of an `Intake`, and `finish`. Gradients are summed
unnormalised and divided once, at the end, by the number of tokens or sequences of the whole step.
So the result does not depend on how the step was cut into micro-batches or among processes
(`Sharding`), and work can begin before the step's last group exists; not so with a critic, or with
several updates per step (`learner.epochs`, `learner.minibatches`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.config import LearnerSection, ModelSection, WarmstartSection
from headrace.errors import ModelError
from headrace.learner.batch import Batch, balanced, pack
from headrace.learner.mismatch import NUM_SUMS, mismatch_of, mismatch_sums
from headrace.learner.objective import STD_FLOOR, balance, gae, normaliser, objective
from headrace.learner.optimizer import Optimizer, Sharding, learning_rate
from headrace.measured import Mismatch, StepStats
from headrace.policy.policy import Policy, load_policy
from headrace.types import Example, FloatArray, Group, Item, Order, Prompt, Sampling, Span, Trajectory


class Learner:
    """Trains `policy` in place; with a `sharding`, over which it is cut, together with the other ranks."""

    def __init__(
        self,
        policy: Policy,
        section: LearnerSection,
        *,
        temperatures: Sequence[float],
        max_new_tokens: int,
        total_steps: int,
        sharding: Sharding | None = None,
    ) -> None:
        self.policy, self.section, self.sharding = policy, section, sharding
        self.step_index, self._constant_length, self._total_steps = 0, max_new_tokens, total_steps
        self._heats = temperatures[0] if section.loss == "tba" else temperatures  # it compares answers
        # over the update: sequences; loss, log-probs, clipped tokens, KL, critic's loss; those of the mismatch
        self._sums = torch.zeros(6 + NUM_SUMS, dtype=torch.float64)
        self._waiting: list[Item] = []  # of the step, if its updates need all of it
        has_reference = section.kl_coef and ":" not in section.teacher  # else a function is asked
        self._reference = reference_of(policy, section, sharding) if has_reference else None
        if section.checkpoint_activations:
            policy.checkpoint_activations()
        self._optimizer = Optimizer(policy.held(), section, sharding)
        self._critic = Critic(policy, section, sharding) if section.advantage == "gae" else None
        self._limit_s = 0.0  # see `StepStats`

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores: master weights and moments, as DTensors with a sharding."""
        values = {} if self._critic is None else self._critic.tensors()
        found = as_parts(self._optimizer, self.policy)
        return found | {f"value.{name}": tensor for name, tensor in values.items()}

    def weights(self, dtype: torch.dtype, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights as `dtype`, one at a time to save memory.

        With a sharding this is a collective: every rank must iterate to the end.
        """
        shards = self.policy.shards
        for name, parameter in self.policy.model.named_parameters() if shards is None else shards.weights.items():
            if parameter.requires_grad or not trained_only:
                part = parameter.detach().to(dtype)  # rounded before it is sent
                yield name, part.full_tensor() if isinstance(part, DTensor) else part

    def reference_tensors(self) -> dict[str, Tensor]:
        """The weights of the reference policy, if there is one. They never change."""
        return {} if self._reference is None else dict(self._reference.model.named_parameters())

    def loaded(self, step: int) -> None:
        """The tensors were written to from outside: they are those after `step` steps."""
        self._optimizer.loaded()
        for optimizer in self._critic.optimizers if self._critic else ():
            optimizer.loaded()
        self.step_index = step

    @torch.no_grad()
    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Log-probs of the group's sampled tokens under the start weights.

        The reference routes tokens to its own choice of experts, not to those of the sampling. With
        kl_in="loss" the KL compares whole distributions; with kl_in="reward", where only the
        log-probs of the sampling are known, it compares distributions cut to the sampling support.
        """
        reference = self._reference
        assert reference is not None

        def compute(b: Batch) -> Tensor:
            support = b.support if self.section.kl_in == "reward" else None
            return reference.logprobs(b.token_ids, b.plan, b.at, b.temperature, support)[0].float()

        return self._of_each(reference, [Item(trajectory=t, advantage=0.0) for t in group.trajectories], compute)

    def _of_each(self, policy: Policy, items: Sequence[Item], compute: Callable[[Batch], Tensor]) -> list[FloatArray]:
        """For each item what `compute` says of its sampled tokens `[.., N]`."""
        known: dict[str, FloatArray] = {}
        for part, batch in self._batches(policy, items):
            counts = [item.trajectory.num_sampled_tokens for item in part]
            for item, own in zip(part, compute(batch).cpu().split(counts, dim=-1), strict=True):
                known[item.trajectory.id] = own.numpy()
        return [known[item.trajectory.id] for item in items]

    @torch.no_grad()
    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        """With a sharding: of this rank's part of the `trajectories`, summed over all ranks."""
        items = [Item(trajectory=t, advantage=np.zeros(t.num_sampled_tokens, np.float32)) for t in trajectories]
        return self._from_start(items)[1]

    def accumulate(self, items: Sequence[Item]) -> None:
        if self.section.in_whole_steps:
            self._waiting += items
        else:
            self._add(items)

    def _add(self, items: Sequence[Item]) -> None:
        for part, batch in self._batches(self.policy, items, backward=True):
            # one transfer, and last: any earlier wait for the GPU would leave it idle
            self._sums[1:] += self._backward(batch).cpu()
            self._sums[0] += len(part)

    def _batches(
        self, policy: Policy, items: Sequence[Item], *, backward: bool = False
    ) -> Iterator[tuple[Sequence[Item], Batch]]:
        """Micro-batches, equally many on all ranks: in one that is empty here, this rank only takes part."""
        alone = self.sharding is None or self.sharding.num_ranks == 1
        cut_before = backward and alone and not self.section.in_whole_steps
        routers = policy.routers if policy is self.policy else None  # the reference chooses its own experts
        passes = [items] if cut_before else [*balanced(items, self.section.micro_batch_tokens)]
        if self.sharding is not None:
            most = int(self.sharding.reduced(torch.tensor(len(passes)), dist.ReduceOp.MAX))
            passes += [[]] * (most - len(passes))
        for part in passes:
            if part:
                yield part, pack(part, policy.device, routers, self._heats)
            else:
                compute = self._logprobs if policy is self.policy else whole_logprobs(policy)
                take_part(compute, policy.device, backward=backward)

    def _backward(self, batch: Batch) -> Tensor:
        """Add the micro-batch's gradients. Returns, on the device, what `_sums[1:]` adds up."""
        with torch.enable_grad():
            passed, length = self._logprobs(batch), self._constant_length
            loss, clipped, divergence, critic = objective(self.section, batch, passed, constant_length=length)
            for optimizer in (self._optimizer, *(self._critic.optimizers if self._critic else ())):
                optimizer.make_room()
            loss.backward()
        passed_through = self.policy, self._critic and self._critic.body
        self._limit_s += 3 * sum(model.pass_s(batch.plan) for model in passed_through if model)
        parts = (loss.detach(), passed[0].detach().sum(), clipped.sum(), divergence.sum(), critic.sum())
        sums = torch.stack([part.double() for part in parts])
        return torch.cat([sums, mismatch_sums(passed[0], batch.behaviour)])

    def _logprobs(self, b: Batch) -> tuple[Tensor, ...]:
        """Of the sampled tokens: over the sampling support, and over the vocabulary; the critic's values."""
        critic = self._critic
        values = None if critic is None or critic.body else critic.values
        found = self.policy.logprobs(b.token_ids, b.plan, b.at, b.temperature, b.support, b.routes, values)
        if critic is None or critic.body is None:
            return found
        return *found, *critic.body.of_hidden(lambda before: (critic.values(before),), b.token_ids, b.plan, b.at)

    def finish(self) -> StepStats:
        """The updates of the step, in place. Call it only between two engine steps."""
        items, self._waiting = self._waiting, []
        if not self.section.in_whole_steps:
            stats = self._update()
        else:
            items, mismatch = self._from_start(items)
            if self.section.loss == "tba":
                items = self._balanced(items)
            updates = []
            for k in [*range(self.section.minibatches)] * self.section.epochs:
                self._add([item for item in items if item.minibatch == k])
                updates.append(self._update())
            stats = mean_of(updates, mismatch)
        self.step_index += 1
        limit_s, self._limit_s = self._limit_s, 0.0
        return replace(stats, limit_s=limit_s)

    @torch.no_grad()
    def _from_start(self, items: Sequence[Item]) -> tuple[list[Item], Mismatch]:
        """Items with what is known before the first update: log-probs and, by the critic, advantages."""
        sums, section = torch.zeros(NUM_SUMS, dtype=torch.float64), self.section

        def compute(batch: Batch) -> Tensor:
            logprobs, _, *values = self._logprobs(batch)
            sums.add_(mismatch_sums(logprobs, batch.behaviour).cpu())
            return torch.stack([logprobs, *(values or [logprobs]), logprobs])

        starts = self._of_each(self.policy, items, compute)
        given: list[Any] = [item.advantage for item in items]
        if self._critic is not None:
            given = gae(given, [start[1] for start in starts], discount=section.discount, decay=section.gae_lambda)
            for start, advantage in zip(starts, given, strict=True):
                start[2] = start[1] + advantage
            given = self._whitened(given)
        mismatch = mismatch_of(sums if self.sharding is None else self.sharding.reduced(sums))
        return [replace(x, advantage=a, start=s) for x, a, s in zip(items, given, starts, strict=True)], mismatch

    def _balanced(self, items: Sequence[Item]) -> list[Item]:
        """Items with the advantages of trajectory balance; until then they are rewards."""
        moved = [x.start[0] - x.reference for x in items if x.start is not None and x.reference is not None]
        costs = [self.section.kl_coef * own.sum(dtype=np.float64) for own in moved]
        worth = {x.trajectory.id: float(x.advantage - cost) for x, cost in zip(items, costs, strict=True)}
        found = balance(worth if self.sharding is None else self.sharding.joined(worth))
        return [replace(x, advantage=found[x.trajectory.id]) for x in items]

    def _whitened(self, advantages: Sequence[np.ndarray]) -> list[FloatArray]:
        """Over all tokens of the step the mean becomes 0 and the standard deviation 1."""
        flat = np.concatenate([np.zeros(0), *advantages])
        sums = torch.tensor([len(flat), flat.sum(), np.square(flat).sum()], dtype=torch.float64)
        count, total, squares = (sums if self.sharding is None else self.sharding.reduced(sums)).tolist()
        mean = total / max(count, 1)
        std = math.sqrt(max(squares / max(count, 1) - mean * mean, 0.0))
        return [((advantage - mean) / (std + STD_FLOOR)).astype(np.float32) for advantage in advantages]

    def _update(self) -> StepStats:
        """The optimizer step with the gradients added so far."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        if self.sharding is not None:
            assert self.policy.shards is not None
            self.policy.shards.hand_over_gradients()
            sums = self.sharding.reduced(sums)
        num_sequences, loss, logprobs, clipped, divergence, critic = sums[:6].tolist()
        mismatch = mismatch_of(sums[6:])
        scale = 1.0 / normaliser(self.section.aggregation, mismatch.count, int(num_sequences))
        lr = learning_rate(self.section, self.step_index, self._total_steps)
        # a NaN log-prob can hide from the gradient behind a clamp, but not from the loss
        scale = scale if math.isfinite(loss) else math.nan
        norm = self._optimizer.step(lr=lr, scale=scale, clip=self.section.grad_clip)
        if not math.isfinite(norm) and (name := self._optimizer.not_finite()) is not None:
            told = f"the weights '{name}' are no longer finite numbers, so no gradient can be"
            how = "Resume the run from its last checkpoint; if this happens again, lower learner.lr"
            raise ModelError(f"step {self.step_index + 1}: {told}. {how}")
        if self._critic is not None:
            self._critic.step(scale if math.isfinite(norm) else math.nan)
        return StepStats(
            loss=loss * scale,
            grad_norm=norm,
            lr=lr,
            skipped=not math.isfinite(norm),
            entropy=-logprobs / mismatch.count,
            kl_reference=divergence / mismatch.count,
            clipped_share=clipped / mismatch.count,
            value_loss=critic / mismatch.count,
            mismatch=mismatch,
        )


def mean_of(updates: Sequence[StepStats], mismatch: Mismatch) -> StepStats:
    """Of a step with several updates. One whose gradient was not finite changed nothing."""
    done = [update for update in updates if not update.skipped] or updates
    names = [field.name for field in fields(StepStats) if field.name not in ("skipped", "mismatch")]
    means = {name: sum(getattr(update, name) for update in done) / len(done) for name in names}
    return StepStats(**means, skipped=done[0].skipped, mismatch=mismatch)


class Critic:
    """Estimates the reward to come after each token: a linear head on final hidden states.

    It begins with zeros. The states are the policy's, whose weights its loss changes too, by a share
    of its gradient; or those of a model of its own, `body`, which then learns at the critic's rate.
    """

    def __init__(self, policy: Policy, section: LearnerSection, sharding: Sharding | None) -> None:
        self._section, self._sharding, self._share, self.body = section, sharding, 1.0, None
        if isinstance(section.critic, str):
            self.body = model_beside(policy, "learner.critic", section.critic, sharding)
        else:
            self._share = section.critic
        size, dtype = (self.body or policy).config.hidden_size, torch.promote_types(policy.dtype, torch.float32)
        self.head = nn.Linear(size, 1, device=policy.device, dtype=dtype)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.optimizers = [Optimizer(self.head.named_parameters(), section)]
        if self.body is not None:
            self.optimizers.append(Optimizer(self.body.held_below_head(), section, sharding))
            if section.checkpoint_activations:
                self.body.checkpoint_activations()

    def values(self, hidden_NE: Tensor) -> Tensor:
        hidden, constant = hidden_NE.to(self.head.weight.dtype), hidden_NE.detach().to(self.head.weight.dtype)
        return self.head(constant + self._share * (hidden - constant))[:, 0]  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        body = {} if self.body is None else as_parts(self.optimizers[1], self.body)
        return self.optimizers[0].tensors() | {f"body.{name}": part for name, part in body.items()}

    def step(self, scale: float) -> None:
        """An optimizer step; the head's is the same on all ranks."""
        if self._sharding is not None:
            for parameter in self.head.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._sharding.reduced(parameter.grad)
        if self.body is not None and self.body.shards is not None:
            self.body.shards.hand_over_gradients()
        for optimizer in self.optimizers:
            optimizer.step(lr=self._section.value_lr, scale=scale, clip=self._section.grad_clip)


def reference_of(policy: Policy, section: LearnerSection, sharding: Sharding | None) -> Policy:
    """What the KL is from: the policy as it is now, or a teacher."""
    teacher = section.teacher
    return model_beside(policy, "learner.teacher", teacher, sharding) if teacher else policy.frozen_copy()


def model_beside(policy: Policy, setting: str, path: str, sharding: Sharding | None) -> Policy:
    """Another model that reads the policy's tokens, where the policy is."""
    kind: Any = {"dtype": str(policy.dtype).removeprefix("torch."), "device": str(policy.device), "exact": False}
    section = ModelSection(path=path).model_copy(update=kind)
    model = load_policy(section, mesh=sharding.mesh if sharding else None)
    if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(f"{setting} = '{path}' has another vocabulary than the policy")
    return model


def as_parts(optimizer: Optimizer, policy: Policy) -> dict[str, Tensor]:
    """The tensors of the `optimizer`, of a sharded model as DTensors."""
    found, shards = optimizer.tensors(), policy.shards
    if shards is None:
        return found
    return {name: shards.as_part(name.split(".", 1)[1], part) for name, part in found.items()}


def whole_logprobs(policy: Policy) -> Callable[[Batch], tuple[Tensor, ...]]:
    """Over the whole vocabulary, by the experts that the policy chooses itself."""
    return lambda b: policy.logprobs(b.token_ids, b.plan, b.at, 1.0)


def take_part(compute: Callable[[Batch], tuple[Tensor, ...]], device: torch.device, *, backward: bool = False) -> None:
    """Zero-loss pass over two dummy tokens: FSDP's collectives need every rank, in one order."""
    with torch.set_grad_enabled(backward):
        first, _, *others = compute(pack([_worked((np.zeros(2, np.int32), np.array([False, True])))], device))
        if backward:
            (0 * sum(others, first)).sum().backward()


class WarmStart:
    """Supervised fine-tuning (SFT) before RL; of a worked example only the solution is learned."""

    def __init__(self, policy: Policy, section: WarmstartSection, sharding: Sharding | None = None) -> None:
        self._policy, self._section, self._sharding = policy, section, sharding
        self._optimizer = Optimizer(policy.held(), LearnerSection(lr=section.lr, betas=(0.9, 0.98)), sharding)
        self._done = 0

    def step(self, examples: Sequence[Example]) -> float:
        """One optimizer step. Returns the loss before it."""
        policy, steps, sharding = self._policy, self._section.steps, self._sharding
        mine = examples if sharding is None else examples[sharding.rank :: sharding.num_ranks]
        loss = torch.zeros(())
        if mine:
            logprobs = whole_logprobs(policy)(pack(list(map(_worked, mine)), policy.device))[0]
            loss = -logprobs.sum() / sum(int(learned.sum()) for _, learned in examples)
            loss.backward()
        else:
            take_part(whole_logprobs(policy), policy.device, backward=True)
        if policy.shards is not None and sharding is not None:
            policy.shards.hand_over_gradients()
            loss = sharding.reduced(loss.detach().cpu())
        # up over the first tenth, down over the last quarter: RL should not start from the noise of
        # the last batches
        rise, fall = (self._done + 1) / max(1, steps // 10), (steps - self._done) / max(1, steps // 4)
        self._optimizer.step(lr=self._section.lr * min(1.0, rise, fall), scale=1.0, clip=1.0)
        self._done += 1
        return float(loss.detach())


def _worked(example: Example) -> Item:
    """As an answer whose learned tokens were sampled."""
    ids, learned = example
    edges = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2)
    spans = tuple(Span(version=0, start=start, end=end) for start, end in edges.tolist())
    prompt = Prompt(id="worked", text="", token_ids=ids)
    unanswered = Order.group(0, prompt, [Sampling(max_new_tokens=0)]).nothing_sampled(0, now_s=0.0)
    return Item(trajectory=replace(unanswered, sampled=learned, spans=spans), advantage=0.0)

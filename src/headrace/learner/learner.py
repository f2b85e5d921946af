"""The learner: groups in, one optimizer step out.

A step is `add` for each group as it comes, `accumulate` for each micro-batch that is full, and `finish`. Gradients are
summed unnormalised and divided once, at the end, by what the whole step held: the result does not depend on how the
step was cut, and work can begin before the step's last group exists.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.config import LearnerSection
from headrace.errors import ModelError
from headrace.learner.advantages import advantages, needs_whole_step
from headrace.learner.aggregation import normaliser, weights
from headrace.learner.batch import Batch, Item, Packer, balanced, pack
from headrace.learner.corrections import MismatchSums, corrected, correction_weight
from headrace.learner.kl import kl
from headrace.learner.losses import CARRIES_WEIGHT, LOSSES
from headrace.learner.optimizer import Optimizer
from headrace.learner.schedule import learning_rate
from headrace.policy.policy import Policy
from headrace.types import FloatArray, Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one optimizer step did.

    Example:
        StepStats(loss=-0.01, grad_norm=0.7, lr=3e-6, skipped=False, entropy=0.4, kl_reference=0.0, clipped_share=0.02,
            mismatch=MismatchSums(...))
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    entropy: float
    kl_reference: float
    clipped_share: float
    mismatch: MismatchSums


@dataclass(slots=True)
class _Sums:
    """Running sums of the step under way."""

    num_tokens: int = 0
    num_sequences: int = 0
    # of loss, log-probs, clipped tokens and divergence, then those of the mismatch
    fetched: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def add(self, batch: Batch, fetched: np.ndarray) -> None:
        """One micro-batch."""
        self.num_tokens += len(batch.at)
        self.num_sequences += batch.num_sequences
        self.fetched = self.fetched + fetched


class Learner:
    """Trains the policy in place."""

    def __init__(
        self, policy: Policy, section: LearnerSection, *, temperature: float, max_new_tokens: int, total_steps: int
    ) -> None:
        self.policy = policy
        self.section = section
        self.step_index = 0
        self._temperature, self._constant_length, self._total_steps = temperature, max_new_tokens, total_steps
        self._optimizer = Optimizer(policy.model.named_parameters(), section)
        self._reference = _frozen_copy(policy) if section.kl_coef else None
        self._packer = Packer(section.micro_batch_tokens)
        self._pending: list[tuple[Group, list[FloatArray | None]]] = []
        self._sums = _Sums()
        if section.checkpoint_activations:
            policy.checkpoint_activations()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name: trained weights in full precision and the optimizer's moments."""
        return self._optimizer.tensors()

    def reference_tensors(self) -> dict[str, Tensor]:
        """The weights of the reference, if there is one; they never change."""
        return {} if self._reference is None else dict(self._reference.model.named_parameters())

    def loaded(self, step: int) -> None:
        """The tensors were written to, and are those after so many steps."""
        self._optimizer.loaded()
        self.step_index = step

    @property
    def uses_reference(self) -> bool:
        """Whether groups must be scored by the reference first."""
        return self._reference is not None

    @torch.no_grad()
    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Log-probs of the group's sampled tokens under the start weights.

        The reference is a policy of its own: it chooses its own experts, not those the tokens were sampled with. In the
        loss, the divergence from it is that of whole distributions; as a part of the reward, where only the log-probs
        of the sampling are at hand, that of distributions cut to the support.
        """
        assert self._reference is not None
        found: dict[str, FloatArray] = {}
        everything = [Item(trajectory=t, advantage=0.0) for t in group.trajectories]
        for items in balanced(everything, self.section.micro_batch_tokens):
            batch = pack(items, self.policy.device)
            support = batch.support if self.section.kl_in == "reward" else None
            logprobs = self._reference.logprobs(batch.token_ids, batch.plan, batch.at, self._temperature, support)
            counts = [item.trajectory.num_sampled_tokens for item in items]
            for item, values in zip(items, logprobs.float().cpu().split(counts), strict=True):
                found[item.trajectory.id] = values.numpy()
        return [found[t.id] for t in group.trajectories]

    @torch.no_grad()
    def mismatch(self, trajectories: Sequence[Trajectory]) -> MismatchSums:
        """How far the log-probs computed here are from those sampled with; trains nothing."""
        total = MismatchSums()
        everything = [Item(trajectory=t, advantage=0.0) for t in trajectories]
        for items in balanced(everything, self.section.micro_batch_tokens):
            batch = pack(items, self.policy.device, self.policy.routers)
            total += MismatchSums.of(self._logprobs(batch)[0], batch.behaviour)
        return total

    def add(self, group: Group, references: Sequence[FloatArray] | None = None) -> list[list[Item]]:
        """Take a group into the step; returns micro-batches that are now full."""
        known: list[FloatArray | None] = list(references) if references else [None] * len(group.trajectories)
        self._pending.append((group, known))
        if needs_whole_step(self.section.advantage):
            return []
        return self._packer.add(self._items())

    def rest(self) -> list[list[Item]]:
        """The step has all its groups: the remaining micro-batches."""
        if needs_whole_step(self.section.advantage):
            return balanced(self._items(), self.section.micro_batch_tokens)
        return self._packer.rest()

    def _items(self) -> list[Item]:
        """The groups taken in so far, with their advantages."""
        pending, self._pending = self._pending, []
        rewards = [self._rewards(group, references) for group, references in pending]
        found = advantages(self.section.advantage, rewards)
        return [
            Item(trajectory=trajectory, advantage=float(advantage), reference=reference)
            for (group, references), values in zip(pending, found, strict=True)
            for trajectory, advantage, reference in zip(group.trajectories, values, references, strict=True)
        ]

    def _rewards(self, group: Group, references: Sequence[FloatArray | None]) -> np.ndarray:
        """The group's rewards, less the divergence from the reference when it counts as reward."""
        rewards = np.array([t.reward for t in group.trajectories], np.float64)
        if self._reference is None or self.section.kl_in == "loss":
            return rewards
        costs = [self._divergence(t, r) for t, r in zip(group.trajectories, references, strict=True)]
        return rewards - self.section.kl_coef * np.array(costs)

    def _divergence(self, trajectory: Trajectory, reference: FloatArray | None) -> float:
        assert reference is not None
        behaviour = torch.from_numpy(trajectory.logprobs[trajectory.sampled])
        return float(kl(self.section.kl_estimator, behaviour, torch.from_numpy(reference)).sum())

    def accumulate(self, items: Sequence[Item]) -> None:
        """Forward and backward over one micro-batch; gradients add up unnormalised."""
        batch = pack(items, self.policy.device, self.policy.routers)
        sums = self._backward(batch)
        # fetched once, and last: whatever waits for a GPU before that leaves it without work
        self._sums.add(batch, sums.cpu().numpy())

    def _backward(self, batch: Batch) -> Tensor:
        """Add the micro-batch's gradients; what `_Sums` wants to know of it, on the device."""
        with torch.enable_grad():
            current, unfiltered = self._logprobs(batch)
            loss, clipped, divergence = self._loss(batch, current, unfiltered)
            self._optimizer.make_room()
            loss.backward()
        parts = (loss.detach(), current.detach().sum(), clipped.sum(), divergence.sum())
        mismatch = MismatchSums.on_device(current, batch.behaviour)
        return torch.cat([torch.stack([part.double() for part in parts]), mismatch])

    def _logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the sampled tokens, through the experts they were sampled with: over the support, and over all tokens."""
        return self.policy.both_logprobs(
            batch.token_ids, batch.plan, batch.at, self._temperature, batch.support, batch.routes
        )

    def _loss(self, batch: Batch, current: Tensor, unfiltered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, which tokens are held back, and the divergence from the reference."""
        s = self.section
        proximal = current.detach()  # one update per step: the step starts from the weights that are being updated
        terms = LOSSES[s.loss](
            current,
            proximal,
            batch.behaviour,
            batch.advantage,
            batch.sequence_ids,
            clip_low=s.clip_low,
            clip_high=s.clip_high,
        )
        weight, kept = correction_weight(
            s.correction,
            proximal,
            batch.behaviour,
            low=s.correction_low,
            high=s.correction_high,
            carried=s.loss in CARRIES_WEIGHT,
        )
        per_token = corrected(terms.per_token, weight, kept)
        divergence = torch.zeros_like(proximal)
        if batch.reference is not None:
            divergence = kl(s.kl_estimator, unfiltered if s.kl_in == "loss" else current, batch.reference)
            if s.kl_in == "loss":
                per_token = per_token + s.kl_coef * divergence
        share = weights(
            s.aggregation,
            batch.sequence_ids,
            batch.num_sequences,
            constant_length=self._constant_length,
            dtype=per_token.dtype,
        )
        return (per_token * share).sum(), terms.clipped | ~kept, divergence.detach()

    def finish(self) -> StepStats:
        """The optimizer step, in place. Call it between two engine steps."""
        sums, self._sums = self._sums, _Sums()
        scale = 1.0 / normaliser(self.section.aggregation, sums.num_tokens, sums.num_sequences)
        lr = learning_rate(
            self.step_index,
            lr=self.section.lr,
            warmup_steps=self.section.warmup_steps,
            schedule=self.section.schedule,
            total_steps=self._total_steps,
        )
        # a NaN log-prob can hide from the gradient behind a clamp, but not from the loss
        scale = scale if math.isfinite(sums.fetched[0]) else math.nan
        norm = self._optimizer.step(lr=lr, scale=scale, clip=self.section.grad_clip)
        if not math.isfinite(norm) and (name := self._optimizer.not_finite()) is not None:
            raise ModelError(
                f"step {self.step_index + 1}: the weights '{name}' are not finite numbers, and neither is any gradient "
                "from now on. Resume the run from its last checkpoint; if it comes to this again, lower learner.lr"
            )
        self.step_index += 1
        count, (loss, logprobs, clipped, divergence, *mismatch) = sums.num_tokens, sums.fetched.tolist()
        return StepStats(
            loss=loss * scale,
            grad_norm=norm,
            lr=lr,
            skipped=not math.isfinite(norm),
            entropy=-logprobs / count,
            kl_reference=divergence / count,
            clipped_share=clipped / count,
            mismatch=MismatchSums.read(count, mismatch),
        )


def _frozen_copy(policy: Policy) -> Policy:
    model = copy.deepcopy(policy.model).requires_grad_(False)
    return Policy(model, policy.tokenizer, exact=policy.exact)

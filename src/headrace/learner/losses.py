"""Policy-gradient objectives, one loss term per sampled token.

Every function takes the log-probs of N packed tokens under three policies: `current` (being updated, with gradient),
`proximal` (the learner's at the start of the step) and `behaviour` (the one that sampled). `aggregation` reduces.

Log-ratios are clamped to ±20 before `exp`: beyond that a ratio says only that something broke, and it must not become
an infinity. A clamped ratio has no gradient. A NaN log-prob stays NaN: the step has to see it and be skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

CARRIES_WEIGHT = frozenset({"ppo", "decoupled-ppo", "cispo", "gspo"})
"""Losses whose objective holds proximal/behaviour already: a correction may cut it, not multiply it in again."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Unreduced loss terms, and which tokens the clip range held back.

    Example:
        LossTerms(per_token=tensor([-1.28, 0.9]), clipped=tensor([True, False]))
    """

    per_token: Tensor  # [N] with gradient
    clipped: Tensor  # [N] bool


class Loss(Protocol):
    """The one signature of all objectives. `advantage` is per token [N], `sequence_ids` int64 [N] non-decreasing."""

    def __call__(
        self,
        current: Tensor,
        proximal: Tensor,
        behaviour: Tensor,
        advantage: Tensor,
        sequence_ids: Tensor,
        *,
        clip_low: float,
        clip_high: float,
    ) -> LossTerms:
        """Loss terms of N tokens."""
        ...


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator / denominator) of two log-probs, clamped to ±20, with gradient inside the limits only."""
    # Two equal infinities are the same probability; their difference would be NaN.
    equal_infinities = torch.isinf(numerator) & (numerator == denominator)
    difference = torch.where(equal_infinities, torch.zeros_like(numerator), numerator - denominator)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """-min(r A, clip(r) A) with r = current / behaviour."""
    return _clipped_surrogate(log_ratio(current, behaviour).exp(), advantage, clip_low, clip_high)


def decoupled_ppo(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """-w min(r A, clip(r) A) with r = current / proximal and the constant w = proximal / behaviour.

    The trust region is around the learner's own policy, so old samples are reweighted instead of clipped away.
    """
    weight = log_ratio(proximal.detach(), behaviour).exp()
    terms = _clipped_surrogate(log_ratio(current, proximal.detach()).exp(), advantage, clip_low, clip_high)
    return LossTerms(per_token=weight * terms.per_token, clipped=terms.clipped)


def cispo(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """-clip(r) A log(current) with a constant clip(r), r = current / behaviour: every token keeps its gradient."""
    ratio = log_ratio(current.detach(), behaviour).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return LossTerms(per_token=-weight * advantage * current, clipped=ratio != weight)


def gspo(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """-min(s A, clip(s) A), s the geometric mean of current / behaviour over the token's whole sequence.

    The value of s is the sequence's, its gradient the token's own (ds/dcurrent = s). Under `sequence` aggregation, and
    with one advantage per sequence, the gradients add up to that of the sequence-level objective.
    """
    per_token = log_ratio(current, behaviour)
    straight_through = per_token - per_token.detach()  # zero, with the token's gradient
    ratio = (sequence_mean(per_token.detach(), sequence_ids) + straight_through).exp()
    return _clipped_surrogate(ratio, advantage, clip_low, clip_high)


def reinforce(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """-A log(current): no ratio and no clip, so off-policy samples need a correction."""
    return LossTerms(per_token=-advantage * current, clipped=torch.zeros_like(current, dtype=torch.bool))


LOSSES: Mapping[str, Loss] = {
    "ppo": ppo,
    "decoupled-ppo": decoupled_ppo,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
}


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """For each token the mean of `values` over its sequence; no gradient."""
    if values.numel() == 0:
        return values
    _, run, lengths = torch.unique_consecutive(sequence_ids, return_inverse=True, return_counts=True)
    # Not index_add: on a GPU it adds in no fixed order, and a resumed run has to repeat to the last bit.
    means: Tensor = torch.segment_reduce(values, "mean", lengths=lengths)
    return means[run]


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> LossTerms:
    """-min(r A, clip(r) A). Written as a choice, so that the gradient at a tie is not split between two branches."""
    constant = ratio.detach()
    clipped = torch.where(advantage > 0, constant > 1 + clip_high, (advantage < 0) & (constant < 1 - clip_low))
    bound = constant.clamp(1 - clip_low, 1 + clip_high)
    return LossTerms(per_token=-torch.where(clipped, bound, ratio) * advantage, clipped=clipped)

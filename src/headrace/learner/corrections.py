"""The gap between the policy that sampled and the one that learns: weights against it, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from headrace.learner.losses import log_ratio

CorrectionKind = Literal["none", "truncated", "masked"]

NEAR = (0.9, 1.1)
"""A ratio within these limits, both included, counts as near-on-policy."""


def correction_weight(
    kind: CorrectionKind, proximal: Tensor, behaviour: Tensor, *, low: float, high: float, carried: bool = False
) -> tuple[Tensor, Tensor]:
    """Constant importance weight per token [N], and which tokens are kept [N] bool.

    With w = proximal / behaviour: `none` is 1, `truncated` min(w, high), `masked` w inside [low, high] and else 0.
    `carried` is for losses that hold w in their objective already (`losses.CARRIES_WEIGHT`): the weight is divided by
    w, which leaves `truncated` min(1, high / w) and `masked` 1 or 0, so that w never counts twice.
    """
    ratio = log_ratio(proximal.detach(), behaviour.detach()).exp()
    ones, everything = torch.ones_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    match kind:
        case "none":
            return ones, everything
        case "truncated":
            return ((high / ratio).clamp(max=1.0) if carried else ratio.clamp(max=high)), everything
        case "masked":
            kept = ~((ratio < low) | (ratio > high))  # a NaN is kept: it must reach the loss and stop the step
            return torch.where(kept, ones if carried else ratio, torch.zeros_like(ratio)), kept
        case _:
            assert_never(kind)


def corrected(per_token: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    """Loss terms under a correction. A dropped token is replaced, not multiplied by zero: 0 * inf would be NaN."""
    return torch.where(kept, per_token * weight, torch.zeros_like(per_token))


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSums:
    """Sums over tokens of how far the learner's log-probs are from the behaviour's, Δ = learner - behaviour, r = exp Δ.

    Sums of micro-batches add up to the sums of the step. Δ is clamped to ±20, so that one broken token stays finite.
    With no tokens the properties read as no mismatch at all.

    Example:
        MismatchSums(count=2, abs_delta=0.22, ratio=2.12, ratio_squared=2.25, outside=1, k3_sum=0.012)
    """

    count: int = 0
    abs_delta: float = 0.0  # Σ |Δ|
    ratio: float = 0.0  # Σ r
    ratio_squared: float = 0.0  # Σ r²
    outside: int = 0  # tokens with r outside NEAR
    k3_sum: float = 0.0  # Σ r - 1 - Δ, which estimates KL(behaviour || learner) without negative terms

    @classmethod
    def of(cls, learner: Tensor, behaviour: Tensor) -> MismatchSums:
        """The sums over one micro-batch; float64, and one transfer from the device."""
        delta = log_ratio(learner.detach().double(), behaviour.detach().double())
        ratio = delta.exp()
        outside = ~((ratio >= NEAR[0]) & (ratio <= NEAR[1]))
        columns = (delta.abs(), ratio, ratio.square(), outside.double(), torch.expm1(delta) - delta)
        abs_delta, ratio_sum, ratio_squared, num_outside, k3_sum = torch.stack([c.sum() for c in columns]).tolist()
        return cls(
            count=delta.numel(),
            abs_delta=abs_delta,
            ratio=ratio_sum,
            ratio_squared=ratio_squared,
            outside=int(num_outside),
            k3_sum=k3_sum,
        )

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            count=self.count + other.count,
            abs_delta=self.abs_delta + other.abs_delta,
            ratio=self.ratio + other.ratio,
            ratio_squared=self.ratio_squared + other.ratio_squared,
            outside=self.outside + other.outside,
            k3_sum=self.k3_sum + other.k3_sum,
        )

    @property
    def mean_abs(self) -> float:
        """Mean |Δ|."""
        return self.abs_delta / self.count if self.count else 0.0

    @property
    def ratio_mean(self) -> float:
        """Mean r; 1 in expectation where the two policies share their support."""
        return self.ratio / self.count if self.count else 1.0

    @property
    def outside_share(self) -> float:
        """Share of tokens that are not near-on-policy."""
        return self.outside / self.count if self.count else 0.0

    @property
    def effective_samples(self) -> float:
        """(Σr)² / (n Σr²): 1 when all tokens weigh the same, 1/n when one outweighs the rest."""
        return self.ratio**2 / (self.count * self.ratio_squared) if self.count else 1.0

    @property
    def k3(self) -> float:
        """Estimated KL(behaviour || learner) per token."""
        return self.k3_sum / self.count if self.count else 0.0

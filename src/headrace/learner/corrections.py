"""The gap between the policy that sampled and the one that learns: weights against it, and how large it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

import torch
from torch import Tensor

from headrace.learner.losses import log_ratio
from headrace.types import Mismatch

CorrectionKind = Literal["none", "truncated", "masked"]

NEAR = (0.9, 1.1)
"""A ratio within these limits, both included, counts as near-on-policy."""

FINEST, BINS_PER_OCTAVE, OCTAVES = 2.0**-23, 8, 28
"""The histogram of Δ: bin 0 is |Δ| < FINEST, bin ±k holds |Δ| from FINEST 2^((k - 1) / 8) to FINEST 2^(k / 8).

A quantile is read at its bin's middle, so Δ is known to 2^(1/16) or 4.4% of itself. 2^-23 is float32's last bit, and
28 octaves above it lies 32, beyond which Δ is clamped.
"""

NUM_SUMS = 5 + 2 * BINS_PER_OCTAVE * OCTAVES + 1
"""What `MismatchSums.on_device` makes: five sums and the histogram."""


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
        MismatchSums(count=2, abs_delta=0.22, ratio=2.12, ratio_squared=2.25, outside=1, k3_sum=0.012,
            histogram=Counter({-141: 1, 157: 1}))
    """

    count: int = 0
    abs_delta: float = 0.0  # Σ |Δ|
    ratio: float = 0.0  # Σ r
    ratio_squared: float = 0.0  # Σ r²
    outside: int = 0  # tokens with r outside NEAR
    k3_sum: float = 0.0  # Σ r - 1 - Δ, which estimates KL(behaviour || learner) without negative terms
    histogram: Counter[int] = field(default_factory=Counter)  # tokens in each bin of Δ

    @classmethod
    def of(cls, learner: Tensor, behaviour: Tensor) -> MismatchSums:
        """The sums over one micro-batch."""
        return cls.read(learner.numel(), cls.on_device(learner, behaviour).tolist())

    @staticmethod
    def on_device(learner: Tensor, behaviour: Tensor) -> Tensor:
        """The sums in float64, still on the device, so that they can be fetched together with others."""
        delta = log_ratio(learner.detach().double(), behaviour.detach().double())
        ratio = delta.exp()
        outside = ~((ratio >= NEAR[0]) & (ratio <= NEAR[1]))
        columns = (delta.abs(), ratio, ratio.square(), outside.double(), torch.expm1(delta) - delta)
        most = BINS_PER_OCTAVE * OCTAVES
        counts = delta.new_zeros(2 * most + 1).index_add_(0, _bins(delta) + most, torch.ones_like(delta))
        return torch.cat([torch.stack([c.sum() for c in columns]), counts])

    @classmethod
    def read(cls, count: int, sums: Sequence[float]) -> MismatchSums:
        """What `on_device` made of so many tokens."""
        abs_delta, ratio_sum, ratio_squared, num_outside, k3_sum, *counts = sums
        most = BINS_PER_OCTAVE * OCTAVES
        held = {i - most: int(count) for i, count in enumerate(counts) if count}
        return cls(
            count=count,
            abs_delta=abs_delta,
            ratio=ratio_sum,
            ratio_squared=ratio_squared,
            outside=int(num_outside),
            k3_sum=k3_sum,
            histogram=Counter(held),
        )

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            count=self.count + other.count,
            abs_delta=self.abs_delta + other.abs_delta,
            ratio=self.ratio + other.ratio,
            ratio_squared=self.ratio_squared + other.ratio_squared,
            outside=self.outside + other.outside,
            k3_sum=self.k3_sum + other.k3_sum,
            histogram=self.histogram + other.histogram,
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

    @property
    def mismatch(self) -> Mismatch:
        """What the sums come to."""
        return Mismatch(
            count=self.count,
            mean_abs=self.mean_abs,
            k3=self.k3,
            ratio_mean=self.ratio_mean,
            ratio_p01=self.ratio_quantile(0.01),
            ratio_p99=self.ratio_quantile(0.99),
            outside_share=self.outside_share,
            effective_samples=self.effective_samples,
        )

    def ratio_quantile(self, share: float) -> float:
        """The r that this share of the tokens does not exceed, from the histogram; 1 where there are no tokens."""
        below = 0
        for bin in sorted(self.histogram):
            below += self.histogram[bin]
            if below >= share * self.count:
                return math.exp(_middle(bin))
        return 1.0


def _bins(delta: Tensor) -> Tensor:
    """The histogram's bin of each Δ; a NaN counts as the largest."""
    size = (delta.nan_to_num(nan=math.inf).abs() / FINEST).clamp(max=2.0**OCTAVES)
    bins = ((size.log2() * BINS_PER_OCTAVE).floor() + 1).clamp(0, BINS_PER_OCTAVE * OCTAVES)
    return torch.where(delta < 0, -bins, bins).long()


def _middle(bin: int) -> float:
    """The Δ that stands for a bin."""
    return math.copysign(FINEST * 2.0 ** ((abs(bin) - 0.5) / BINS_PER_OCTAVE), bin) if bin else 0.0

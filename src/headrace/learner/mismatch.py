"""How far the learner's log-probs are from those of the sampling.

Δ is learner - behaviour log-prob of a token, r = exp Δ its ratio. `mismatch_sums` stays on the
device and returns one vector of sums over tokens. Vectors of micro-batches and of ranks add up, and
`mismatch_of` reads the total. Δ is clamped to ±20, so that one broken token stays finite.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.learner.objective import log_ratio
from headrace.measured import Mismatch

NEAR = (0.9, 1.1)  # ratios within these limits, both included, count as near-on-policy

# The histogram of Δ: bin 0 is |Δ| < FINEST, bin ±k has |Δ| from FINEST 2^((k - 1) / 8) to FINEST
# 2^(k / 8). A quantile is read at its bin's middle, so Δ is known to 2^(1/16) or 4.4% of itself.
# 2^-23 is float32's last bit, and 28 octaves above it lies 32, beyond which Δ is clamped.
FINEST, BINS_PER_OCTAVE, OCTAVES = 2.0**-23, 8, 28
LAST_BIN = BINS_PER_OCTAVE * OCTAVES
NUM_SUMS = 5 + 2 * LAST_BIN + 1


def mismatch_sums(learner: Tensor, behaviour: Tensor) -> Tensor:
    """Float64 [NUM_SUMS]: sums of |Δ|, r, r², r outside NEAR, r - 1 - Δ; the histogram of Δ."""
    delta = log_ratio(learner.detach().double(), behaviour.detach().double())
    ratio = delta.exp()
    outside = ~((ratio >= NEAR[0]) & (ratio <= NEAR[1]))
    columns = (delta.abs(), ratio, ratio.square(), outside.double(), torch.expm1(delta) - delta)
    # the histogram's bin of each Δ; a NaN counts as the largest
    size = (delta.nan_to_num(nan=math.inf).abs() / FINEST).clamp(max=2.0**OCTAVES)
    bins = ((size.log2() * BINS_PER_OCTAVE).floor() + 1).clamp(0, LAST_BIN)
    at = torch.where(delta < 0, -bins, bins).long() + LAST_BIN
    counts = delta.new_zeros(2 * LAST_BIN + 1).index_add_(0, at, torch.ones_like(delta))
    return torch.cat([torch.stack([c.sum() for c in columns]), counts])


def mismatch_of(sums: Tensor) -> Mismatch:
    """What the sums of `mismatch_sums`, of any number of tokens, amount to."""
    abs_delta, ratio, ratio_squared, outside, k3, *counts = sums.tolist()
    if not (count := int(sum(counts))):
        return Mismatch()
    return Mismatch(
        count=count,
        mean_abs=abs_delta / count,
        k3=k3 / count,  # r - 1 - Δ estimates KL(behaviour || learner) without negative terms
        ratio_mean=ratio / count,
        ratio_p01=ratio_quantile(counts, 0.01),
        ratio_p99=ratio_quantile(counts, 0.99),
        ratio_outside=outside / count,
        effective_samples=ratio**2 / (count * ratio_squared),  # 1/n if one token has all weight
    )


def ratio_quantile(counts: Sequence[float], share: float) -> float:
    """The r that `share` of the tokens do not exceed, from the histogram's `counts`."""
    bin = int(np.searchsorted(np.cumsum(counts), share * sum(counts))) - LAST_BIN
    middle = FINEST * 2.0 ** ((abs(bin) - 0.5) / BINS_PER_OCTAVE)
    return math.exp(math.copysign(middle, bin)) if bin else 1.0

"""Per-token estimators of KL(current || reference), from tokens that (nearly) the current policy sampled.

As a term of the loss they differ by their gradients: that of k2 is unbiased for the divergence, that of k3 is close to
it while the policies are close, and that of k1 averages to zero, so k1 belongs into the reward.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from headrace.learner.losses import log_ratio

KLKind = Literal["k1", "k2", "k3"]


def kl(kind: KLKind, current: Tensor, reference: Tensor) -> Tensor:
    """The estimate for each token [N], with gradient to `current`; beyond a log-ratio of ±20 it stays as it is."""
    difference = log_ratio(current, reference.detach())
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return torch.expm1(-difference) + difference
        case _:
            assert_never(kind)

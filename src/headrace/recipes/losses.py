"""Losses for old samples, as functions of your own: learner.loss = "losses.py:topr". Copy one to change it.

A loss gets a `LossInput`, N tokens packed end to end: log-probs `current` (with gradient), `proximal` (at the start of
the step) and `behaviour` (at sampling), `advantage`, `sequence_ids`, `clip_low` and `clip_high`. It returns
`LossTerms`: a term for each token, and which tokens it held back.
"""

from __future__ import annotations

import torch

from headrace.learner.objective import LossInput, LossTerms, log_ratio, ppo, sequence_mean

MOST_DRIFT = 0.1  # opsm: mean log-ratio of a sequence's tokens, in nats
PULL = 0.1  # mirror_descent: weight of the squared log-ratio of a sequence


def opsm(x: LossInput) -> LossTerms:
    """Off-policy sequence masking: a bad answer that the policy has moved away from is left out whole."""
    drift = sequence_mean(log_ratio(x.behaviour, x.current.detach()), x.sequence_ids)
    masked = (x.advantage < 0) & (drift > MOST_DRIFT)
    terms = ppo(x)
    return LossTerms(torch.where(masked, 0.0, terms.per_token), terms.clipped | masked)


def topr(x: LossInput) -> LossTerms:
    """Tapered off-policy REINFORCE: good answers count fully, bad ones by the sequence's ratio, at most 1."""
    ratio = _sequence_sum(log_ratio(x.current.detach(), x.behaviour), x.sequence_ids).clamp(-20, 20).exp()
    weight = torch.where(x.advantage < 0, ratio.clamp(max=1.0), torch.ones_like(ratio))
    return LossTerms(-weight * x.advantage * x.current, (x.advantage < 0) & (ratio > 1))


def mirror_descent(x: LossInput) -> LossTerms:
    """-A log c + PULL / 2 (log of the sequence's c / p)², as in Kimi k1.5; the terms have its gradient.

    The log-ratio is zero in the first update of a step: it pulls with learner.epochs or learner.minibatches above 1.
    """
    moved = _sequence_sum(log_ratio(x.current.detach(), x.proximal), x.sequence_ids)
    return LossTerms((PULL * moved - x.advantage) * x.current, torch.zeros_like(moved, dtype=torch.bool))


def _sequence_sum(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `values` over its sequence."""
    return sequence_mean(values, sequence_ids) * torch.bincount(sequence_ids)[sequence_ids]

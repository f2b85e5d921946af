"""The objective: from rewards and log-probs to one loss. All that shapes the gradient is on this page.

    rewards  ->  advantages
    loss terms per token  ->  importance correction  ->  + KL to the reference  ->  weighted sum

N sampled tokens are packed end to end. Their log-probs come from up to four policies: `current`
(being updated, with gradient), `proximal` (the learner's at the start of the step), `behaviour`
(the one that sampled) and `reference` (the start weights, or a teacher's).

The loss of a step is the sum over its micro-batches of (per_token * weights).sum(), divided by
`normaliser` of the whole step: the same number however the step is cut. A sequence must lie in one
micro-batch whole, because its length and a sequence-level ratio are taken from the tokens at hand.
Tokens that a correction masks still count in lengths and in the normaliser; their term is zero.

Log-ratios are clamped to ±20 before `exp`: beyond that a ratio says only that something broke, and
it must not become an infinity. A clamped ratio has no gradient. A NaN log-prob stays NaN, so that
the step sees it and is skipped.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.config import LearnerSection
from headrace.errors import ConfigError
from headrace.learner.batch import Batch
from headrace.user_code import load_function

Rewards = npt.NDArray[np.floating[Any]]
Advantages = npt.NDArray[np.float64]

LOG_RATIO_LIMIT = 20.0
STD_FLOOR = 1e-6


def objective(
    section: LearnerSection, batch: Batch, passed: Sequence[Tensor], *, constant_length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The unnormalised loss; of each token [N] whether it was clipped or masked, its KL, the critic's loss.

    `passed` are log-probs over the sampling support (top-k, top-p, min-p), those over the whole
    vocabulary, and values if there is a critic.
    """
    s, b, (current, unfiltered, *values) = section, batch, passed
    proximal = current.detach() if b.start is None else b.start[0]
    given = LossInput(current, proximal, b.behaviour, b.advantage, b.sequence_ids, *s.clip)
    terms = (LOSSES.get(s.loss) or users_function("learner.loss", s.loss))(given)
    if not isinstance(terms, tuple) or [getattr(x, "shape", None) for x in terms] != [current.shape] * 2:
        raise ConfigError(f"learner.loss = '{s.loss}' must return LossTerms: two numbers for each token")
    terms = LossTerms(*terms)
    (low, high), carried = s.correction_limits, s.loss in CARRIES_WEIGHT
    weight, kept = correction_weight(s.correction, proximal, b.behaviour, low=low, high=high, carried=carried)
    per_token = corrected(terms.per_token, weight, kept)
    divergence = torch.zeros_like(proximal)
    if b.reference is not None:
        divergence = kl(s.kl_estimator, unfiltered if s.kl_in == "loss" else current, b.reference)
        if s.kl_in == "loss":
            per_token = per_token + s.kl_coef * divergence
    critic = torch.zeros_like(proximal)
    if values and b.start is not None:
        critic = value_loss(values[0], b.start[1], b.start[2], low=s.clip[0], high=s.clip[1])
        per_token = per_token + critic
    share = weights(s.aggregation, b.sequence_ids, constant_length=constant_length, dtype=per_token.dtype)
    return (per_token * share).sum(), terms.clipped | ~kept, divergence.detach(), critic.detach()


@cache
def users_function(setting: str, spec: str) -> Callable[..., Any]:
    return load_function(spec, setting, ConfigError)


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator / denominator) of two log-probs, clamped to ±20, where the gradient ends."""
    # Two equal infinities are the same probability; their difference would be NaN.
    equal_infinities = torch.isinf(numerator) & (numerator == denominator)
    difference = torch.where(equal_infinities, torch.zeros_like(numerator), numerator - denominator)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# ---- advantages
#
# Standard deviations are sample ones (n - 1), as in TRL and verl; DeepSeekMath writes only "std". A
# group without signal (one member, or equal rewards) gets exact zeros from every kind of advantage.


def advantages(kind: str, rewards_by_group: Sequence[Rewards]) -> list[Advantages]:
    """One advantage per reward. `rewards_by_group` are the groups of one step."""
    if ":" in kind:
        given = users_function("learner.advantage", kind)(rewards_by_group)
        if not isinstance(given, list | tuple) or [*map(np.shape, given)] != [*map(np.shape, rewards_by_group)]:
            raise ConfigError(f"learner.advantage = '{kind}' must return as many numbers as each group has rewards")
        return [np.asarray(values, np.float64) for values in given]
    if not (centred := [_centred(rewards) for rewards in rewards_by_group]) or kind == "dr-grpo":
        return centred
    if kind == "grpo":
        return [c / (_std(r) + STD_FLOOR) for c, r in zip(centred, rewards_by_group, strict=True)]
    if kind == "rloo":
        # r_i - mean of the others = n / (n - 1) * (r_i - mean of all)
        return [c * (len(c) / max(len(c) - 1, 1)) for c in centred]
    # REINFORCE++: subtract the group's mean, divide by the step's std. The step's mean is not
    # subtracted again: centred groups sum to zero, and silent groups stay exactly zero.
    step = np.concatenate(centred)
    if all(len(c) <= 1 for c in centred):  # groups of one: subtract the step's mean
        step = _centred(np.concatenate(rewards_by_group))
    return np.split(step / (_std(step) + STD_FLOOR), np.cumsum([len(c) for c in centred])[:-1])


def gae(rewards: Sequence[Rewards], values: Sequence[Rewards], *, discount: float, decay: float) -> list[Advantages]:
    """Generalised advantage estimation over the sampled tokens of each trajectory.

    A_t = d_t + discount * decay * A_(t+1) with d_t = r_t + discount * V_(t+1) - V_t; after the last
    token both are 0. With decay = 1 it is the discounted return less V_t.
    """
    lengths = list(map(len, rewards))
    reward, value = given = np.zeros((2, max(lengths, default=0) + 1, len(lengths)))  # zeros after the ends
    for i, both in enumerate(zip(rewards, values, strict=True)):
        given[:, : lengths[i], i] = both
    found, after = np.zeros_like(reward), np.zeros(len(lengths))
    for t in reversed(range(len(reward) - 1)):
        after = reward[t] + discount * value[t + 1] - value[t] + discount * decay * after
        found[t] = after
    return [found[:length, i] for i, length in enumerate(lengths)]


def balance(worth: Mapping[str, float]) -> dict[str, float]:
    """By trajectory id, for trajectory balance: how far its worth is above the mean of its group's.

    A trajectory's worth is reward - kl_coef * log(current / reference), its log-probs summed. The mean
    over the group estimates kl_coef * log Z, so the gradient of -A log(current) is, times kl_coef², that
    of half the squared residual of log Z + log(current) = log(reference) + reward / kl_coef.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for id in sorted(worth):  # the order decides a sum's last bit
        groups[id.rpartition("/")[0]].append(worth[id])
    return {id: value - sum(own := groups[id.rpartition("/")[0]]) / len(own) for id, value in worth.items()}


def _centred(rewards: Rewards) -> Advantages:
    if len(values := np.asarray(rewards, np.float64)) == 0 or np.all(values == values[0]):
        return np.zeros_like(values)  # no rounding error, which a tiny std would blow up
    return values - float(values.mean())


def _std(rewards: Rewards) -> float:
    return float(np.std(rewards, ddof=1, dtype=np.float64)) if len(rewards) > 1 else 0.0


# ---- losses


class LossInput(NamedTuple):
    """N packed tokens, and the clip range [1 - clip_low, 1 + clip_high]."""

    current: Tensor  # [N] log-probs, with gradient
    proximal: Tensor  # [N]
    behaviour: Tensor  # [N]
    advantage: Tensor  # [N]
    sequence_ids: Tensor  # int64 [N], non-decreasing
    clip_low: float
    clip_high: float


class LossTerms(NamedTuple):
    """Unreduced loss terms, and which tokens the clip range held back."""

    per_token: Tensor  # [N] with gradient
    clipped: Tensor  # [N] bool


def ppo(x: LossInput) -> LossTerms:
    """-min(r A, clip(r) A) with r = current / behaviour."""
    return _clipped_surrogate(log_ratio(x.current, x.behaviour).exp(), x)


def decoupled_ppo(x: LossInput) -> LossTerms:
    """-w min(r A, clip(r) A) with r = current / proximal and the constant w = proximal / behaviour.

    The trust region is around the learner's own policy, so old samples are reweighted instead of
    clipped away.
    """
    per_token, clipped = _clipped_surrogate(log_ratio(x.current, x.proximal.detach()).exp(), x)
    return LossTerms(log_ratio(x.proximal.detach(), x.behaviour).exp() * per_token, clipped)


def cispo(x: LossInput) -> LossTerms:
    """-clip(r) A log(current), r = current / behaviour constant: all tokens keep their gradient."""
    ratio = log_ratio(x.current.detach(), x.behaviour).exp()
    weight = ratio.clamp(1 - x.clip_low, 1 + x.clip_high)
    return LossTerms(-weight * x.advantage * x.current, ratio != weight)


def gspo(x: LossInput) -> LossTerms:
    """-min(s A, clip(s) A), s the geometric mean of current / behaviour over the sequence.

    The value of s is the sequence's, its gradient the token's own (ds/dcurrent = s). Under
    `sequence` aggregation, and with one advantage per sequence, the gradients add up to that of the
    sequence-level objective.
    """
    per_token = log_ratio(x.current, x.behaviour)
    straight_through = per_token - per_token.detach()  # zero, with the token's gradient
    ratio = (sequence_mean(per_token.detach(), x.sequence_ids) + straight_through).exp()
    return _clipped_surrogate(ratio, x)


def reinforce(x: LossInput) -> LossTerms:
    """-A log(current): no ratio and no clip, so off-policy samples need a correction."""
    return LossTerms(-x.advantage * x.current, torch.zeros_like(x.current, dtype=torch.bool))


LOSSES: Mapping[str, Callable[[LossInput], LossTerms]] = {
    "ppo": ppo,
    "decoupled-ppo": decoupled_ppo,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
    "tba": reinforce,  # advantages of `balance` need no ratio, however old the samples
}
# losses that contain proximal / behaviour: a correction may cut it, not multiply it again
CARRIES_WEIGHT = frozenset({"ppo", "decoupled-ppo", "cispo", "gspo"})


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """For each token the mean of `values` over its sequence; no gradient."""
    if values.numel() == 0:
        return values
    _, run, sizes = torch.unique_consecutive(sequence_ids, return_inverse=True, return_counts=True)
    # Not index_add: on a GPU its order of summation is not fixed, and a resumed run must be
    # bit-identical.
    return torch.segment_reduce(values, "mean", lengths=sizes)[run]


def _clipped_surrogate(ratio: Tensor, x: LossInput) -> LossTerms:
    """-min(r A, clip(r) A), as a choice: at a tie, min would split the gradient."""
    constant, advantage = ratio.detach(), x.advantage
    clipped = torch.where(advantage > 0, constant > 1 + x.clip_high, (advantage < 0) & (constant < 1 - x.clip_low))
    bound = constant.clamp(1 - x.clip_low, 1 + x.clip_high)
    return LossTerms(-torch.where(clipped, bound, ratio) * advantage, clipped)


def value_loss(values: Tensor, start: Tensor, returns: Tensor, *, low: float, high: float) -> Tensor:
    """Half the squared error [N], or that of the value clipped to [start - low, start + high] if it is larger."""
    near = start + (values - start).clamp(-low, high)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


# ---- importance correction


def correction_weight(
    kind: str, proximal: Tensor, behaviour: Tensor, *, low: float, high: float, carried: bool = False
) -> tuple[Tensor, Tensor]:
    """Constant importance weight per token [N], and which tokens are kept [N] bool.

    With w = proximal / behaviour: `none` is 1, `truncated` min(w, high), `masked` w inside [low,
    high] and else 0. `carried` is for the losses in CARRIES_WEIGHT: the weight is divided by w,
    which leaves `truncated` min(1, high / w) and `masked` 1 or 0, so that w never counts twice.
    """
    ratio = log_ratio(proximal.detach(), behaviour.detach()).exp()
    ones, everything = torch.ones_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    if kind == "none":
        return ones, everything
    if kind == "truncated":
        return ((high / ratio).clamp(max=1.0) if carried else ratio.clamp(max=high)), everything
    kept = ~((ratio < low) | (ratio > high))  # a NaN is kept: it must reach the loss
    return torch.where(kept, ones if carried else ratio, torch.zeros_like(ratio)), kept


def corrected(per_token: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    """Apply a correction. A masked token is replaced, not multiplied: 0 * inf would be NaN."""
    return torch.where(kept, per_token * weight, torch.zeros_like(per_token))


# ---- KL to the reference


def kl(kind: str, current: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(current || reference) per token [N], with gradient to `current`.

    As a term of the loss the estimators differ by their gradients: that of k2 is unbiased for the
    divergence, that of k3 is close to it while the policies are close, and that of k1 averages to
    zero, so k1 belongs into the reward.
    """
    difference = log_ratio(current, reference.detach())
    if kind == "k1":
        return difference
    return 0.5 * difference.square() if kind == "k2" else torch.expm1(-difference) + difference


# ---- aggregation


def weights(kind: str, sequence_ids: Tensor, *, constant_length: int, dtype: torch.dtype) -> Tensor:
    """The weight of each of N tokens: 1, 1 / its sequence's length, or 1 / `constant_length`."""
    ones = torch.ones(sequence_ids.shape, dtype=dtype, device=sequence_ids.device)
    if kind == "sequence":
        return ones / torch.bincount(sequence_ids)[sequence_ids]
    return ones if kind == "token" else ones / constant_length


def normaliser(kind: str, num_tokens: int, num_sequences: int) -> float:
    """The divisor of the weighted sum: the step's number of tokens, or of sequences."""
    return float(num_tokens if kind == "token" else num_sequences)

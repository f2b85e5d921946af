"""The goodput equation: how five stage times make one step, and what a step's tokens cost.

    goodput = B·K·L̄·useful / τstep        τstep = sum or max of τR τV τref τT τS, by what overlaps

τR rollout, τV reward, τref reference, τT train, τS publish. Where one resource does everything, they add up. What runs
on resources of its own hides behind what takes longer. A stage's time is what it adds to its own side of the loop: a
reward that is computed while other answers are still being generated belongs in τV only as far as it comes after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from headrace.errors import ConfigError
from headrace.insight.checks import check_above, check_at_least, check_share
from headrace.types import STAGES, StageTimes

STAGE_WORDS = {
    "rollout": "generating answers",
    "reward": "scoring answers",
    "reference": "log-probs of the reference",
    "train": "forward, backward, optimizer",
    "publish": "new weights to the engine",
}
SYMBOLS = dict(zip(STAGES, ("τR", "τV", "τref", "τT", "τS"), strict=True))


class Placement(StrEnum):
    """Which stages may run at the same time."""

    COLOCATED = "colocated"  # one resource takes turns: nothing does
    STREAMED = "streamed"  # own pools, max_lag = 0: training on a step's first groups, with generating its last
    OVERLAPPED = "overlapped"  # own pools, max_lag = 1: training of a step, with rollout, reward, reference of the next
    ASYNCHRONOUS = "asynchronous"  # as much lag as it takes: everything with everything


PLACEMENT_WORDS = {
    Placement.COLOCATED: "one machine takes turns: every stage waits for the others",
    Placement.STREAMED: "own machines, max_lag = 0: the learner begins with the groups that are finished",
    Placement.OVERLAPPED: "own machines, max_lag = 1: the next answers are written while the learner trains",
    Placement.ASYNCHRONOUS: "own machines, as much lag as it takes: only the slowest stage counts",
}


def exposed(
    times: StageTimes, placement: Placement, *, hidden_share: float = 0.0, exposed_publish: float = 1.0
) -> StageTimes:
    """The seconds that each stage adds to the step; what hides behind other stages adds none.

    colocated       τR + τV + τref + τT + τS
    streamed        the same sum, less hidden_share · min(τR + τV + τref, τT)
    overlapped      max(τR + τV + τref, τT) + exposed_publish · τS
    asynchronous    max(τR, τV, τref, τT, τS)

    With no lag allowed a strict max is impossible: no answer may be sampled before the last update, and no update made
    before the last answer, so rollout and training of one step follow each other. But a gradient is a sum over groups,
    and the learner may add up those of finished groups while others are being generated. `hidden_share` is how much of
    the shorter side that hides. It is 0 when all groups end together and 1 - 1/n when n groups end at even intervals
    (see `hidden_share_of`); 1 would be the strict max. With one version of lag the next step's answers need not wait
    for the update, and with more even publishing need not be waited for: then the slowest stage sets the pace.
    """
    for stage in STAGES:
        check_at_least(0.0, **{SYMBOLS[stage]: getattr(times, stage)})
    check_share(exposed_publish=exposed_publish)
    if not 0.0 <= hidden_share < 1.0:
        raise ConfigError(
            f"hidden_share is {hidden_share:g}; it is at least 0 and below 1, because without lag the last group's "
            "training cannot begin before its generation ends"
        )
    produce_s = times.rollout + times.reward + times.reference
    produce, train, publish = 1.0, 1.0, 1.0  # the share of each side that shows
    if placement is Placement.ASYNCHRONOUS:
        return StageTimes(**{times.wall: getattr(times, times.wall)})
    if placement is not Placement.COLOCATED:
        shorter = 0.0 if placement is Placement.OVERLAPPED else 1.0 - hidden_share
        produce, train = (shorter, 1.0) if produce_s < times.train else (1.0, shorter)
    if placement is Placement.OVERLAPPED:
        publish = exposed_publish
    return StageTimes(
        rollout=produce * times.rollout,
        reward=produce * times.reward,
        reference=produce * times.reference,
        train=train * times.train,
        publish=publish * times.publish,
    )


def step_s(
    times: StageTimes, placement: Placement, *, hidden_share: float = 0.0, exposed_publish: float = 1.0
) -> float:
    """Seconds of one step; `exposed` says how they come about."""
    shown = exposed(times, placement, hidden_share=hidden_share, exposed_publish=exposed_publish)
    return sum(float(getattr(shown, stage)) for stage in STAGES)


def binding_stage(
    times: StageTimes, placement: Placement, *, hidden_share: float = 0.0, exposed_publish: float = 1.0
) -> str:
    """The wall: the stage that adds most to the step. Shortening one that adds nothing changes nothing."""
    return exposed(times, placement, hidden_share=hidden_share, exposed_publish=exposed_publish).wall


def hidden_share_of(finish_s: Sequence[float], train_s: float) -> float:
    """What streaming hides at max_lag = 0, as `hidden_share`, when groups end at these times since the step's start.

    `finish_s` is in the order in which groups are trained on: with max_lag = 0 the order of their serials, so a group
    that ends late holds up those behind it. Each takes an equal part of `train_s`.
    """
    check_above(0.0, train_s=train_s)
    ready_s = np.maximum.accumulate(np.asarray(finish_s, dtype=float))
    if not ready_s.size or not ready_s[-1] > 0.0:
        return 0.0
    done_s = 0.0
    for ready in ready_s:
        done_s = max(done_s, float(ready)) + train_s / ready_s.size
    rollout_s = float(ready_s[-1])
    return max(0.0, (rollout_s + train_s - done_s) / min(rollout_s, train_s))


def goodput(*, num_prompts: int, num_samples: int, mean_tokens: float, step_s: float, useful: float = 1.0) -> float:
    """Trained tokens per second: `num_prompts` x `num_samples` answers of `mean_tokens` per step, `useful` of them."""
    check_above(0.0, num_prompts=num_prompts, num_samples=num_samples, mean_tokens=mean_tokens, step_s=step_s)
    check_share(useful=useful)
    return num_prompts * num_samples * mean_tokens * useful / step_s


def dollars_per_million_tokens(goodput_tokens_per_s: float, dollars_per_hour: float) -> float:
    """What a million trained tokens cost on machines of `dollars_per_hour` in all; infinite if there are none."""
    check_at_least(0.0, goodput=goodput_tokens_per_s, dollars_per_hour=dollars_per_hour)
    if goodput_tokens_per_s == 0.0:
        return float("inf")
    return dollars_per_hour / 3600.0 / goodput_tokens_per_s * 1e6

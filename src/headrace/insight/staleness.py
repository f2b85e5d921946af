"""How old training data gets: the expected lag from concurrency, batch and queue.

Two things age an answer. It takes time to generate: by Little's law C answers in flight at a rate of v_R take C / v_R
seconds each, their group M times that (M is the longest of a group over the average, `LogNormal.tail(K)`), and every
B / v seconds of it there is a new version, v the rate of the slower side. Then it waits in the queue.

C and B count the same thing, answers or groups. ρ = v_R / v_T is the rate at which rollout can produce over the rate at
which the learner can train. Below 1 the learner waits for answers, above 1 the answers for the learner.
"""

from __future__ import annotations

from headrace.buffer.lag import LagPolicy
from headrace.insight.checks import check_above, check_at_least


def expected_lag(
    *, concurrency: float, batch: float, group_tail: float, rho: float, queue_batches: float = 1.0
) -> float:
    """Mean lag where generation never pauses and a full queue of `queue_batches` (q) batches lets its oldest go.

    Other systems do that; `admitted_lag` is this one's.

    rollout-bound, ρ ≤ 1: C·M/B + ρ. A batch is complete and being trained on for the share ρ of the time, and what
    ends meanwhile began a version before the one that it will update.
    train-bound, ρ > 1: C·M/(ρB) + (2q + ρ - 1)/(2ρ). The queue is always full.
    """
    check_above(0.0, concurrency=concurrency, batch=batch, rho=rho)
    check_at_least(1.0, group_tail=group_tail, queue_batches=queue_batches)
    in_flight = concurrency * group_tail / batch
    if rho <= 1.0:
        return in_flight + rho
    return in_flight / rho + (2 * queue_batches + rho - 1) / (2 * rho)


def admitted_lag(
    policy: LagPolicy, *, concurrency: float, group_tail: float, rho: float, verdict_steps: float = 0.0
) -> float:
    """Mean lag when the policy admits groups, `concurrency` of them at most at once: never above its max_lag.

    Who is ahead waits then, and groups are trained on one by one as they come. So, as long as the learner waits for
    groups, a group's lag is the time that it takes, counted in steps: to be generated, and `verdict_steps` for scores.
    When groups wait for the learner, admission lets only 1/ρ of the concurrency be used, and at least a step's worth.
    """
    under_way = min(concurrency, policy.most_ahead) / max(1.0, rho)
    lag = under_way * group_tail / policy.groups_per_step + verdict_steps
    return min(float(policy.max_lag), max(lag, 1.0 if rho > 1.0 else 0.0))

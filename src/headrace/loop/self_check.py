"""Whether engine and learner agree, before the first step. Where they do not, every gradient of the run is off.

A few held-out prompts are answered as in training, and the learner computes the log-probs of the same tokens with the
same weights: all that differs is how they are computed. Nothing is trained and nothing enters the books.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.errors import ModelError
from headrace.learner.mismatch import NEAR
from headrace.roles import Device
from headrace.rollout.pool import RolloutPool
from headrace.types import Mismatch, Prompt, Sampling, Trajectory

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 4, 2, 32

# Mean |Δ| that rounding does not explain. A model of two layers on a CPU has 1.5e-7 in float32, 2e-4 in float16 and
# 0.0016 in bfloat16, and deeper ones have more; a wrong mask, position or temperature moves log-probs by tenths.
LARGE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.01, "bfloat16": 0.05}
FAR = 0.2  # nats of mean |Δ| at which no run starts, whatever the precision: nothing of it is rounding


async def self_check(
    pool: RolloutPool,
    mismatch: Callable[[Sequence[Trajectory]], Mismatch],
    device: Device,
    prompts: list[Prompt],
    sampling: Sampling,
) -> Mismatch:
    """The mismatch of a small batch, as the learner measures it, unless it is so large that no run may start."""
    short = replace(sampling, max_new_tokens=min(MAX_NEW_TOKENS, sampling.max_new_tokens))
    answers = [
        future
        for i, prompt in enumerate(prompts[:NUM_PROMPTS])
        for future in pool.start(i, prompt, [short] * NUM_SAMPLES, counted=False)
    ]
    found = await device.run(mismatch, await asyncio.gather(*answers))
    refuse_far(found)
    return found


def refuse_far(mismatch: Mismatch) -> None:
    if mismatch.mean_abs <= FAR:  # a NaN is not
        return
    raise ModelError(
        f"the run does not start: with the same weights, the learner's log-probs of {mismatch.count} sampled tokens "
        f"are {mismatch.mean_abs:.2g} nats away from the engine's on average, and rounding explains at most "
        f"{max(LARGE.values())}. Engine and learner compute different things for this model: every gradient would be "
        "wrong. Try model.dtype=float32; if that does not help, choose another model (model.path) and report this one"
    )


def refuse_inexact(mismatch: Mismatch) -> None:
    """For `model.exact`: a run that was promised equal bits does not start without them."""
    if mismatch.mean_abs == 0:  # a NaN is not
        return
    raise ModelError(
        "model.exact = true, but the start-up check found a difference: with the same weights, the learner's log-probs "
        f"of {mismatch.count} sampled tokens are {mismatch.mean_abs:.2g} away from the engine's on average. Set "
        "model.exact = false, and please report it with the model and the machine"
    )


def warning(mismatch: Mismatch, dtype: str) -> str:
    """What to tell the user: nothing while rounding explains the mismatch."""
    if mismatch.mean_abs <= LARGE[dtype]:  # a NaN is large
        return ""
    advice = (
        "see whether model.dtype=float32 makes it vanish; learner.correction=masked bounds the harm"
        if dtype in ("bfloat16", "float16")
        else "engine and learner compute different things for this model; please report it"
    )
    return (
        f"self-check: with the same weights, the learner's log-probs of {mismatch.count} sampled tokens are "
        f"{mismatch.mean_abs:.2g} away from the engine's on average, and {mismatch.outside_share:.0%} of the ratios "
        f"are outside [{NEAR[0]}, {NEAR[1]}]. Rounding in {dtype} explains at most {LARGE[dtype]:g}, so part of what "
        f"is trained will be noise: {advice}"
    )

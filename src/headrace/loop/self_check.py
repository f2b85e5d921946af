"""Whether engine and learner agree: on a small batch before the first step, and after every update.

Both compute log-probs of the same tokens with the same weights. If the results are far apart, the
two compute different things, or their weights differ, and every gradient would be wrong. Nothing is
trained here, and nothing is booked.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import ModelError
from headrace.learner.mismatch import NEAR
from headrace.measured import Mismatch
from headrace.rollout.pool import RolloutPool
from headrace.types import IntArray, Order, Prompt, Sampling, Trajectory

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 4, 2, 32

# Mean |Δ| that rounding does not explain. A model of two layers on a CPU has 1.5e-7 in float32,
# 2e-4 in float16 and 0.0016 in bfloat16; deeper ones have more. A wrong mask, position or temperature
# moves log-probs by tenths.
LARGE = {"float64": 1e-3, "float32": 1e-3, "float16": 0.01, "bfloat16": 0.05}
FAR = 0.2  # nats of mean |Δ| at which no run starts, in any precision: rounding is never this large


async def few_answers(pool: RolloutPool, prompts: list[Prompt], samplings: list[Sampling]) -> list[Trajectory]:
    """Short ones, to a few of the prompts: the small batch."""
    short = [replace(s, max_new_tokens=min(MAX_NEW_TOKENS, s.max_new_tokens)) for s in samplings]
    orders = [Order.group(i, prompt, short, counted=False) for i, prompt in enumerate(prompts[:NUM_PROMPTS])]
    return await asyncio.gather(*(answer for order in orders for answer in pool.start(order)))


def verdict(mismatch: Mismatch, dtype: str, *, exact: bool = False) -> str:
    """What to tell the user: nothing while rounding explains the mismatch.

    Raises if no run may start; with `exact`, unless engine and learner agree to the last bit.
    """
    far = f"{mismatch.mean_abs:.2g} nats away from the engine's on average"
    distance = f"with the same weights, the learner's log-probs of {mismatch.count} sampled tokens are {far}"
    if not mismatch.mean_abs <= FAR:  # true for NaN
        found = f"{distance}, and rounding explains at most {max(LARGE.values())}"
        told = "Engine and learner compute different things for this model: every gradient would be wrong"
        helps = "if that does not help, choose another model (model.path) and report this one"
        raise ModelError(f"the run does not start: {found}. {told}. Try model.dtype=float32; {helps}")
    if exact and mismatch.mean_abs:
        told = "Set model.exact = false, and please report it with the model and the machine"
        found = f"the start-up check found a difference: {distance}"
        raise ModelError(f"model.exact = true, but {found}. {told}")
    if mismatch.mean_abs <= LARGE[dtype]:
        return ""
    advice = "engine and learner compute different things for this model; please report it"
    if dtype in ("bfloat16", "float16"):
        bounds = "learner.correction=masked bounds the harm"
        advice = f"see whether model.dtype=float32 makes it vanish; {bounds}"
    ratios = f"{mismatch.ratio_outside:.0%} of the ratios are outside [{NEAR[0]}, {NEAR[1]}]"
    told = f"{LARGE[dtype]:g}, so part of what is trained will be noise: {advice}"
    return f"self-check: {distance}, and {ratios}. Rounding in {dtype} explains at most {told}"


@dataclass
class Canary:
    """Compares engines and learner on one fixed prompt, after every update (a health check).

    `greedy(prompt)` gives each engine's likeliest next token and its log-prob, except of engines
    whose cache is full. `logprob(prompt, token)` is the learner's.
    """

    greedy: Callable[[IntArray], Sequence[tuple[int, float]]]
    logprob: Callable[[IntArray, int], float]
    prompt: IntArray
    dtype: str
    _usual: float | None = None  # how large a difference is: the first comparison sets it

    def check(self, version: int) -> None:
        """Raise if the two disagree. Runs in the device thread, between two decode steps."""
        known: dict[int, float] = {}
        for token, sampled_with in self.greedy(self.prompt):
            if token not in known:
                known[token] = self.logprob(self.prompt, token)
            difference = abs(sampled_with - known[token])
            if self._usual is None and np.isfinite(difference):
                self._usual = difference
            if not difference <= (self._usual or 0.0) + LARGE[self.dtype]:  # true for NaN
                given = f"log-prob {sampled_with:.4g}, and the learner {known[token]:.4g}"
                told = "what is sampled with is not what is trained, or the weights are damaged"
                ends = "The run stops here, and nothing that was sampled with them is trained on"
                found = f"after step {version} the engine gives a fixed prompt's next token the {given}"
                raise ModelError(f"{found}: {told}. {ends}")

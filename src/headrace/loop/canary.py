"""After every update one fixed prompt is scored on both sides: by the engine, as for a request, and by the learner.

Where the two disagree, the weights that rollouts are sampled with are not those that are trained, or are damaged.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.errors import ModelError
from headrace.loop.self_check import LARGE
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.types import IntArray


class Canary:
    """Compares engine and learner on one prompt. The first comparison says how far apart they usually are."""

    def __init__(self, engine: Engine, policy: Policy, prompt: IntArray) -> None:
        self._engine, self._policy, self._prompt = engine, policy, prompt
        self._usual: float | None = None

    def check(self, version: int) -> None:
        """Raise when the two sides of `version` disagree. Runs in the device thread, between two decode steps."""
        likeliest = self._engine.likeliest(self._prompt)
        if likeliest is None:  # the cache is full of running sequences: the next update has its own turn
            return
        token, sampled_with = likeliest
        trained_on = self._logprob(token)
        difference = abs(sampled_with - trained_on)
        if self._usual is None and np.isfinite(difference):
            self._usual = difference
        if not difference <= (self._usual or 0.0) + LARGE[self._policy.dtype]:  # a NaN is not
            raise ModelError(
                f"after step {version} the engine gives a fixed prompt's next token the log-prob {sampled_with:.4g}, "
                f"and the learner {trained_on:.4g}: what is sampled with is not what is trained, or the weights are "
                "damaged. The run stops here, and nothing was sampled with them"
            )

    @torch.no_grad()
    def _logprob(self, token: int) -> float:
        device = self._policy.device
        tokens = torch.from_numpy(np.append(self._prompt, token).astype(np.int64)).to(device)
        last = torch.tensor([len(self._prompt)], device=device)
        return float(self._policy.logprobs(tokens, PackedPlan([len(tokens)], device), last, 1.0))

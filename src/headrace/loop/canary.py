"""After every update one fixed prompt is scored on both sides: by the engine, as for a request, and by the learner.

Where the two disagree, the weights that rollouts are sampled with are not those that are trained, or are damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.errors import ModelError
from headrace.loop.self_check import LARGE
from headrace.types import IntArray


class Canary:
    """Compares engines and learner on one prompt. The first comparison says how far apart they usually are.

    `greedy(prompt)` has, of every engine with room for it, the most likely next token and its log-prob;
    `logprob(prompt, token)` is the learner's.
    """

    def __init__(
        self,
        greedy: Callable[[IntArray], Sequence[tuple[int, float]]],
        logprob: Callable[[IntArray, int], float],
        prompt: IntArray,
        *,
        dtype: str,
    ) -> None:
        self._greedy, self._logprob, self._prompt = greedy, logprob, prompt
        self._rounding = LARGE[dtype]
        self._usual: float | None = None

    def check(self, version: int) -> None:
        """Raise when the two sides of `version` disagree. Runs in the device thread, between two decode steps.

        An engine whose cache is full of running sequences is left out: the next update has its own turn.
        """
        known: dict[int, float] = {}
        for token, sampled_with in self._greedy(self._prompt):
            if token not in known:
                known[token] = self._logprob(self._prompt, token)
            self._compare(version, sampled_with, known[token])

    def _compare(self, version: int, sampled_with: float, trained_on: float) -> None:
        difference = abs(sampled_with - trained_on)
        if self._usual is None and np.isfinite(difference):
            self._usual = difference
        if not difference <= (self._usual or 0.0) + self._rounding:  # a NaN is not
            raise ModelError(
                f"after step {version} the engine gives a fixed prompt's next token the log-prob {sampled_with:.4g}, "
                f"and the learner {trained_on:.4g}: what is sampled with is not what is trained, or the weights are "
                "damaged. The run stops here, and nothing was sampled with them"
            )

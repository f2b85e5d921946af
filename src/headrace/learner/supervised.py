"""Warm start: supervised fine-tuning (SFT) on worked examples before RL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.config import LearnerSection, WarmstartSection
from headrace.learner.learner import Optimizer
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.types import Example


class WarmStart:
    """Supervised steps on worked solutions; the loss is on solution tokens only."""

    def __init__(self, policy: Policy, section: WarmstartSection) -> None:
        self._policy, self._section = policy, section
        adamw = LearnerSection(lr=section.lr, beta2=0.98)
        self._optimizer = Optimizer(policy.model.named_parameters(), adamw)
        self._done = 0

    def step(self, examples: Sequence[Example]) -> float:
        """One optimizer step. Returns the loss before it."""
        policy, steps = self._policy, self._section.steps
        lengths = [len(ids) for ids, _ in examples]
        solved = np.concatenate([learned for _, learned in examples])
        joined = np.concatenate([ids for ids, _ in examples]).astype(np.int64)
        tokens = torch.from_numpy(joined).to(policy.device)
        at = torch.from_numpy(np.flatnonzero(solved)).to(policy.device)
        loss = -policy.logprobs(tokens, PackedPlan(lengths, policy.device), at, 1.0)[0].mean()
        loss.backward()
        # up over the first tenth, down over the last quarter: RL should not start from the noise of
        # the last batches
        rise, fall = (self._done + 1) / max(1, steps // 10), (steps - self._done) / max(1, steps // 4)
        self._optimizer.step(lr=self._section.lr * min(1.0, rise, fall), scale=1.0, clip=1.0)
        self._done += 1
        return float(loss.detach())

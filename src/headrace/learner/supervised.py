"""Warm start: supervised fine-tuning (SFT) on worked examples before RL."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from headrace.config import LearnerSection, WarmstartSection
from headrace.learner.batch import pack
from headrace.learner.learner import Optimizer, Sharding, take_part
from headrace.policy.policy import Policy
from headrace.types import BoolArray, Example, IntArray, Item, Order, Prompt, Sampling, Span


class WarmStart:
    """Supervised steps on worked solutions; the loss is on solution tokens only."""

    def __init__(self, policy: Policy, section: WarmstartSection, sharding: Sharding | None = None) -> None:
        self._policy, self._section, self._sharding = policy, section, sharding
        adamw = LearnerSection(lr=section.lr, beta2=0.98)
        self._optimizer = Optimizer(policy.held(), adamw, add_up=sharding.reduced if sharding else None)
        self._done = 0

    def step(self, examples: Sequence[Example]) -> float:
        """One optimizer step. Returns the loss before it."""
        policy, steps, sharding = self._policy, self._section.steps, self._sharding
        mine = examples if sharding is None else examples[sharding.rank :: sharding.num_ranks]
        loss = torch.zeros(())
        if mine:
            batch = pack([_item(*example) for example in mine], policy.device)
            logprobs = policy.logprobs(batch.token_ids, batch.plan, batch.at, 1.0)[0]
            loss = -logprobs.sum() / sum(int(learned.sum()) for _, learned in examples)
            loss.backward()
        else:
            take_part(policy, backward=True)
        if policy.shards is not None and sharding is not None:
            policy.shards.hand_over_gradients()
            loss = sharding.reduced(loss.detach().cpu())
        # up over the first tenth, down over the last quarter: RL should not start from the noise of
        # the last batches
        rise, fall = (self._done + 1) / max(1, steps // 10), (steps - self._done) / max(1, steps // 4)
        self._optimizer.step(lr=self._section.lr * min(1.0, rise, fall), scale=1.0, clip=1.0)
        self._done += 1
        return float(loss.detach())


def _item(ids: IntArray, learned: BoolArray) -> Item:
    """A worked example as an answer whose learned tokens were sampled."""
    edges = np.flatnonzero(np.diff(learned, prepend=False, append=False)).reshape(-1, 2)
    spans = tuple(Span(version=0, start=start, end=end) for start, end in edges.tolist())
    prompt = Prompt(id="worked", text="", token_ids=ids)
    unanswered = Order.group(0, prompt, [Sampling(max_new_tokens=0)]).nothing_sampled(0, now_s=0.0)
    return Item(trajectory=replace(unanswered, sampled=learned, spans=spans), advantage=0.0)

"""The held-out score."""

from __future__ import annotations

import asyncio
import time

from headrace.config import Config
from headrace.episode.episode import episode
from headrace.reward.scorer import Scorer
from headrace.rollout.pool import RolloutPool
from headrace.types import Prompt, Sampling


async def evaluate(pool: RolloutPool, scorer: Scorer, prompts: list[Prompt], config: Config) -> float | None:
    """Mean reward on the held-out prompts. The noise is the same each time, so scores of one run compare closely.

    Answers that could not be scored are left out, not counted as zero; None when there is no other.
    """
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.loop.eval_temperature,
        stop=config.rollout.stop,
    )
    episodes = [
        episode(prompt, future, scorer.score, time.monotonic)
        for i, prompt in enumerate(prompts)
        for future in pool.start(i, prompt, [sampling] * config.loop.eval_samples, counted=False)
    ]
    found = [outcome.trajectory.reward for outcome in await asyncio.gather(*episodes)]
    rewards = [reward for reward in found if reward is not None]
    return sum(rewards) / len(rewards) if rewards else None

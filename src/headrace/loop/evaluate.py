"""The held-out score."""

from __future__ import annotations

import asyncio

from headrace.config import Config
from headrace.reward.scorer import Scorer
from headrace.rollout.rollouts import Rollouts
from headrace.types import Completion, Prompt, Sampling, Trajectory


async def evaluate(actor: Rollouts, scorer: Scorer, prompts: list[Prompt], config: Config) -> float | None:
    """Mean reward on the held-out prompts. The noise is the same each time, so scores of one run compare closely.

    Answers that could not be scored are left out, not counted as zero; None when there is no other.
    """
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.loop.eval_temperature,
        stop=config.rollout.stop,
    )

    async def one(prompt: Prompt, future: asyncio.Future[Trajectory]) -> float | None:
        trajectory = await future
        return (await scorer.score(Completion.of(prompt, trajectory))).reward

    answers = [
        one(prompt, future)
        for i, prompt in enumerate(prompts)
        for future in actor.start(i, prompt, [sampling] * config.loop.eval_samples, counted=False)
    ]
    rewards = [reward for reward in await asyncio.gather(*answers) if reward is not None]
    return sum(rewards) / len(rewards) if rewards else None

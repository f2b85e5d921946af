"""One episode: a prompt, a sampler and a judge in, a finished trajectory out.

The loop, evaluation and the self-check know nothing else of how an answer comes about. Here it is a single turn: the
policy answers the prompt once, and the answer is scored. Sampled tokens may lie anywhere in the trajectory, in several
pieces; nothing outside of this room relies on where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from headrace.types import Completion, DropReason, FinishReason, Outcome, Prompt, Score, Trajectory


async def episode(
    prompt: Prompt,
    sampled: Awaitable[Trajectory],
    score: Callable[[Completion], Awaitable[Score]],
    now: Callable[[], float],
) -> Outcome:
    """The outcome of one answer to `prompt`.

    `sampled` is a generation that is queued already: all answers of a group are, together, before the engine's next
    step. What was aborted is not scored; a reward that could not be had is a failure, never a zero.
    """
    trajectory = await sampled
    if trajectory.finish is FinishReason.ABORT:
        return Outcome(trajectory=trajectory, failure=DropReason.STALE)
    found = await score(Completion.of(prompt, trajectory))
    if found.failure is not None:
        return Outcome(trajectory=trajectory, failure=found.failure, detail=found.detail)
    timing = replace(trajectory.timing, scored_s=now())
    return Outcome(trajectory=replace(trajectory, reward=found.reward, reward_parts=found.parts, timing=timing))

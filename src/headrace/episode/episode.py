"""One episode: from a prompt to a finished trajectory with its reward.

The loop and evaluation know nothing else of how an answer comes about. Here it is a single turn:
the policy answers once, and the answer is scored. In a trajectory, sampled tokens may lie anywhere
and in several pieces; nothing outside this room relies on where.
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
    """The outcome of one answer to `prompt`; `sampled` is its generation, queued by the caller.

    An aborted answer is not scored. A reward that cannot be computed is a failure, never a zero.
    """
    trajectory = await sampled
    if trajectory.finish is FinishReason.ABORT:
        return Outcome(trajectory=trajectory, failure=DropReason.STALE)
    found = await score(Completion.of(prompt, trajectory))
    if found.failure is not None:
        return Outcome(trajectory=trajectory, failure=found.failure, detail=found.detail)
    timing = replace(trajectory.timing, scored_s=now())
    scored = replace(trajectory, reward=found.reward, reward_parts=found.parts, timing=timing)
    return Outcome(trajectory=scored)

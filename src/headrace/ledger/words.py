"""What the books' short words mean, for readers: what became of a trajectory, why it was dropped, how it ended."""

from __future__ import annotations

from headrace.ledger.show import TrajectoryDetails
from headrace.types import DropReason, FinishReason

DROP_WORDS = {
    DropReason.STALE: "the policy had moved more than loop.max_lag versions on before it could be trained on",
    DropReason.NO_SIGNAL: "all answers of its group got the same reward, so none was better than another",
    DropReason.OVERLONG: "it was cut before its end, and buffer.drop_overlong leaves such answers out",
    DropReason.REWARD_TIMEOUT: "the reward function gave no verdict within reward.timeout_s",
    DropReason.REWARD_ERROR: "the reward function raised an error, or returned something that is no reward",
    DropReason.REWARD_UNAVAILABLE: "what the reward function needs could not be reached, reward.retries times",
    DropReason.INCOMPLETE: "fewer than two answers of its group were left, and one alone cannot be compared",
    DropReason.SKIPPED_STEP: "the gradient of its step was not finite, so the weights stayed as they were",
    DropReason.RUN_ENDED: "the run was over before it could be trained on",
    DropReason.REDONE: "a process died, and this had to be generated again; a later attempt counts",
    DropReason.CRASHED: "it was lost with a process that died, and recovery.in_flight = drop leaves its prompt out",
}
FINISH_WORDS = {
    FinishReason.EOS: "the policy ended it",
    FinishReason.STOP: "at a stop string",
    FinishReason.LENGTH: "cut at rollout.max_new_tokens",
    FinishReason.WALL: "cut at rollout.max_wall_s",
    FinishReason.ABORT: "ended before its time",
}


def fate(found: TrajectoryDetails) -> str:
    """What became of a trajectory, and when."""
    if found.state == "trained":
        return f"trained on in step {found.step} with lag {found.lag}"
    if found.state == "buffered":
        return "complete and scored; waits in the buffer to be trained on"
    reason = str(found.drop_reason)
    return f"dropped as {reason} after step {found.step}, with lag {found.lag}: {why_dropped(reason)}"


def why_dropped(reason: str) -> str:
    """The reason in a sentence."""
    if reason.startswith("filter:"):
        return f"your filter {reason.removeprefix('filter:')} said no"
    return DROP_WORDS[DropReason(reason)] if reason in DROP_WORDS else "a reason that this version does not know"

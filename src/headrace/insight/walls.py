"""The seven walls: what can hold a run back, how one sees it, and what helps, in this system's own settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Wall(StrEnum):
    """What binds."""

    GENERATION = "generation"
    SYNC = "weight sync"
    LEARNER = "learner"
    REWARD = "reward latency"
    TAIL = "long tail"
    SPARSE = "sparse reward"
    OBSERVABILITY = "agent observability"


WALL_OF_STAGE = {
    "rollout": Wall.GENERATION,
    "reward": Wall.REWARD,
    "reference": Wall.LEARNER,
    "train": Wall.LEARNER,
    "publish": Wall.SYNC,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a wall looks like and what to try, the first first.

    Example:
        Advice(sign="the learner waits while few answers are still being decoded", moves=("loop.max_lag=1: ...",))
    """

    sign: str
    moves: tuple[str, ...]


ADVICE = {
    Wall.GENERATION: Advice(
        sign="decoding takes most of the step: the engine is busy, the learner waits for it",
        moves=(
            "more sequences at a time (rollout.max_running), if memory for their cache is left",
            "rollout.speculate=8, where answers repeat their prompt, each other or earlier epochs",
            "one version of lag (loop.max_lag=1), so that training hides behind generation",
            "more or faster devices for generation",
        ),
    ),
    Wall.SYNC: Advice(
        sign="new weights reach the engines slowly: publishing takes a large part of every step",
        moves=(
            "engine and learner on the same devices, where both fit: publishing is then free",
            "send what changed instead of everything, or an adapter",
            "more prompts per step (loop.groups_per_step), so that there are fewer versions to publish",
            "nodes that pass the weights on, so that the learner sends them once",
        ),
    ),
    Wall.LEARNER: Advice(
        sign="the gradient takes most of the step: engines wait for new weights",
        moves=(
            "fuller passes (learner.micro_batch_tokens), as far as memory goes",
            "no recomputed activations (learner.checkpoint_activations=false), if memory is left",
            "one version of lag (loop.max_lag=1), so that generation hides behind training",
            "more devices for the learner",
        ),
    ),
    Wall.REWARD: Advice(
        sign="finished answers wait for their verdicts, and the devices with them",
        moves=(
            "more processes that score (reward.workers)",
            "one version of lag (loop.max_lag=1 or more), so that the devices work meanwhile",
            "an async reward function, when it waits for a network rather than computes",
            "a shorter reward.timeout_s, if a few verdicts take much longer than the others",
        ),
    ),
    Wall.TAIL: Advice(
        sign="most answers are done, and a few long ones keep everybody waiting",
        moves=(
            "lag (loop.max_lag=2 or more): others are generated beside the long ones, and training does not wait",
            "a limit on the time of one answer (rollout.max_wall_s) with rollout.on_wall='park': it goes on later",
            "a lower rollout.max_new_tokens, with reward.overlong_tokens so that the policy learns to be brief",
        ),
    ),
    Wall.SPARSE: Advice(
        sign="most groups are dropped because all their answers got the same reward",
        moves=(
            "easier prompts first, or prompts filtered by how often they are solved (buffer.filters)",
            "more answers per prompt (rollout.samples), so that one of them succeeds",
            "a reward with parts, that tells half-right answers from wrong ones",
        ),
    ),
    Wall.OBSERVABILITY: Advice(
        sign="trajectories cannot be rebuilt: tokens, log-probs or versions are missing",
        moves=("generate through this system's engine: it records all of them where they are sampled",),
    ),
}

"""The plan page's arithmetic: five stage times, what a step takes in each placement, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.insight.equation import PLACEMENT_WORDS, SYMBOLS, Placement, binding_stage, step_s
from headrace.types import STAGES, StageTimes

EXAMPLE = StageTimes(rollout=30.0, reward=0.0, reference=3.0, train=8.0, publish=1.0)
STAGE_FIXES = {
    "rollout": "more or faster machines for generation, shorter answers, or speculation",
    "reward": "more reward workers, a faster reward function, or a cache of its verdicts",
    "reference": "leave the reference out (learner.kl_coef = 0), or compute it on machines of its own",
    "train": "more or faster machines for the learner, or fewer tokens in a step",
    "publish": "send less (deltas, adapters) or faster, or publish while generation goes on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change, and the step time after it.

    Example:
        Move(says="Make rollout twice as fast: ...", step_s=19.0)
    """

    says: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What five stage times come to; `moves` are the changes that help, the best first.

    Example:
        Prediction(step_s={Placement.COLOCATED: 42.0, ...}, wall="rollout", wall_share=0.71, moves=[Move(...)])
    """

    step_s: Mapping[Placement, float]
    wall: str
    wall_share: float  # of the step, in the placement that was asked about
    moves: list[Move]


def predict(times: StageTimes, placement: Placement, hidden_share: float = 0.5) -> Prediction:
    """What these times come to now, and which change would help most.

    `hidden_share` is how much of the shorter side streaming hides: half is between groups that all end together (none)
    and groups that end at even intervals (nearly all).
    """

    def seconds(changed: StageTimes, where: Placement) -> float:
        return step_s(changed, where, hidden_share=hidden_share)

    now_s, wall = seconds(times, placement), binding_stage(times, placement, hidden_share=hidden_share)
    moves = [
        Move(
            says=f"Make {stage} ({SYMBOLS[stage]}) twice as fast: {STAGE_FIXES[stage]}.",
            step_s=seconds(replace(times, **{stage: getattr(times, stage) / 2}), placement),
        )
        for stage in STAGES
    ]
    moves += [
        Move(says=f"Change the placement to {where}: {PLACEMENT_WORDS[where]}.", step_s=seconds(times, where))
        for where in Placement
        if where is not placement
    ]
    helpful = sorted((move for move in moves if move.step_s < 0.99 * now_s), key=lambda move: move.step_s)
    return Prediction(
        step_s={where: seconds(times, where) for where in Placement},
        wall=wall,
        wall_share=getattr(times, wall) / now_s if now_s else 0.0,
        moves=helpful,
    )

"""What comes of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.types import STAGES, StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step.

    Example:
        SimulatedStep(wall_s=34.0, stage_s=StageTimes(rollout=30.0, reference=3.0, train=8.0, publish=1.0),
            trained_tokens=120000, lags={0: 20000, 1: 100000}, buffered_groups=12)
    """

    wall_s: float
    stage_s: StageTimes
    trained_tokens: int
    lags: Mapping[int, int]  # trained tokens by lag
    buffered_groups: int  # at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of a simulated run. Means leave out the steps in which the pipeline fills; the books have everything.

    Example:
        Simulated(max_lag=1, steps=(SimulatedStep(...), ...), num_filling=2, wall_s=690.0, rollout_busy=0.97,
            learner_busy=0.24, reward_busy=0.1, generated_tokens=2600000, trained_tokens=2400000,
            dropped_tokens={"no_signal": 120000}, buffered_tokens=60000, in_flight_tokens=20000, num_failures=0)
    """

    max_lag: int
    steps: tuple[SimulatedStep, ...]
    num_filling: int  # steps at the start that are in no mean
    wall_s: float
    rollout_busy: float  # share of its workers' seconds; of what is colocated, rollout and learner share one device
    learner_busy: float
    reward_busy: float  # NaN where there is a worker for every answer
    generated_tokens: int
    trained_tokens: int
    dropped_tokens: Mapping[str, int]
    buffered_tokens: int
    in_flight_tokens: int
    num_failures: int

    @property
    def counted(self) -> tuple[SimulatedStep, ...]:
        """The steps that means are over."""
        return self.steps[self.num_filling :]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(np.mean([step.wall_s for step in self.counted]))

    def step_quantile_s(self, share: float) -> float:
        """Seconds that such a share of the steps stays below."""
        return float(np.quantile([step.wall_s for step in self.counted], share))

    @property
    def stage_s(self) -> StageTimes:
        """Mean seconds that each stage is busy in a step."""
        means = {stage: float(np.mean([getattr(s.stage_s, stage) for s in self.counted])) for stage in STAGES}
        return StageTimes(**means)

    @property
    def goodput(self) -> float:
        """Trained tokens per second."""
        return sum(step.trained_tokens for step in self.counted) / sum(step.wall_s for step in self.counted)

    @property
    def lag_shares(self) -> dict[int, float]:
        """Share of the trained tokens with each lag."""
        tokens: Counter[int] = Counter()
        for step in self.counted:
            tokens.update(step.lags)
        return {lag: tokens[lag] / tokens.total() for lag in sorted(tokens)}

    @property
    def lag_mean(self) -> float:
        """Over trained tokens."""
        return sum(lag * share for lag, share in self.lag_shares.items())

    @property
    def lag_max(self) -> int:
        """Of any trained token."""
        return max((lag for step in self.steps for lag in step.lags), default=0)

    @property
    def useful_share(self) -> float:
        """Trained tokens, of those that were trained on or dropped."""
        return self.trained_tokens / max(1, self.trained_tokens + sum(self.dropped_tokens.values()))

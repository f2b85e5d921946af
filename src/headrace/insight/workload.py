"""What a simulation is told: what a step consists of, and how long things take on which machines.

Nothing here was measured; the numbers come from a run's ledger (calibration.py), from a model of the hardware, or from
whoever asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.insight.tails import LogNormal

Numbers = npt.NDArray[np.float64]

_Z95 = 1.6448536269514722  # of the normal distribution, 95 in 100 lie below so many standard deviations
_LARGEST_RATIO = math.exp(_Z95**2 / 2)  # of a log-normal's p95 to its mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Numbers around a mean, log-normal: `cv` is their standard deviation over the mean, 0 for always the mean.

    What is drawn above `cap` is cut to it, so a cap lowers the mean of what is drawn.

    Example:
        Drawn(mean=4096.0, cv=1.0, cap=32768.0)
    """

    mean: float
    cv: float = 0.0
    cap: float = math.inf

    @classmethod
    def of_p95(cls, mean: float, p95: float) -> Drawn:
        """With 95 in 100 numbers below `p95`."""
        if not 0 < mean <= p95 <= mean * _LARGEST_RATIO:
            raise ConfigError(
                f"a log-normal with mean {mean:g} has its p95 between {mean:g} and {mean * _LARGEST_RATIO:g}; "
                f"{p95:g} is not"
            )
        sigma = _Z95 - math.sqrt(max(0.0, _Z95**2 - 2 * math.log(p95 / mean)))
        return cls(mean=mean, cv=math.sqrt(math.expm1(sigma**2)))

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        """So many of them."""
        if self.cv == 0 or self.mean == 0:
            return np.full(count, min(self.mean, self.cap))
        return LogNormal(self.mean, self.cv, self.cap).sample(rng, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Numbers that were seen, group by group: answers to one prompt are alike, and they are drawn together.

    Example:
        Recorded(groups=(np.array([212.0, 198.0]), np.array([31.0, 40.0])))
    """

    groups: tuple[Numbers, ...]

    @property
    def mean(self) -> float:
        """Over all numbers."""
        return float(np.concatenate(self.groups).mean())

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        """So many numbers of one group; some of them twice if it has fewer."""
        group = self.groups[int(rng.integers(len(self.groups)))]
        return group if len(group) == count else rng.choice(group, count, replace=count > len(group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step consists of.

    Example:
        Workload(groups_per_step=512, samples=16, tokens=Drawn(mean=4096.0, cv=1.0, cap=32768.0),
            reward_s=Drawn.of_p95(1.0, 4.0), prompt_tokens=512.0, no_signal_share=0.3)
    """

    groups_per_step: int
    samples: int
    tokens: Drawn | Recorded  # that an answer has
    reward_s: Drawn | Recorded = Drawn(mean=0.0)  # that a verdict takes, once a reward worker has the answer
    prompt_tokens: float = 0.0
    no_signal_share: float = 0.0  # of the groups: all their rewards are equal, so they are dropped
    max_new_tokens: int = 0  # answers of so many tokens were cut; 0: none is
    drop_overlong: bool = False  # as buffer.drop_overlong
    min_share: float = 1.0  # as buffer.min_share

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.samples < 1:
            raise ConfigError(f"a step of {self.groups_per_step} groups with {self.samples} answers trains on nothing")
        if not 0 <= self.no_signal_share < 1:
            raise ConfigError(
                f"the share of groups without signal is {self.no_signal_share:g}; it lies between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Who does the work, and how fast.

    A rollout worker is one engine, on one or more GPUs; the learner is one pool that works as one. With `colocated`
    they take turns on the same devices, as in one process; else they are apart. With `batchwise` generation goes batch
    by batch: the next one begins when the last answer of this one is scored. Else free rows are filled at once.

    Example:
        Cluster(rollout_workers=96, rows_per_worker=256, decode_s=0.02, decode_row_s=5e-5, prefill_token_s=1e-5,
            train_token_s=2e-7, optimizer_s=0.5, publish_s=2.0, publish="relay", pull_s=0.4, reward_workers=64)
    """

    rollout_workers: int
    rows_per_worker: int
    decode_s: float  # of one decode step, whatever its batch
    decode_row_s: float = 0.0  # on top, for each row of the batch
    prefill_s: float = 0.0  # of a group's prompt, which is computed once
    prefill_token_s: float = 0.0  # on top, for each of its tokens
    train_token_s: float = 0.0  # forward and backward, of the whole learner, prompt tokens too
    train_pass_s: float = 0.0  # on top, for each micro-batch
    pass_tokens: int = 0  # of a micro-batch of the whole learner; 0: each group is one
    optimizer_s: float = 0.0
    reference_token_s: float = 0.0
    reference_on: Literal["learner", "rollout", "own"] = "learner"  # whose time the reference policy takes
    publish_s: float = 0.0
    publish: Literal["exposed", "overlapped", "relay"] = "exposed"  # the others: beside generation and training
    pull_s: float = 0.0  # relay: each worker stops for so long to load what lies near it
    reward_workers: int = 0  # 0: as many as there are answers
    host_s: float = 0.0  # of the loop itself, each step, while the learner waits
    colocated: bool = False
    batchwise: bool = False
    straggler_share: float = 0.0  # of the workers
    straggler_factor: float = 1.0  # that those are slower by
    worker_mtbf_s: float = math.inf  # mean time between failures of one worker; its answers are started again
    repair_s: float = 0.0
    repack_below: float = (
        0.0  # a worker with so small a share of its rows left, and none waiting, gives them to another
    )
    repack_s: float = 0.0  # for which the other one stops

    def __post_init__(self) -> None:
        if self.rollout_workers < 1 or self.rows_per_worker < 1:
            raise ConfigError(
                f"{self.rollout_workers} rollout workers with {self.rows_per_worker} rows each generate nothing"
            )
        if self.decode_s < 0 or self.decode_row_s < 0 or self.decode_s + self.decode_row_s <= 0:
            raise ConfigError(
                f"a decode step takes {self.decode_s:g} s and {self.decode_row_s:g} s for each row; it takes some time"
            )

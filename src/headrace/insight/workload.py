"""What a simulation is told: what a step consists of, and how long things take on which machines.

Lengths of a policy's answers are close to log-normal, and long tails cost time: who waits for a
whole group waits for the longest of K answers, who waits for a whole batch for the longest of B·K.
The maximum of n log-normal lengths is computed from its definition, E[max] = ∫ (1 - F(x)^n) dx.
(The often quoted mean·exp(s·√(2 ln n) - s²/2) is 1.2 to 1.65 times too long at the sizes in use.)
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from headrace.errors import ConfigError
from headrace.runs.columns import Numbers

# Φ(-9) is 1e-19, and 13 beyond the peak of x·(1 - F) nothing is left even of n = 10^7 answers
LOWEST_Z, Z_ABOVE_SIGMA, NUM_CELLS = -9.0, 13.0, 4000
_Z95 = 1.6448536269514722  # 95 in 100 normally distributed numbers are below this
LEAST_SHARED = 32  # tokens of a prompt that are computed once for its group: learner/tree.py
_LARGEST_RATIO = math.exp(_Z95**2 / 2)  # of a log-normal's p95 to its mean


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Numbers with this mean and coefficient of variation (standard deviation / mean).

    What is above `cap` is cut to it: `mean` and `cv` are before the cut, `cut_mean` is after it.
    """

    mean: float
    cv: float = 0.0
    cap: float = math.inf  # max_new_tokens

    def __post_init__(self) -> None:
        if not (0.0 <= self.mean < math.inf and 0.0 <= self.cv < math.inf and self.cap > 0.0):
            given = f"mean {self.mean:g}, cv {self.cv:g}, cap {self.cap:g}"
            raise ConfigError(f"{given}: mean and cv are numbers of at least 0, and a cap is above 0")

    @classmethod
    def of_p95(cls, mean: float, p95: float) -> "LogNormal":
        """With 95 in 100 numbers below `p95`; 0 says nothing of it, and a mean of 0 stands for half of it."""
        mean = mean or p95 / 2
        if not p95:
            return cls(mean)
        if not 0 < mean <= p95 <= mean * _LARGEST_RATIO:
            between = f"between {mean:g} and {mean * _LARGEST_RATIO:g}"
            raise ConfigError(f"a log-normal with mean {mean:g} has its p95 {between}; {p95:g} is not")
        sigma = _Z95 - math.sqrt(max(0.0, _Z95**2 - 2 * math.log(p95 / mean)))
        return cls(mean=mean, cv=math.sqrt(math.expm1(sigma**2)))

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm, s = √ln(1 + cv²)."""
        return math.sqrt(math.log1p(self.cv**2))

    @property
    def mu(self) -> float:
        return math.log(self.mean) - self.sigma**2 / 2

    @property
    def cut_mean(self) -> float:
        return self.expected_max(1)

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        if self.cv == 0 or self.mean == 0:
            return np.full(count, min(self.mean, self.cap))
        return np.minimum(rng.lognormal(self.mu, self.sigma, count), self.cap)

    @lru_cache(maxsize=1024)  # noqa: B019  a planner asks for the same few again and again
    def expected_max(self, n: int) -> float:
        """Mean of the largest of `n`: ∫ (1 - Φ(z)^n) dx, x = exp(mu + sigma·z), up to the cap."""
        if self.cv == 0.0 or self.mean == 0.0:
            return min(self.mean, self.cap)
        start = math.exp(self.mu + self.sigma * LOWEST_Z)  # below it 1 - Φ^n is 1
        if self.cap <= start:
            return self.cap
        highest_z = min(self.sigma + Z_ABOVE_SIGMA, (math.log(self.cap) - self.mu) / self.sigma)
        z = np.linspace(LOWEST_Z, highest_z, NUM_CELLS + 1)
        beyond = np.array([math.erfc(abs(x) / math.sqrt(2)) / 2 for x in z])
        log_cdf = np.where(z > 0, np.log1p(-beyond), np.log(beyond))  # exact at both ends
        y = -np.expm1(n * log_cdf) * self.sigma * np.exp(self.mu + self.sigma * z)
        simpson = float(y[0] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum() + y[-1])
        return start + simpson * float(z[1] - z[0]) / 3

    def tail(self, n: int) -> float:
        return self.expected_max(n) / self.cut_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Numbers that were seen, by group: answers to one prompt are alike and are drawn together."""

    groups: tuple[Numbers, ...]

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.groups).mean())

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        """`count` numbers of one group; some of them twice if it has fewer."""
        group = self.groups[int(rng.integers(len(self.groups)))]
        return group if len(group) == count else rng.choice(group, count, replace=count > len(group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step consists of."""

    groups_per_step: int
    samples: int
    first: int = 0  # as buffer.first
    tokens: LogNormal | Recorded  # that an answer has
    reward_s: LogNormal | Recorded = LogNormal(mean=0.0)  # that a worker takes for a verdict
    environment_s: float = 0.0  # that an episode waits for environment or agent, in all its turns; no row is taken
    prompt_tokens: float = 0.0
    no_signal_share: float = 0.0  # of the groups: all their rewards are equal, so they are dropped
    max_new_tokens: int = 0  # answers of this length were cut; 0: none is
    drop_overlong: bool = False  # as buffer.drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Who does the work, and how fast.

    A rollout worker is one engine, on one or more GPUs; the learner is one pool that works as one.
    With `colocated` they take turns on the same devices, as in one process. With `batchwise` the
    next batch of answers begins when all of this one are scored; else free rows are filled.
    """

    rollout_workers: int
    rows_per_worker: int
    decode_s: float  # of one decode step, whatever its batch
    decode_row_s: float = 0.0  # on top, for each row of the batch
    context_s: float = 0.0  # on top, for each token that these rows have, prompt and sampled
    prefill_s: float = 0.0  # of a group's prompt, which is computed once
    prefill_token_s: float = 0.0  # on top, for each of its tokens
    train_token_s: float = 0.0  # forward and backward, of the whole learner, prompt tokens too
    train_pass_s: float = 0.0  # on top, for each micro-batch
    pass_tokens: int = 0  # of a micro-batch of the whole learner; 0: each group is one
    optimizer_s: float = 0.0
    reference_token_s: float = 0.0  # of the learner's time
    publish_s: float = 0.0  # for which no group starts; colocated, of the learner's and the engine's time
    reward_workers: int = 0  # 0: as many as there are answers
    host_s: float = 0.0  # of the loop itself, each step, while the learner waits
    colocated: bool = False
    batchwise: bool = False
    straggler_share: float = 0.0  # of the workers
    straggler_factor: float = 1.0  # that those are slower by
    worker_mtbf_s: float = math.inf  # mean time between its failures; answers start again
    repair_s: float = 0.0  # until it is back

    def __post_init__(self) -> None:
        step_s, row_s = self.decode_s, self.decode_row_s
        if step_s < 0 or row_s < 0 or step_s + row_s <= 0:
            takes = f"{step_s:g} s and {row_s:g} s for each row"
            raise ConfigError(f"a decode step takes {takes}; it takes some time")

    def times(self, factor: float, *names: str) -> "Machine":
        """With these of its seconds `factor` times as long."""
        return replace(self, **{name: factor * getattr(self, name) for name in names})

"""Long tails: how much longer the longest of n answers is than the average one.

Who waits for a whole group waits for the longest of K answers, who waits for a whole batch for the longest of B·K. The
lengths of a policy's answers are close to log-normal, and the maximum of n log-normal lengths is computed here from its
definition, E[max] = ∫ (1 - F(x)^n) dx, with x laid out by its logarithm. The closed form that is often quoted,
mean·exp(s·√(2 ln n) - s²/2), puts an asymptote where a quantile belongs and is 1.2 to 1.65 times too long at the sizes
in use; it is here so that its numbers can be recognised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.insight.checks import check_above, check_at_least

NORMAL = NormalDist()
LOWEST_Z, Z_ABOVE_SIGMA, NUM_CELLS = -9.0, 13.0, 4000
"""Φ(-9) is 1e-19, and 13 beyond the point where x·(1 - F) peaks nothing is left even of n = 10^7 answers."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths with this mean and coefficient of variation (standard deviation / mean), cut at `cap`.

    `mean` and `cv` are those before the cut; `cut_mean` is what is left of the mean.

    Example:
        LogNormal(mean=800, cv=1.0, cap=4096)
    """

    mean: float
    cv: float
    cap: float = math.inf  # max_new_tokens

    def __post_init__(self) -> None:
        check_above(0.0, mean=self.mean)
        check_at_least(0.0, cv=self.cv)
        if not self.cap > 0.0:
            raise ConfigError(f"cap is {self.cap:g}; no answer can be that short")

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm, s = √ln(1 + cv²)."""
        return math.sqrt(math.log1p(self.cv**2))

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        return math.log(self.mean) - self.sigma**2 / 2

    @property
    def cut_mean(self) -> float:
        """Mean length after the cut."""
        return self.expected_max(1)

    def quantile(self, share: float) -> float:
        """The length that `share` of the answers do not exceed."""
        return min(self.cap, math.exp(self.mu + self.sigma * NORMAL.inv_cdf(share)))

    def sample(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        """`n` lengths, not rounded."""
        return np.minimum(rng.lognormal(self.mu, self.sigma, n), self.cap)

    def expected_max(self, n: int) -> float:
        """Mean of the longest of `n`: ∫ (1 - Φ(z)^n) dx over x = exp(mu + sigma·z), from 0 to the cap."""
        check_at_least(1, n=n)
        return _expected_max(self, n)

    def median_max(self, n: int) -> float:
        """Median of the longest of `n`: the length that one answer exceeds with probability 1 - 2^(-1/n)."""
        check_at_least(1, n=n)
        z = -NORMAL.inv_cdf(-math.expm1(-math.log(2) / n))
        return min(self.cap, math.exp(self.mu + self.sigma * z))

    def closed_form_max(self, n: int) -> float:
        """The popular estimate of `expected_max`, which knows no cap."""
        check_at_least(1, n=n)
        return self.mean * math.exp(self.sigma * math.sqrt(2 * math.log(n)) - self.sigma**2 / 2)

    def tail(self, n: int) -> float:
        """The longest of `n` over the average: M in the staleness formulas, for a group with n = K."""
        return self.expected_max(n) / self.cut_mean


@lru_cache(maxsize=1024)  # a planner asks for the same few again and again
def _expected_max(lengths: LogNormal, n: int) -> float:
    if lengths.cv == 0.0:
        return min(lengths.mean, lengths.cap)
    start = math.exp(lengths.mu + lengths.sigma * LOWEST_Z)  # below it 1 - Φ^n is 1
    if lengths.cap <= start:
        return lengths.cap
    highest_z = min(lengths.sigma + Z_ABOVE_SIGMA, (math.log(lengths.cap) - lengths.mu) / lengths.sigma)
    z = np.linspace(LOWEST_Z, highest_z, NUM_CELLS + 1)
    longer = -np.expm1(n * _log_cdf(z)) * lengths.sigma * np.exp(lengths.mu + lengths.sigma * z)
    return start + _simpson(longer, float(z[1] - z[0]))


def _log_cdf(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """ln Φ(z), with all its digits at both ends."""
    beyond = np.array([math.erfc(abs(x) / math.sqrt(2)) / 2 for x in z])
    logarithm: npt.NDArray[np.float64] = np.where(z > 0, np.log1p(-beyond), np.log(beyond))
    return logarithm


def _simpson(values: npt.NDArray[np.float64], width: float) -> float:
    return float(values[0] + 4 * values[1:-1:2].sum() + 2 * values[2:-1:2].sum() + values[-1]) * width / 3

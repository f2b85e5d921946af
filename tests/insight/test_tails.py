from __future__ import annotations

import math
import time
from statistics import NormalDist

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.insight.workload import LogNormal

PHI = NormalDist().cdf


def test_one_answer_has_the_mean_length():
    lengths = LogNormal(800, 1.0)
    assert lengths.expected_max(1) == pytest.approx(800, rel=1e-9)


@pytest.mark.parametrize("cv", [0.01, 0.5, 1.0, 3.0, 30.0])
def test_the_longer_of_two_by_its_closed_form(cv: float):
    """E[max(X, Y)] of two log-normals is 2 mean Φ(s / √2)."""
    exact = 2 * PHI(math.sqrt(math.log1p(cv**2) / 2))
    assert LogNormal(1.0, cv).expected_max(2) == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize(
    ("cv", "n", "expected"),
    [
        (0.5, 16, 2.13),  # mean 1
        (0.5, 1024, 4.21),
        (1.0, 16, 3.43),
        (1.0, 64, 5.37),
        (1.0, 1024, 11.07),
        (2.0, 256, 18.6),
    ],
)
def test_known_maxima(cv: float, n: int, expected: float):
    lengths = LogNormal(1.0, cv)
    assert lengths.expected_max(n) == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize("n", [1, 100, 10_000, 10_000_000])
def test_the_integral_agrees_with_the_quantiles_of_the_maximum(n: int):
    """The maximum's median is Q(e^(-t/n)) at t = ln 2; its mean is the mean of that over all t ~ Exp(1)."""
    lengths = LogNormal(700, 1.0)
    shares = (np.arange(20_000) + 0.5) / 20_000
    z = [-NormalDist().inv_cdf(-math.expm1(math.log(share) / n)) for share in shares]
    mean = np.exp(lengths.mu + lengths.sigma * np.array(z)).mean()
    assert lengths.expected_max(n) == pytest.approx(mean, rel=2e-3)


def test_ten_million_answers_take_milliseconds():
    start = time.perf_counter()
    longest = [LogNormal(8000, 1.0).expected_max(n) for n in (10**6, 10**7)]
    assert time.perf_counter() - start < 0.5
    assert 8000 * 30 < longest[0] < longest[1] < 8000 * 80


def test_a_cap_bounds_the_maximum_and_takes_from_the_mean():
    free, capped = LogNormal(800, 1.0), LogNormal(800, 1.0, cap=2000)
    # E[min(X, c)] = mean Φ((ln c - mu - s^2) / s) + c (1 - Φ((ln c - mu) / s))
    z = (math.log(2000) - free.mu) / free.sigma
    assert capped.cut_mean == pytest.approx(800 * PHI(z - free.sigma) + 2000 * (1 - PHI(z)), rel=1e-8)
    assert capped.expected_max(10_000) == pytest.approx(2000, rel=1e-6)
    assert LogNormal(800, 1.0, cap=1e-9).expected_max(16) == 1e-9


def test_samples_have_the_mean_the_spread_and_the_maximum():
    lengths = LogNormal(800, 0.5, cap=1600)
    drawn = lengths.draw(np.random.default_rng(0), 160_000)
    assert drawn.mean() == pytest.approx(lengths.cut_mean, rel=0.01)
    assert drawn.reshape(-1, 8).max(axis=1).mean() == pytest.approx(lengths.expected_max(8), rel=0.01)
    assert drawn.max() == 1600


def test_equal_lengths_have_no_tail():
    assert LogNormal(800, 0.0).expected_max(1000) == 800
    assert LogNormal(800, 0.0, cap=500).tail(64) == 1.0


def test_the_tail_is_the_longest_over_the_average():
    assert LogNormal(123, 1.0).tail(16) == pytest.approx(3.435, abs=0.001)


@pytest.mark.parametrize(
    ("mean", "cv", "cap"), [(-5, 1, 10), (math.inf, 1, 10), (5, -1, 10), (math.nan, 1, 10), (5, 1, 0)]
)
def test_lengths_that_cannot_be_are_refused(mean: float, cv: float, cap: float):
    with pytest.raises(ConfigError, match="mean and cv are numbers of at least 0"):
        LogNormal(mean, cv, cap=cap)

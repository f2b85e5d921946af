from __future__ import annotations

import math
import time
from statistics import NormalDist

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.insight.tails import LogNormal

PHI = NormalDist().cdf


def test_one_answer_has_the_mean_length():
    lengths = LogNormal(800, 1.0)
    assert lengths.expected_max(1) == pytest.approx(800, rel=1e-9)
    # the median of a log-normal is mean / sqrt(1 + cv^2)
    assert lengths.median_max(1) == pytest.approx(800 / math.sqrt(2))


@pytest.mark.parametrize("cv", [0.01, 0.5, 1.0, 3.0, 30.0])
def test_the_longer_of_two_by_its_closed_form(cv: float):
    """E[max(X, Y)] of two log-normals is 2 mean Φ(s / √2)."""
    exact = 2 * PHI(math.sqrt(math.log1p(cv**2) / 2))
    assert LogNormal(1.0, cv).expected_max(2) == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize(
    ("cv", "n", "closed_form", "expected", "median"),
    [
        # mean 1: exp(s sqrt(2 ln n) - s^2 / 2) with s = sqrt(ln(1 + cv^2)); the integral; exp(s z - s^2 / 2) with
        # Φ(z) = 2^(-1/n). For cv = 1, n = 16: s = 0.8326, exp(0.8326 * 2.3548 - 0.3466) = 5.02.
        (0.5, 16, 2.72, 2.13, 2.02),
        (0.5, 1024, 5.19, 4.21, 4.06),
        (1.0, 16, 5.02, 3.43, 2.97),
        (1.0, 64, 7.80, 5.37, 4.79),
        (1.0, 1024, 15.69, 11.07, 10.19),
        (2.0, 256, 30.6, 18.6, 15.2),
    ],
)
def test_known_maxima(cv: float, n: int, closed_form: float, expected: float, median: float):
    lengths = LogNormal(1.0, cv)
    assert lengths.closed_form_max(n) == pytest.approx(closed_form, rel=0.003)
    assert lengths.expected_max(n) == pytest.approx(expected, rel=0.003)
    assert lengths.median_max(n) == pytest.approx(median, rel=0.003)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("n", [16, 64, 256, 1024])
def test_the_closed_form_overshoots(cv: float, n: int):
    lengths = LogNormal(500, cv)
    assert 1.2 < lengths.closed_form_max(n) / lengths.expected_max(n) < 1.66


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
    assert capped.median_max(10_000) == 2000
    assert capped.quantile(0.99) == 2000
    assert LogNormal(800, 1.0, cap=1e-9).expected_max(16) == 1e-9


def test_samples_have_the_mean_the_spread_and_the_maximum():
    lengths = LogNormal(800, 0.5, cap=1600)
    drawn = lengths.sample(np.random.default_rng(0), 160_000)
    assert drawn.mean() == pytest.approx(lengths.cut_mean, rel=0.01)
    assert drawn.reshape(-1, 8).max(axis=1).mean() == pytest.approx(lengths.expected_max(8), rel=0.01)
    assert drawn.max() == 1600


def test_equal_lengths_have_no_tail():
    assert LogNormal(800, 0.0).expected_max(1000) == 800
    assert LogNormal(800, 0.0).median_max(1000) == pytest.approx(800)
    assert LogNormal(800, 0.0, cap=500).tail(64) == 1.0


def test_the_tail_is_the_longest_over_the_average():
    assert LogNormal(123, 1.0).tail(16) == pytest.approx(3.435, abs=0.001)


@pytest.mark.parametrize(("mean", "cv", "cap"), [(0, 1, 10), (-5, 1, 10), (5, -1, 10), (math.nan, 1, 10), (5, 1, 0)])
def test_lengths_that_cannot_be_are_refused(mean: float, cv: float, cap: float):
    with pytest.raises(ConfigError, match=r"mean is|cv is|cap is"):
        LogNormal(mean, cv, cap=cap)

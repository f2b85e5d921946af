from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.buffer.lag import LagPolicy
from headrace.errors import ConfigError
from headrace.insight.staleness import admitted_lag, expected_lag, most_ahead


@pytest.mark.parametrize(
    ("rho", "queue_batches", "in_flight", "in_queue"),
    [  # C = 64, B = 64, M = 1.44
        (0.9, 1, 1.44, 0.9),
        (1.0, 1, 1.44, 1.0),
        (2.0, 1, 0.72, 0.75),  # (2 + 2 - 1) / 4
        (2.0, 2, 0.72, 1.25),  # (4 + 2 - 1) / 4
    ],
)
def test_lag_by_hand(rho: float, queue_batches: float, in_flight: float, in_queue: float):
    lag = expected_lag(concurrency=64, batch=64, group_tail=1.44, rho=rho, queue_batches=queue_batches)
    assert lag == pytest.approx(in_flight + in_queue)


def test_the_two_formulas_meet_where_both_sides_are_equally_fast():
    work = {"concurrency": 96.0, "batch": 64.0, "group_tail": 1.44}
    below, above = expected_lag(**work, rho=1.0), expected_lag(**work, rho=1.0 + 1e-12)
    assert below == pytest.approx(above)


@pytest.mark.parametrize(("latency_steps", "rho"), [(0.0, 0.5), (1.5, 0.9), (2.25, 0.3)])
def test_rollout_bound_lag_as_counted(latency_steps: float, rho: float):
    """A step takes 1 s, groups end evenly; batch k is trained from k + 1 on, and version k + 1 is there rho later."""
    step = 10
    end_s = step + (np.arange(1000) + 0.5) / 1000
    version_at_start = np.floor(end_s - latency_steps - rho)
    counted = (step - version_at_start).mean()
    latency = max(latency_steps, 1e-9)
    lag = expected_lag(concurrency=latency * 64, batch=64, group_tail=1.0, rho=rho)
    assert lag == pytest.approx(counted, abs=2e-3)


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_train_bound_lag_under_admission_as_counted(max_lag: int):
    """The real policy admits whatever it may when a version is there, and the oldest are trained on."""
    policy = LagPolicy(max_lag=max_lag, groups_per_step=4)
    waiting: list[int] = []
    lags: list[int] = []
    committed = 0
    for version in range(20):
        room = policy.capacity(version=version, committed=committed)
        committed += room
        waiting += [version] * room
        trained, waiting = waiting[:4], waiting[4:]
        lags = [version - began for began in trained]
    assert np.mean(lags) == max_lag
    assert admitted_lag(policy, concurrency=1000, group_tail=1.5, rho=1.5) == max_lag


def test_rollout_bound_lag_under_admission():
    policy = LagPolicy(max_lag=4, groups_per_step=64)
    # 64 * 1.5 / 64 + 0.8
    assert admitted_lag(policy, concurrency=64, group_tail=1.5, rho=0.8) == pytest.approx(2.3)
    # 320 groups at most, and no lag beyond 4
    assert most_ahead(policy) == 320
    assert admitted_lag(policy, concurrency=math.inf, group_tail=1.5, rho=0.8) == 4


def test_an_impossible_tail_is_refused():
    with pytest.raises(ConfigError, match=r"group_tail is 0\.5; it must be a number of at least 1"):
        expected_lag(concurrency=64, batch=64, group_tail=0.5, rho=1.0)

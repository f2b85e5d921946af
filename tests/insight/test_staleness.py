from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.buffer.lag import LagPolicy
from headrace.errors import ConfigError
from headrace.insight.simulator import simulate
from headrace.insight.staleness import admitted_lag, expected_lag
from headrace.insight.tails import LogNormal
from headrace.insight.workload import Cluster, Drawn, Workload


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


# rows, seconds of training a step: rollout-bound, balanced, and train-bound more and more
@pytest.mark.parametrize(("rows", "train_s"), [(64, 20.0), (128, 10.0), (128, 60.0), (512, 30.0), (512, 120.0)])
@pytest.mark.parametrize("max_lag", [4, 8])
def test_lag_under_admission_is_what_the_real_buffer_lets_happen(max_lag: int, rows: int, train_s: float):
    """A tenth of a second for a token, whatever the rows; 16 groups of 8 answers of 300 tokens."""
    lengths = LogNormal(mean=300.0, cv=0.6)
    work = Workload(groups_per_step=16, samples=8, tokens=Drawn(mean=lengths.mean, cv=lengths.cv))
    cluster = Cluster(rollout_workers=1, rows_per_worker=rows, decode_s=0.1, train_token_s=train_s / (128 * 300))
    rollout_s = 128 * 300 * 0.1 / rows
    lag = admitted_lag(
        LagPolicy(max_lag=max_lag, groups_per_step=16),
        concurrency=rows / 8,
        group_tail=lengths.tail(8),
        rho=train_s / rollout_s,
    )
    assert simulate(work, cluster, max_lag=max_lag, steps=60).lag_mean == pytest.approx(lag, abs=0.4)


def test_lag_under_admission_counts_the_time_of_verdicts():
    work = Workload(groups_per_step=16, samples=8, tokens=Drawn(mean=101.0), reward_s=Drawn(mean=40.0))
    cluster = Cluster(rollout_workers=1, rows_per_worker=512, decode_s=0.1, train_token_s=20.0 / (128 * 101))
    run = simulate(work, cluster, max_lag=8, steps=150)
    assert run.step_s == pytest.approx(20.0, rel=0.1)
    policy = LagPolicy(max_lag=8, groups_per_step=16)
    lag = admitted_lag(policy, concurrency=64, group_tail=1.0, rho=20.0 / 2.5, verdict_steps=40.0 / 20.0)
    assert lag == pytest.approx(0.5 + 2.0)
    assert run.lag_mean == pytest.approx(lag, abs=0.4)


def test_lag_under_admission_stays_within_its_bound():
    policy = LagPolicy(max_lag=4, groups_per_step=64)
    # 64 * 1.5 / 64, and half of it with a learner that takes twice as long; a step's worth is always admitted
    assert admitted_lag(policy, concurrency=64, group_tail=1.5, rho=0.8) == pytest.approx(1.5)
    assert admitted_lag(policy, concurrency=192, group_tail=1.5, rho=2.0) == pytest.approx(2.25)
    assert admitted_lag(policy, concurrency=64, group_tail=1.5, rho=2.0) == pytest.approx(1.0)
    # 320 groups at most, and no lag beyond 4
    assert policy.most_ahead == 320
    assert admitted_lag(policy, concurrency=math.inf, group_tail=1.5, rho=0.8) == 4
    assert admitted_lag(replace(policy, max_lag=0), concurrency=64, group_tail=1.5, rho=2.0) == 0


def test_an_impossible_tail_is_refused():
    with pytest.raises(ConfigError, match=r"group_tail is 0\.5; it must be a number of at least 1"):
        expected_lag(concurrency=64, batch=64, group_tail=0.5, rho=1.0)

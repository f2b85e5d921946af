"""The planner: what fits, what is fastest, and that its numbers are the formulas'."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ConfigError
from headrace.insight.equation import Placement, step_s
from headrace.insight.frameworks import FRAMEWORKS, others_that_fit
from headrace.insight.hardware import find_device
from headrace.insight.memory_bill import USABLE_SHARE
from headrace.insight.model_shape import model_shape
from headrace.insight.planner import Question, plan, search
from headrace.insight.sync import Encoding
from headrace.insight.tails import LogNormal
from headrace.insight.walls import ADVICE, Wall

SEVEN = Question(
    model=model_shape("7B"),
    device=find_device("H100"),
    num_devices=8,
    num_prompts=32,
    num_samples=8,
    lengths=LogNormal(1024, 1.0),
    max_lag=1,
)


def test_the_best_plan_comes_first_and_every_plan_fits() -> None:
    found = plan(SEVEN)
    assert [one.goodput for one in found] == sorted((one.goodput for one in found), reverse=True)
    for one in found:
        for bill in (one.rollout_bill, one.learner_bill):
            assert bill.total_bytes <= 1.001 * USABLE_SHARE * SEVEN.device.memory_bytes
        assert one.layout.rollout_devices % one.layout.tensor_parallel == 0
        used = one.layout.rollout_devices + one.layout.learner_devices
        assert one.layout.placement is Placement.COLOCATED or used <= SEVEN.num_devices


def test_a_plan_is_the_equation_of_its_stage_times() -> None:
    (best, *_) = [one for one in plan(SEVEN) if one.layout.placement is Placement.OVERLAPPED]
    assert best.step_s == step_s(best.times, Placement.OVERLAPPED)
    answers = SEVEN.num_prompts * SEVEN.num_samples
    assert best.goodput == pytest.approx(answers * 1024 / best.step_s)
    per_hour = best.goodput * 3600 / 1e6  # millions of trained tokens
    assert best.dollars_per_million == pytest.approx(8 * SEVEN.device.dollars_per_hour / per_hour)


def test_lag_pays_and_is_bounded_by_what_is_allowed() -> None:
    by_lag = {lag: plan(replace(SEVEN, max_lag=lag))[0] for lag in (0, 1, 4)}
    assert by_lag[0].goodput < by_lag[1].goodput <= by_lag[4].goodput
    for lag, best in by_lag.items():
        assert best.lag <= lag
    assert by_lag[0].lag == 0


def test_a_slow_verdict_is_the_wall_when_nothing_may_lag() -> None:
    slow = plan(replace(SEVEN, max_lag=0, reward_s=600.0))[0]
    assert slow.wall is Wall.REWARD
    assert any("verdicts of 600 s" in risk for risk in slow.risks)


def test_a_model_that_cannot_be_trained_is_refused_with_the_numbers() -> None:
    # 70e9 weights x 16 bytes = 1,120 GB of training state; 8 x 80 GB = 640 GB
    with pytest.raises(ConfigError, match=r"70B cannot be trained on 8 x H100: .* 1,1\d\d GB.* 8 x 80 GB"):
        plan(replace(SEVEN, model=model_shape("70B")))


def test_answers_that_no_engine_can_hold_are_refused_as_such() -> None:
    with pytest.raises(ConfigError, match=r"7B cannot generate on 8 x H100: .* answer of \d\d\d,\d\d\d,\d\d\d tokens"):
        plan(replace(SEVEN, lengths=LogNormal(10_000_000, 3.0)))


def test_an_adapter_fits_where_training_everything_does_not() -> None:
    adapted = plan(replace(SEVEN, model=model_shape("70B"), adapter=True))[0]
    assert adapted.learner_bill.training_bytes == 0
    assert adapted.transfer is None or adapted.transfer.encoding is Encoding.ADAPTER


def test_the_fewest_devices_for_a_goodput_are_found() -> None:
    wanted = plan(replace(SEVEN, num_devices=4))[0].goodput * 0.9
    question, found = search(replace(SEVEN, num_devices=64), wanted)
    assert question.num_devices <= 4
    assert found[0].goodput >= wanted
    with pytest.raises(ConfigError, match="out of reach: 2 x H100 come to"):
        search(replace(SEVEN, num_devices=2), 1e9)


def test_the_other_systems_fit_the_wall_the_size_and_the_lag() -> None:
    assert "TRL" in {f.name for f in others_that_fit(Wall.GENERATION, num_params=1e9, may_lag=False)}
    assert "TRL" not in {f.name for f in others_that_fit(Wall.GENERATION, num_params=70e9, may_lag=True)}
    tail = others_that_fit(Wall.TAIL, num_params=32e9, may_lag=True)
    assert {"AReaL", "PipelineRL", "Laminar"} <= {f.name for f in tail[:3]}
    assert all(not f.needs_lag for f in others_that_fit(Wall.SYNC, num_params=400e9, may_lag=False))
    assert len({f.name for f in FRAMEWORKS}) == 12
    assert set(ADVICE) == set(Wall)

"""The planner: what fits, what is fastest, and that its numbers are the formulas'."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.config_file import gpus_of, load_config
from headrace.errors import ConfigError
from headrace.insight.hardware import find_device, model_shape
from headrace.insight.planner import PLAYED_ANSWERS, Question, plan, search
from headrace.insight.roofline import USABLE_SHARE
from headrace.insight.scenario import Layout, Typed, scenario, worked_out
from headrace.insight.simulator import simulate
from headrace.insight.triage import ADVICE, FRAMEWORKS, Bottleneck, Placement, others_that_fit
from headrace.insight.workload import LogNormal

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


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_a_plan_is_what_simulate_says_of_its_layout(max_lag: int) -> None:
    """The command, told what the plan chose. A step of many answers, so that the planner plays a part of it."""
    question = replace(SEVEN, num_prompts=128, max_lag=max_lag)
    assert question.num_answers > PLAYED_ANSWERS
    chosen = next(one for one in plan(question) if one.transfer is None or one.transfer.encoding == "full")
    colocated = chosen.layout.placement is Placement.COLOCATED
    layout = Layout(
        gpus=8,
        gpus_per_worker=chosen.layout.tensor_parallel,
        rollout_share=chosen.layout.rollout_devices / 8,
        colocated=colocated,
    )
    recipe = load_config(
        None,
        [
            f"rollout.max_running={chosen.num_running}",
            "loop.groups_per_step=128",
            "rollout.samples=8",
            "rollout.max_new_tokens=1000000",
        ],
    )
    typed = worked_out(Typed(mean_tokens=1024, cv=1.0), recipe, layout, question.model, question.device)
    work, machine = scenario(recipe, typed, layout)
    if chosen.recomputes:
        machine = replace(machine, train_token_s=machine.train_token_s * 4 / 3)
    run = simulate(work, machine, max_lag=chosen.max_lag, steps=8 + 2 * max_lag)
    assert run.goodput_tokens_s == pytest.approx(chosen.goodput, rel=0.1)
    assert run.step_s == pytest.approx(chosen.step_s, rel=0.15)
    assert run.lag_mean == pytest.approx(chosen.lag, abs=0.5)


def test_a_plan_costs_what_its_devices_cost() -> None:
    best = plan(SEVEN)[0]
    # rollout-bound with lag, the few steps that are played train on short answers first: long ones are under way
    assert best.goodput == pytest.approx(SEVEN.num_answers * 1024 / best.step_s, rel=0.15)
    per_hour = best.goodput * 3600 / 1e6  # millions of trained tokens
    assert best.dollars_per_million == pytest.approx(8 * SEVEN.device.dollars_per_hour / per_hour)


SIZES = ("0.6B", "7B", "32B", "70B", "405B", "30B-A3B", "235B-A22B")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_settings_of_every_plan_are_accepted(size: str) -> None:
    num_plans = 0
    for number in (1, 8, 64, 512):
        for changes in ({"max_lag": 0}, {"max_lag": 4}, {"adapter": True}, {"lengths": LogNormal(1024, 1.0, 4096)}):
            step = {"num_prompts": 8, "num_samples": 4}  # small: it is the settings that are looked at
            question = replace(SEVEN, model=model_shape(size), num_devices=number, **step, **changes)  # type: ignore[arg-type]
            try:
                best = plan(question)[0]
            except ConfigError:  # it does not fit
                continue
            num_plans += 1
            if not best.settings:
                assert "A" in size or best.layout.tensor_parallel > 8, "a dense model that a node holds can be run"
                assert "it cannot be run here" in " ".join(best.risks)
                continue
            config = load_config(None, ["model.path=models/some", *best.settings])
            split = best.layout
            assert config.loop.max_lag == best.max_lag
            assert (config.rollout.workers, config.learner.ranks) == (split.num_engines, split.learner_devices)
            assert gpus_of(config.rollout) == split.tensor_parallel
    assert num_plans >= (3 if size == "405B" else 4)


def test_what_can_be_run_comes_first() -> None:
    found = plan(replace(SEVEN, model=model_shape("30B-A3B"), num_devices=16))
    assert found[0].settings
    assert found[0].layout.tensor_parallel == 1


def test_lag_pays_and_is_bounded_by_what_is_allowed() -> None:
    by_lag = {lag: plan(replace(SEVEN, max_lag=lag))[0] for lag in (0, 1, 4)}
    assert by_lag[0].goodput < by_lag[1].goodput <= by_lag[4].goodput
    for lag, best in by_lag.items():
        assert best.lag <= lag
    assert by_lag[0].lag == 0


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_slow_environment_is_the_bottleneck(max_lag: int) -> None:
    quick = plan(replace(SEVEN, max_lag=max_lag, environment_s=0.001))[0]
    slow = plan(replace(SEVEN, max_lag=max_lag, environment_s=600.0))[0]
    assert quick.bottleneck is not Bottleneck.ENVIRONMENT
    assert slow.bottleneck is Bottleneck.ENVIRONMENT
    assert slow.step_s > 250


def test_a_slow_verdict_is_the_bottleneck_when_nothing_may_lag() -> None:
    slow = plan(replace(SEVEN, max_lag=0, reward_s=600.0))[0]
    assert slow.bottleneck is Bottleneck.REWARD
    assert "verdicts of 600 s" in " ".join(slow.risks)


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
    assert adapted.transfer is None or adapted.transfer.encoding == "adapter"


def test_the_fewest_devices_for_a_goodput_are_found() -> None:
    wanted = plan(replace(SEVEN, num_devices=4))[0].goodput * 0.9
    question, found = search(replace(SEVEN, num_devices=64), wanted)
    assert question.num_devices <= 4
    assert found[0].goodput >= wanted
    with pytest.raises(ConfigError, match="out of reach: 2 x H100 come to"):
        search(replace(SEVEN, num_devices=2), 1e9)


def test_the_other_systems_fit_the_bottleneck_the_size_and_the_lag() -> None:
    assert "TRL" in {f.name for f in others_that_fit(Bottleneck.GENERATION, num_params=1e9, may_lag=False)}
    assert "TRL" not in {f.name for f in others_that_fit(Bottleneck.GENERATION, num_params=70e9, may_lag=True)}
    tail = others_that_fit(Bottleneck.TAIL, num_params=32e9, may_lag=True)
    assert {"AReaL", "PipelineRL", "Laminar"} <= {f.name for f in tail[:3]}
    assert [f.name for f in others_that_fit(Bottleneck.SYNC, num_params=400e9, may_lag=False)] == ["verl", "slime"]
    assert len({f.name for f in FRAMEWORKS}) == 12
    assert set(ADVICE) == set(Bottleneck)

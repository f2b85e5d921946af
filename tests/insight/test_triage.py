"""Triage: the bottleneck of runs whose seconds are made up to have one, and the moves against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from insight_runs import made_up_run

from headrace.config import Config, LearnerSection, LoopSection, RolloutSection
from headrace.config_file import load_config
from headrace.errors import ConfigError, RunError
from headrace.insight.reports import triage_report
from headrace.insight.scenario import Calibration
from headrace.insight.simulator import simulate
from headrace.insight.triage import (
    BOTTLENECK_OF_STAGE,
    Bottleneck,
    Move,
    Placement,
    Triage,
    TypedTriage,
    _moves,
    _ranked,
    _setting_moves,
    advice_for,
)
from headrace.insight.workload import LogNormal, Machine, Workload
from headrace.measured import STAGES, StageTimes

# A step as it is made up: 0.2 s to generate, 8 ms to score, some 20 ms to train, 1 ms to publish.
SLOW: dict[Bottleneck, dict[str, Any]] = {
    Bottleneck.GENERATION: {"decode_s": 0.1},
    Bottleneck.TAIL: {"lengths": (10,) * 7 + (400,)},
    Bottleneck.REWARD: {"verdict_s": 0.5},
    Bottleneck.LEARNER: {"train_token_s": 0.02},
    Bottleneck.SYNC: {"publish_s": 2.0},
    Bottleneck.SPARSE: {"barren": 4, "decode_s": 0.001, "lengths": (20,) * 8, "verdict_s": 0.2},
}


@pytest.mark.parametrize("bottleneck", [name for name in SLOW if name is not Bottleneck.SPARSE])
def test_what_is_slow_is_named(bottleneck: Bottleneck, tmp_path: Path) -> None:
    found = Triage(made_up_run(tmp_path / "run", **SLOW[bottleneck]))
    assert found.bottleneck is bottleneck
    measured_s = found.reading.step_s
    assert measured_s is not None
    # which groups come together is drawn, so the long answer is not in every simulated step
    assert found.simulated_s == pytest.approx(measured_s.mean, rel=0.5 if bottleneck is Bottleneck.TAIL else 0.1)


def test_groups_without_signal_cost_their_part(tmp_path: Path) -> None:
    """Half of the groups are dropped: with signal in all of them a step would score half as many answers."""
    found = Triage(made_up_run(tmp_path / "run", **SLOW[Bottleneck.SPARSE]))
    assert found.reading.no_signal_share == 0.5
    assert found.without[Bottleneck.SPARSE] < 0.7 * found.simulated_s


def test_against_slow_verdicts_more_workers_are_proposed(tmp_path: Path) -> None:
    found = Triage(made_up_run(tmp_path / "run", **SLOW[Bottleneck.REWARD]))
    assert found.moves[0].settings[-1].startswith("reward.workers=")
    assert found.moves[0].gain > 1.5


def test_verdicts_of_the_loop_itself_come_one_at_a_time(tmp_path: Path) -> None:
    found = Triage(made_up_run(tmp_path / "run", **SLOW[Bottleneck.REWARD], settings=("reward.workers=0",)))
    assert found.bottleneck is Bottleneck.REWARD
    assert "reward.workers=2" in found.moves[0].settings or "reward.workers=4" in found.moves[0].settings


def test_on_a_cluster_publishing_is_counted_by_version_and_workers_are_apart(tmp_path: Path) -> None:
    """Its publisher books five spans for every version."""
    cluster = ("place.cluster=ray", "place.layout=disaggregated", "rollout.workers=2")
    found = Triage(made_up_run(tmp_path / "run", publish_s=2.0, publish_parts=5, settings=cluster))
    assert found.bottleneck is Bottleneck.SYNC
    measured_s = found.reading.step_s
    assert measured_s is not None
    assert found.simulated_s == pytest.approx(measured_s.mean, rel=0.15)
    assert found.reading.occupancy is not None
    assert found.reading.occupancy.num_steps == 4


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        Triage(tmp_path)


def test_the_worked_example() -> None:
    """30 + 3 against 8, and 1 to publish: 34 s; a learner twice as fast changes nothing."""
    found = TypedTriage(StageTimes(rollout=30.0, reference=3.0, train=8.0, publish=1.0), Placement.OVERLAPPED)
    assert found.step_s[Placement.OVERLAPPED] == 34.0
    assert found.bottleneck is Bottleneck.GENERATION
    assert found.moves[0].text == "rollout in half the time"
    assert found.moves[0].step_s == 19.0  # 15 + 3 + 1
    assert "train in half the time" not in [move.text for move in found.moves]


def test_a_step_that_takes_no_time_has_no_bottleneck() -> None:
    with pytest.raises(ConfigError, match="every stage takes 0 s"):
        TypedTriage(StageTimes(), Placement.COLOCATED)


def test_of_like_moves_the_smallest_that_is_as_good_stays() -> None:
    def move(gain: float, *settings: str) -> Move:
        return Move(text="", settings=settings, step_s=1.0 / gain, gain=gain)

    found = _ranked([move(1.5, "a=1"), move(1.51, "a=2"), move(1.0, "b=1"), move(1.52, "a=1", "b=1"), move(1.2)])
    assert [one.settings for one in found] == [("a=1",), ()]
    found = _ranked([move(1.2, "a=1"), move(1.9), move(1.9, "b=1")])  # by what they bring; what costs nothing first
    assert [one.settings for one in found] == [("b=1",), (), ("a=1",)]
    found = _ranked([move(1.5, "a=1"), move(1.7, "a=2"), move(1.3, "b=1"), move(2.0, "a=2", "b=1")])
    assert [one.settings for one in found] == [("a=2", "b=1"), ("a=2",), ("b=1",)]


def told(*words: str, bottleneck: Bottleneck = Bottleneck.GENERATION) -> str:
    return " ".join(advice_for(bottleneck, load_config(None, words)).moves)


def test_more_slots_are_proposed_only_where_those_there_are_full() -> None:
    few = ("rollout.samples=4", "loop.groups_per_step=2")  # 8 answers in 256 slots
    assert "rollout.max_running" not in told(*few)
    assert "rollout.max_running" not in told(*few, "rollout.max_running=8")
    assert "rollout.max_running" in told(*few, "rollout.max_running=7")
    assert "rollout.max_running" in told(*few, "rollout.max_running=8", "loop.max_lag=1")
    config = load_config(None, few)
    assert not any("rollout.max_running" in key for _, keys in _setting_moves(config) for key in keys)


@pytest.mark.parametrize(
    ("bottleneck", "setting", "advice"),
    [
        (Bottleneck.GENERATION, "rollout.speculate=8", "rollout.speculate"),
        (Bottleneck.GENERATION, "loop.max_lag=1", "loop.max_lag"),
        (Bottleneck.TAIL, "loop.max_lag=2", "loop.max_lag"),
        (Bottleneck.SYNC, "publish.encoding=delta", "publish.encoding"),
        (Bottleneck.SYNC, "place.cluster=local", "place.cluster"),
    ],
)
def test_advice_that_is_followed_already_is_not_given(bottleneck: Bottleneck, setting: str, advice: str) -> None:
    assert advice not in told("place.cluster=ray", setting, bottleneck=bottleneck)
    assert advice in told("place.cluster=ray", bottleneck=bottleneck)


def test_what_a_server_refuses_is_not_advised() -> None:
    assert "rollout.speculate" not in told("rollout.engine=vllm")
    assert "rollout.on_wall" in told(bottleneck=Bottleneck.TAIL)
    assert "rollout.on_wall" not in told("rollout.engine=vllm", bottleneck=Bottleneck.TAIL)


def test_recomputed_activations_are_advised_against_only_where_they_are() -> None:
    off = "learner.checkpoint_activations=true"
    assert "learner.checkpoint_activations" in told(off, bottleneck=Bottleneck.LEARNER)
    assert "learner.checkpoint_activations" not in told(bottleneck=Bottleneck.LEARNER)


def test_the_report_of_a_run_gives_advice_that_fits_it(tmp_path: Path) -> None:
    """Four groups of four answers, in 256 slots."""
    found = Triage(made_up_run(tmp_path / "run", **SLOW[Bottleneck.GENERATION]))
    assert found.bottleneck is Bottleneck.GENERATION
    text = str(triage_report(found))
    assert "per dollar" not in text
    priced = found.reading.config.but(run={"dollars_per_hour": 3.6})
    found.reading.config, per_s = priced, found.reading.goodput_tokens_per_s
    assert f"{per_s:,.0f} trained tokens a second, {1000 * per_s:,.0f} per dollar" in str(triage_report(found))
    assert "Against rollout in general" in text
    assert "rollout.max_running" not in text
    gains = [move.gain for move in found.moves]
    assert gains == sorted(gains, reverse=True)


def test_a_bottleneck_has_the_name_of_its_stage() -> None:
    """The terminal names stages, triage and the page name bottlenecks: one word for both."""
    assert {stage: str(name) for stage, name in BOTTLENECK_OF_STAGE.items()} == {
        **{stage: stage for stage in (*STAGES, "environment")},
        "reference": "train",  # the learner computes it
    }


def test_fuller_passes_are_proposed_where_passes_cost_more_than_tokens() -> None:
    """16 answers of 20 tokens: 10 ms a pass of one answer each, next to nothing a token; four to a pass save 0.12 s."""
    config = Config(
        rollout=RolloutSection(samples=4),
        loop=LoopSection(groups_per_step=4),
        learner=LearnerSection(micro_batch_tokens=20),
    )
    machine = Machine(
        rollout_workers=1, rows_per_worker=16, decode_s=1e-3, train_pass_s=0.01, pass_tokens=20, colocated=True
    )
    work = Workload(groups_per_step=4, samples=4, tokens=LogNormal(mean=20.0))
    calibration = Calibration(workload=work, machine=machine, max_lag=0)
    now = simulate(work, machine, max_lag=0)
    found = {move.settings: move for move in _moves(calibration, config, now)}
    fuller = found[("learner.micro_batch_tokens=80",)]
    assert now.step_s - fuller.step_s == pytest.approx(0.12)
    assert fuller in _ranked(found.values())

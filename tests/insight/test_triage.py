"""Triage: the wall of runs that were built to have one, and the moves against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import Workshop, write_prompts

from headrace import api
from headrace.config import Config, LearnerSection, LoopSection, RolloutSection
from headrace.errors import ConfigError, RunError
from headrace.insight.calibration import Calibration
from headrace.insight.equation import Placement
from headrace.insight.simulator import simulate
from headrace.insight.triage import Move, _moves, _ranked, triage, triage_typed
from headrace.insight.walls import Wall
from headrace.insight.workload import Cluster, Drawn, Workload
from headrace.types import StageTimes

STEPS = ("loop.steps=5", "prompts.shuffle=false")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("walls"))


def wall_of(workshop: Workshop, name: str, *settings: str, reward: str = "dense") -> tuple[Wall, tuple[Move, ...]]:
    api.train(workshop.config(name, *STEPS, *settings, reward=reward))
    found = triage(workshop.directory / name)
    return found.wall, found.moves


def test_slow_verdicts_are_named_and_more_workers_proposed(workshop: Workshop) -> None:
    prompts = write_prompts(workshop.directory / "late.jsonl", late=[0.5])
    wall, moves = wall_of(workshop, "slow", f"prompts.source={prompts}", reward="late")
    assert wall is Wall.REWARD
    assert moves[0].settings[-1].startswith("reward.workers=")
    assert moves[0].gain > 1.5


def test_long_answers_are_named(workshop: Workshop) -> None:
    wall, _ = wall_of(workshop, "long", "rollout.max_new_tokens=200", "rollout.stop=[]", "rollout.max_running=4")
    assert wall in (Wall.GENERATION, Wall.TAIL)


def test_heavy_training_is_named(workshop: Workshop) -> None:
    settings = ("learner.micro_batch_tokens=8", "rollout.max_new_tokens=4", "loop.groups_per_step=8")
    assert wall_of(workshop, "heavy", *settings)[0] is Wall.LEARNER


def test_a_run_without_a_step_says_so(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        triage(tmp_path)


def test_the_worked_example() -> None:
    """30 + 3 against 8, and 1 to publish: 34 s; a learner twice as fast changes nothing."""
    found = triage_typed(StageTimes(rollout=30.0, reference=3.0, train=8.0, publish=1.0), Placement.OVERLAPPED)
    assert found.step_s[Placement.OVERLAPPED] == 34.0
    assert found.wall is Wall.GENERATION
    assert found.moves[0].text == "rollout in half the time"
    assert found.moves[0].step_s == 19.0  # 15 + 3 + 1
    assert not any("train in half" in move.text for move in found.moves)


def test_a_step_that_takes_no_time_has_no_wall() -> None:
    with pytest.raises(ConfigError, match="every stage takes 0 s"):
        triage_typed(StageTimes(), Placement.COLOCATED)


def test_of_like_moves_the_smallest_that_is_as_good_stays() -> None:
    def move(gain: float, *settings: str) -> Move:
        return Move(text="", settings=settings, step_s=1.0 / gain, gain=gain)

    found = _ranked([move(1.5, "a=1"), move(1.51, "a=2"), move(1.0, "b=1"), move(1.52, "a=1", "b=1"), move(1.2)])
    assert [one.settings for one in found] == [("a=1",), ()]
    found = _ranked([move(1.9), move(1.2, "a=1")])  # what can be done now comes before what must be bought
    assert [one.settings for one in found] == [("a=1",), ()]
    found = _ranked([move(1.5, "a=1"), move(1.7, "a=2"), move(1.3, "b=1"), move(2.0, "a=2", "b=1")])
    assert [one.settings for one in found] == [("a=2", "b=1"), ("a=2",), ("b=1",)]


def test_fuller_passes_are_proposed_where_passes_cost_more_than_tokens() -> None:
    """16 answers of 20 tokens: 10 ms a pass of one answer each, next to nothing a token; four to a pass save 0.12 s."""
    config = Config(
        rollout=RolloutSection(samples=4),
        loop=LoopSection(groups_per_step=4),
        learner=LearnerSection(micro_batch_tokens=20),
    )
    cluster = Cluster(
        rollout_workers=1, rows_per_worker=16, decode_s=1e-3, train_pass_s=0.01, pass_tokens=20, colocated=True
    )
    work = Workload(groups_per_step=4, samples=4, tokens=Drawn(mean=20.0))
    calibration = Calibration(workload=work, cluster=cluster, max_lag=0, num_steps=1, step_s=0.18)
    now = simulate(work, cluster, max_lag=0)
    found = {move.settings: move for move in _moves(calibration, config, now)}
    fuller = found[("learner.micro_batch_tokens=80",)]
    assert now.step_s - fuller.step_s == pytest.approx(0.12)
    assert fuller in _ranked(found.values())

"""The list of runs: quick with hundreds of them, and up to date; and what a run tells of how it went."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hand_made import row
from tiny_runs import Workshop, select

from headrace import api
from headrace.dashboard.site import Site
from headrace.errors import StalledError
from headrace.ledger.database import claimed
from headrace.ledger.files import run_config, save_settings
from headrace.ledger.journal import Restart, insert
from headrace.ledger.ledger import Ledger
from headrace.runs import facts as module
from headrace.runs.facts import MOST_REWARDS, RunState, read_run
from headrace.runs.show import drawn_rewards


@pytest.fixture
def runs(real_run: Path, tmp_path: Path) -> Path:
    """A few copies of a real run."""
    for number in range(5):
        (tmp_path / f"run-{number}").mkdir()
        for name in ("ledger.sqlite", "config.toml", "summary.json"):
            shutil.copy(real_run / name, tmp_path / f"run-{number}")
    return tmp_path


def test_only_runs_that_changed_are_read_again(runs: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(module, "read_run", lambda path: asked.append(path.name) or read_run(path))
    site = Site(runs)
    first = site.facts()
    assert sorted(asked) == [f"run-{number}" for number in range(5)]
    asked.clear()
    assert site.facts() == first
    assert asked == []
    os.utime(runs / "run-3" / "summary.json", (1, 1))
    with claimed(runs / "run-1"):
        (runs / "run-1" / "summary.json").unlink()
        assert {facts.path.name: facts.state for facts in site.facts()}["run-1"] is RunState.RUNNING
        assert sorted(asked) == ["run-1", "run-3"]
    assert {facts.path.name: facts.state for facts in site.facts()}["run-1"] is RunState.STOPPED  # its lock is free
    shutil.rmtree(runs / "run-0")
    assert len(site.facts()) == 4


@pytest.mark.slow
def test_the_small_curve_of_a_long_run_takes_a_few_rows_only(large_run: Path):
    found = read_run(large_run).rewards
    assert len(found) == MOST_REWARDS
    ends = select(large_run, "SELECT reward_mean FROM rows WHERE step IN (1, 10000) ORDER BY step")
    assert [found[0], found[-1]] == [reward for (reward,) in ends]
    points = [tuple(map(float, point.split(","))) for point in drawn_rewards([0.0, 1.0, 0.5]).split()]
    assert points == [(0.0, 20.0), (48.0, 0.0), (96.0, 10.0)]
    assert drawn_rewards(()) == ""
    assert drawn_rewards([0.5]) == "0.0,20.0"


def test_a_run_tells_what_went_wrong(workshop: Workshop):
    api.train(workshop.config("moody", "loop.steps=2", reward="moody"))
    told = dict(Site(workshop.directory).run("moody").history().facts)
    assert told["because"] == "all its steps are done"
    assert "reward_error; the first: " in told["reward failures"]
    assert told["reward failures"].rsplit(": ", 1)[1]
    assert told["skipped steps"] == told["restarts"] == "none"


def test_a_run_that_could_not_go_on_says_why(workshop: Workshop):
    with pytest.raises(StalledError) as stopped:
        api.train(workshop.config("dull", "buffer.patience=1", reward="constant"))
    told = dict(Site(workshop.directory).run("dull").history().facts)
    assert told["because"] == str(stopped.value)
    assert told["state"].startswith("stopped after step 0 of 3")
    solved, *_, unseen = told["prompts"].split(", ")
    assert told["prompts"] == f"{solved}, 0 learning, 0 unsolved, {unseen}", "a reward that is always 0.5"
    assert int(solved.split()[0]) + int(unseen.split()[0]) == 46


def test_restarts_and_skipped_steps_are_told(real_run: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    save_settings(run_config(real_run), run)
    with Ledger.create(run) as ledger:
        for step in range(1, 5):
            ledger.row(row(step, skipped=step in (2, 4)))
        happened = {"number": 1, "at_s": 5.0, "checkpoint": 2, "version": 3, "rule": "requeue"}
        happened |= {"redone_steps": 1, "retrained_tokens": 7, "lost_tokens": 9, "lost_trajectories": 2}
        with ledger.writing() as connection:
            insert(connection, "restarts", happened)
        assert ledger.restarts() == [Restart(**happened)]
    history = Site(tmp_path).run("run").history()
    told = dict(history.facts)
    assert told["state"].startswith("stopped after step 4 of 6")
    assert told["because"] == "its process ended without a word: it was killed, or the machine stopped"
    assert told["skipped steps"] == "2: 2, 4; the gradient was not finite"
    assert told["restarts"] == "1"
    assert history.tables[0].rows[0][2:4] == ["step 2", "step 3"]

"""Runs with environments, killed at random instants: no turn that was kept is sampled again."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import forked
import pytest
from chat_runs import ChatWorkshop
from killed_episodes import finished, kept_turns, kill_in_mid_episode
from kills import train

from headrace import api
from headrace.ledger.ledger import Amount
from headrace.runs.audit import audit, books
from headrace.types import Trajectory

SETTINGS = ("loop.steps=6", "recovery.every_steps=2")
_RANDOM = random.Random("kills")
INSTANTS_S = [_RANDOM.uniform(0.5, 2.0) for _ in range(3)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> ChatWorkshop:
    return ChatWorkshop(tmp_path_factory.mktemp("killed"))


class Notes(api.Watcher):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of kills: `survive` trains, kills, resumes, and looks at all that a restart promises."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("episode_kills")


def test_a_killed_on_policy_run_ends_with_the_bits_of_an_unbroken_one(soak: Any, tmp_path: Path):
    unbroken, killed, tally = tmp_path / "unbroken", tmp_path / "killed", soak.Tally()
    soak.survive(soak.settings(tmp_path, "unbroken", "environment", 0), unbroken, [], soak.Tally())
    soak.survive(soak.settings(tmp_path, "killed", "environment", 0), killed, INSTANTS_S, tally)
    assert tally.kills, "no kill hit a living process"
    assert soak.weights(killed) == soak.weights(unbroken)


@pytest.mark.slow
def test_an_agent_survives_kills_at_any_instant(soak: Any, tmp_path: Path):
    tally = soak.Tally()
    soak.survive(soak.settings(tmp_path, "killed", "function", 1), tmp_path / "killed", INSTANTS_S, tally)
    assert tally.kills, "no kill hit a living process"


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["Slow", "Kept"])
def test_no_turn_that_was_kept_is_sampled_again(workshop: ChatWorkshop, environment: str):
    """Its tokens begin the episode that the restart finished, with the log-probs and versions they had."""
    name, rng, num_checked = f"again-{environment}", random.Random(environment), 0
    run, log = workshop.directory / name, workshop.directory / f"{name}.log"
    settings = workshop.overrides(name, *SETTINGS, "loop.max_lag=1", reward=environment)
    kept: dict[tuple[int, int], Trajectory] = {}
    for more_s in (0.0, rng.uniform(0.0, 0.05), None):
        process = forked.start(log, api.resume, run) if kept else forked.start(log, train, settings)
        kill_in_mid_episode(process, run, more_s)
        later = {**kept_turns(run), **finished(run)}
        for key, before in kept.items():
            if key not in later:  # its group was not finished, and is not under way: dropped whole
                continue
            after, end = later[key], before.turns[-1].end
            assert after.token_ids[:end].tolist() == before.token_ids.tolist()
            assert after.logprobs[:end].tobytes() == before.logprobs.tobytes()
            assert after.spans[: len(before.spans)] == before.spans
            num_checked += 1
        kept = kept_turns(run)
    assert num_checked
    assert audit(run) == []
    assert books(run).in_flight == Amount()


def test_an_environment_that_does_not_repeat_itself_is_told(workshop: ChatWorkshop):
    """It can be neither restored nor repeated, so its episodes are lost with their process."""
    run, log = workshop.directory / "fickle", workshop.directory / "fickle.log"
    process = forked.start(log, train, workshop.overrides("fickle", *SETTINGS, "loop.max_lag=1", reward="Fickle"))
    kill_in_mid_episode(process, run, 0.0)
    assert kept_turns(run)
    notes = Notes()
    api.resume(run, notes)
    assert audit(run) == []
    assert books(run).dropped["env_error"].tokens > 0
    assert "snapshot()" in json.dumps(api.files.read_summary(run)) or any("snapshot()" in text for text in notes.texts)

"""Runs with environments, killed at random instants: no turn that was kept is sampled again."""

from __future__ import annotations

import json
import random

import forked
import pytest
from chat_runs import ChatWorkshop
from killed_episodes import finished, kept_turns, kill_in_mid_episode
from kills import num_kills_that_hit, train
from tiny_runs import same_bits, weights

from headrace import api
from headrace.ledger.ledger import Amount
from headrace.runs.audit import audit, books
from headrace.types import Trajectory

SETTINGS = ("loop.steps=6", "recovery.every_steps=2")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> ChatWorkshop:
    return ChatWorkshop(tmp_path_factory.mktemp("killed"))


class Notes(api.Watcher):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_killed_on_policy_run_ends_with_the_bits_of_an_unbroken_one(workshop: ChatWorkshop):
    settings = (*SETTINGS, "model.exact=true")
    api.train(workshop.config("unbroken", *settings, reward="Slow"))
    num_hit = 0
    for name in ("first", "second"):
        rng = random.Random(name)
        kills_s = [rng.uniform(0.5, 2.0), rng.uniform(0.5, 1.5)]
        num_hit += num_kills_that_hit(workshop, name, workshop.overrides(name, *settings, reward="Slow"), kills_s)
        run = workshop.directory / name
        assert audit(run) == []
        assert books(run).in_flight == books(run).buffered == Amount()
        assert same_bits(weights(run), weights(workshop.directory / "unbroken"))
    assert num_hit, "no kill hit a living process"


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

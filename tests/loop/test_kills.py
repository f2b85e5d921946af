"""Killed at random instants and resumed: nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import Workshop, rows_of, same_bits, select, timeless, weights

from headrace import api
from headrace.ledger.audit import audit, books
from headrace.ledger.ledger import Amount, Ledger

KILLER = Path(__file__).parent.parent / "kill_runs.py"
STEPS = 8
SETTINGS = (f"loop.steps={STEPS}", "recovery.every_steps=3")


def kill_and_resume(workshop: Workshop, names: list[str], *settings: str) -> None:
    """Train in each directory, with two kills at instants that follow from its name."""
    specs = []
    for name in names:
        rng = random.Random(name)
        specs.append(
            {
                "directory": str(workshop.directory / name),
                "settings": workshop.overrides(name, *SETTINGS, *settings),
                "kills_s": [rng.uniform(0.2, 1.2), rng.uniform(0.2, 1.0)],
            }
        )
    path = workshop.directory / f"{names[0]}.json"
    path.write_text(json.dumps(specs))
    done = subprocess.run(
        [sys.executable, str(KILLER), str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert any(int(line) for line in done.stdout.split()), "no kill hit a living process"


def assert_nothing_lost_or_done_twice(run: Path) -> None:
    assert audit(run) == []
    assert books(run).in_flight == books(run).buffered == Amount()
    assert [row.step for row in rows_of(run)] == list(range(1, STEPS + 1))
    trained = "SELECT serial, COUNT(DISTINCT attempt) FROM trajectories WHERE state = 'trained' GROUP BY serial"
    assert all(count == 1 for _, count in select(run, trained))
    (highest,) = select(run, "SELECT MAX(serial) FROM attempts")[0]
    crashed = "SELECT serial FROM attempts WHERE state = 'crashed'"
    outcomes = f"SELECT serial FROM trajectories WHERE state <> 'buffered' UNION {crashed}"
    known = {serial for (serial,) in select(run, outcomes)}
    assert known == set(range(highest + 1)), "every prompt that was drawn is trained on, or dropped with a reason"
    assert not select(run, "SELECT * FROM attempts WHERE state = 'open'")


@pytest.fixture(scope="module")
def unbroken(workshop: Workshop) -> Path:
    api.train(workshop.config("unbroken", *SETTINGS))
    return workshop.directory / "unbroken"


def test_a_killed_on_policy_run_ends_with_the_bits_of_an_unbroken_one(workshop: Workshop, unbroken: Path):
    names = [f"killed{i}" for i in range(4)]
    kill_and_resume(workshop, names)
    for name in names:
        run = workshop.directory / name
        assert_nothing_lost_or_done_twice(run)
        assert same_bits(weights(run), weights(unbroken))
        lost = books(run).dropped.get("redone", Amount())
        assert books(run).generated.tokens == books(unbroken).generated.tokens + lost.tokens
        for row, expected in zip(rows_of(run), rows_of(unbroken), strict=True):
            assert row.reward_mean == expected.reward_mean
            assert row.loss == expected.loss
        (unbroken_model,) = unbroken.glob("model/model.safetensors")
        assert (run / "model" / "model.safetensors").read_bytes() == unbroken_model.read_bytes()


@pytest.mark.parametrize("rule", ["requeue", "drop"])
def test_a_killed_asynchronous_run_accounts_for_every_prompt(workshop: Workshop, rule: str):
    names = [f"late-{rule}{i}" for i in range(2)]
    kill_and_resume(workshop, names, "loop.max_lag=2", f"recovery.in_flight={rule}")
    for name in names:
        run = workshop.directory / name
        with Ledger.open(run) as ledger:
            assert {restart.rule for restart in ledger.restarts()} <= {rule}
        if rule == "requeue":
            assert_nothing_lost_or_done_twice(run)
        else:
            assert audit(run) == []
            assert "redone" not in books(run).dropped


def test_an_interrupted_run_goes_on_to_the_same_end(workshop: Workshop, unbroken: Path):
    config = workshop.config("paused", *SETTINGS)

    class Impatient(api.Nobody):
        def row(self, row: object) -> None:
            if row.step == 4:  # type: ignore[attr-defined]
                os.kill(os.getpid(), 2)

    summary = api.train(config, Impatient())
    run = workshop.directory / "paused"
    assert summary["finished"] is False
    assert api.resume(run)["finished"] is True
    assert_nothing_lost_or_done_twice(run)
    assert same_bits(weights(run), weights(unbroken))
    kept = [timeless(row) for row in rows_of(run)]
    assert [row["loss"] for row in kept] == [row.loss for row in rows_of(unbroken)]

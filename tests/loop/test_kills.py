"""Killed at random instants and resumed: nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from kills import num_kills_that_hit
from tiny_runs import Workshop, rows_of, same_bits, select, timeless, weights

from headrace import api
from headrace.ledger.files import prepare_run_dir
from headrace.ledger.journal import read_partials
from headrace.ledger.ledger import Amount, Ledger
from headrace.measured import Row, Sample
from headrace.runs.audit import audit, books
from headrace.types import FinishReason

STEPS = 8
SETTINGS = (f"loop.steps={STEPS}", "recovery.every_steps=3")


def kill_and_resume(workshop: Workshop, names: list[str], *settings: str) -> None:
    """Train in each directory, with two kills at instants that follow from its name."""
    num_hit = 0
    for name in names:
        rng = random.Random(name)
        kills_s = [rng.uniform(0.2, 1.2), rng.uniform(0.2, 1.0)]
        num_hit += num_kills_that_hit(workshop, name, workshop.overrides(name, *SETTINGS, *settings), kills_s)
    assert num_hit, "no kill hit a living process"


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


@pytest.mark.parametrize("numbers", [(0, 1), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_a_killed_on_policy_run_ends_with_the_bits_of_an_unbroken_one(
    workshop: Workshop, unbroken: Path, numbers: tuple[int, int]
):
    names = [f"killed{i}" for i in numbers]
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
        exported = [api.export(one, workshop.directory / f"{name}-{one.name}") for one in (run, unbroken)]
        killed_bytes, unbroken_bytes = ((out / "model.safetensors").read_bytes() for out in exported)
        assert killed_bytes == unbroken_bytes


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["requeue", "resume", "drop"])
def test_a_killed_asynchronous_run_accounts_for_every_prompt(workshop: Workshop, rule: str):
    names = [f"late-{rule}{i}" for i in range(2)]
    kill_and_resume(workshop, names, "loop.max_lag=2", f"recovery.in_flight={rule}")
    for name in names:
        run = workshop.directory / name
        with Ledger.open(run) as ledger:
            assert {restart.rule for restart in ledger.restarts()} <= {rule}
        if rule != "drop":
            assert_nothing_lost_or_done_twice(run)
        else:
            assert audit(run) == []
            assert "redone" not in books(run).dropped


def test_with_the_first_answers_alone_a_killed_run_has_the_same_bits(workshop: Workshop):
    first = ("buffer.first=2", "rollout.samples=5", "rollout.max_new_tokens=40")
    samples: list[str] = []

    class Reader(api.Watcher):
        def sample(self, sample: Sample) -> None:
            samples.append(sample.fate)

    api.train(workshop.config("first", *SETTINGS, *first, "ledger.samples_every=1"), Reader())
    assert samples
    assert "dropped: late" not in samples, "what the policy learns from is shown"
    unbroken = workshop.directory / "first"
    assert books(unbroken).dropped["late"].trajectories > 0
    rows = rows_of(unbroken)
    assert all(-1 < row.length_bias <= 0 for row in rows)
    assert min(row.length_bias for row in rows) < 0
    per_group = "SELECT COUNT(*) FROM trajectories WHERE state = 'trained' GROUP BY serial"
    assert min(count for (count,) in select(unbroken, per_group)) >= 2
    kill_and_resume(workshop, ["first-killed"], *first)
    run = workshop.directory / "first-killed"
    assert_nothing_lost_or_done_twice(run)
    assert same_bits(weights(run), weights(unbroken))


def interrupt_after(step: int) -> api.Watcher:
    class Impatient(api.Watcher):
        def row(self, row: Row) -> None:
            if row.step == step:
                os.kill(os.getpid(), signal.SIGINT)

    return Impatient()


def test_answers_under_way_go_on_from_their_tokens(workshop: Workshop):
    """What they had sampled stays theirs, under the versions that sampled it."""
    long = ("loop.max_lag=1", "rollout.max_new_tokens=150", "rollout.stop=[]", "recovery.in_flight=resume")
    config = workshop.config("mid-answer", *SETTINGS, *long, "loop.steps=2", "rollout.max_running=5", reward="dense")
    run = workshop.directory / "mid-answer"
    assert not api.train(config, interrupt_after(1))["finished"]
    with Ledger.open(run) as ledger:
        serials = [serial for (serial,) in ledger.read("SELECT DISTINCT serial FROM partials")]
        under_way = [(serial, t) for serial in serials for t in read_partials(ledger.connection, serial)]
    partials = [(serial, t) for serial, t in under_way if t.spans and t.finish is FinishReason.ABORT]
    assert partials, "some answers were under way"
    assert api.resume(run)["finished"]
    assert audit(run) == []
    for serial, known in partials:
        of = f"serial = {serial} AND idx = {known.index} AND attempt = 2"
        for (later,) in select(run, f"SELECT spans FROM trajectories WHERE {of}"):
            first = known.spans[0]
            assert json.loads(later)[0][:2] == [first.version, first.start], "it begins with the span it had"
    lost = books(run).dropped.get("redone", Amount())
    assert lost.tokens == 0, "an interrupt loses nothing"


def test_a_resumed_run_keeps_its_reference(workshop: Workshop):
    settings = (*SETTINGS, "learner.kl_coef=0.1", "loop.steps=5")
    api.train(workshop.config("held", *settings, reward="dense"))
    config = workshop.config("paused-held", *settings, reward="dense")
    api.train(config, interrupt_after(4))
    run = workshop.directory / "paused-held"
    assert api.resume(run)["finished"]
    assert same_bits(weights(run), weights(workshop.directory / "held"))
    assert rows_of(run)[-1].kl_reference == rows_of(workshop.directory / "held")[-1].kl_reference > 0


def test_an_interrupted_run_goes_on_to_the_same_end(workshop: Workshop, unbroken: Path):
    summary = api.train(workshop.config("paused", *SETTINGS), interrupt_after(4))
    run = workshop.directory / "paused"
    assert summary["finished"] is False
    assert api.resume(run)["finished"] is True
    assert_nothing_lost_or_done_twice(run)
    assert same_bits(weights(run), weights(unbroken))
    kept = [timeless(row) for row in rows_of(run)]
    assert [row["loss"] for row in kept] == [row.loss for row in rows_of(unbroken)]


@pytest.mark.parametrize("content", ["absent", "empty", "without tables"])
def test_a_run_that_died_while_its_ledger_was_made_starts_anew(workshop: Workshop, unbroken: Path, content: str):
    config = workshop.config(f"unborn-{content.split()[0]}", *SETTINGS)
    run = prepare_run_dir(config)
    if content != "absent":
        (run / "ledger.sqlite").touch()
    if content == "without tables":
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    assert api.resume(run)["finished"]
    assert_nothing_lost_or_done_twice(run)
    assert same_bits(weights(run), weights(unbroken))

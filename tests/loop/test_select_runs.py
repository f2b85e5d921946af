"""Runs whose prompts are drawn by what is known of them: repeatable, and nothing lost by a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from kills import num_kills_that_hit
from tiny_runs import Workshop, rows_of, same_bits, select, weights

from headrace import api
from headrace.errors import DataError, RunError
from headrace.ledger.ledger import Ledger
from headrace.measured import Row
from headrace.prompts.select import EXPLORE
from headrace.runs.audit import audit
from headrace.runs.show import DataSet

SIGNAL = ("loop.steps=8", "recovery.every_steps=3", "prompts.select=signal")
CHOOSE = """
import json, os

def choose(known):
    with open(os.path.join(os.path.dirname(__file__), "asked.jsonl"), "a") as file:
        file.write(json.dumps([[k.id, k.seen, list(k.rewards), k.version] for k in known]) + "\\n")
    return [k.fields["answer"].endswith("7") - k.seen for k in known]

def fails_later(known):
    return [1 / (k.seen == 0) for k in known]
"""


def drawn(run: Path) -> list[str]:
    """The ids of the prompts by serial; every attempt at a serial is at the same prompt."""
    found = select(run, "SELECT DISTINCT serial, prompt_id FROM attempts ORDER BY serial")
    assert [serial for serial, _ in found] == list(range(len(found)))
    return [id for _, id in found]


@pytest.fixture(scope="module")
def unbroken(workshop: Workshop) -> Path:
    api.train(workshop.config("signal", *SIGNAL))
    return workshop.directory / "signal"


@pytest.mark.slow
def test_the_draw_follows_the_outcomes_and_not_their_order(workshop: Workshop, unbroken: Path):
    api.train(workshop.config("uniform", "loop.steps=8"))
    assert drawn(unbroken) != drawn(workshop.directory / "uniform")[: len(drawn(unbroken))]
    config = workshop.config("jittery", *SIGNAL, "reward.workers=3", reward="jittery")
    api.train(config)
    assert drawn(workshop.directory / "jittery") == drawn(unbroken), "rewards came in another order"
    assert same_bits(weights(workshop.directory / "jittery"), weights(unbroken))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills_s"), [("k0", [0.3, 0.5]), ("k1", [0.8, 0.4]), ("k2", [1.2, 0.9, 0.6])])
def test_a_killed_run_draws_the_same_prompts(workshop: Workshop, unbroken: Path, name: str, kills_s: list[float]):
    num_kills_that_hit(workshop, name, workshop.overrides(name, *SIGNAL), kills_s)
    run = workshop.directory / name
    assert audit(run) == []
    assert drawn(run) == drawn(unbroken)
    assert same_bits(weights(run), weights(unbroken))
    assert [row.loss for row in rows_of(run)] == [row.loss for row in rows_of(unbroken)]
    trained = "SELECT serial, COUNT(DISTINCT attempt) FROM trajectories WHERE state = 'trained' GROUP BY serial"
    assert all(count == 1 for _, count in select(run, trained))


class Impatient(api.Watcher):
    """Ctrl-C after every step."""

    def row(self, row: Row) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_interrupted_after_every_step_it_draws_the_same_prompts(workshop: Workshop, unbroken: Path):
    run = workshop.directory / "steps"
    done = api.train(workshop.config("steps", *SIGNAL), Impatient())["finished"]
    num = 0
    while not done:
        done, num = api.resume(run, Impatient())["finished"], num + 1
    assert num > 2
    assert drawn(run) == drawn(unbroken)
    assert same_bits(weights(run), weights(unbroken))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["requeue", "resume", "drop"])
def test_ahead_of_the_learner(workshop: Workshop, rule: str):
    name = f"ahead-{rule}"
    settings = (*SIGNAL, "loop.max_lag=2", f"recovery.in_flight={rule}")
    num_kills_that_hit(workshop, name, workshop.overrides(name, *settings), [0.6, 0.6])
    run = workshop.directory / name
    assert audit(run) == []
    assert [row.step for row in rows_of(run)] == list(range(1, 9))
    found = drawn(run)
    api.train(workshop.config(f"order-{rule}", "loop.steps=8", "loop.max_lag=2"))
    uniform = drawn(workshop.directory / f"order-{rule}")
    explored = found[::EXPLORE]
    assert explored == uniform[: len(explored)], "the known share follows the uniform order"


def test_a_function_of_the_users(workshop: Workshop):
    (workshop.directory / "mine.py").write_text(CHOOSE)
    choose = f"prompts.select={workshop.directory}/mine.py:choose"
    api.train(workshop.config("chosen", "loop.steps=2", choose))
    run = workshop.directory / "chosen"
    wanted = {f"p{i}" for i in range(46) if str(i + i % 7).endswith("7")}
    assert set(drawn(run)[: len(wanted)]) == wanted, "highest scores first"
    calls = [json.loads(line) for line in (workshop.directory / "asked.jsonl").read_text().splitlines()]
    assert all(seen == 0 and version is None for _, seen, _, version in calls[0])
    with Ledger.open(run) as ledger:
        outcomes = ledger.outcomes(range(4))
    told = {id: (version, known) for id, seen, known, version in calls[-1] if seen == 1}
    assert [told[id] for id in drawn(run)[:4]] == [(version, list(known)) for version, known in outcomes.values()]


def test_a_function_that_fails_later_ends_the_run_in_its_words(workshop: Workshop):
    (workshop.directory / "mine.py").write_text(CHOOSE)
    choose = f"prompts.select={workshop.directory}/mine.py:fails_later"
    with pytest.raises(DataError, match=r"prompts\.select = '.*mine\.py:fails_later' failed:(.|\n)*ZeroDivisionError"):
        api.train(workshop.config("fails", "loop.steps=2", choose))
    (workshop.directory / "mine.py").write_text(CHOOSE.replace("1 / (k.seen == 0)", "1.0"))
    with pytest.raises(RunError, match=r"prompts\.select was .* with code"):
        api.resume(workshop.directory / "fails")


def test_where_the_data_set_stands(workshop: Workshop, unbroken: Path):
    newest: dict[str, tuple[int, set[float]]] = {}
    for serial, id, reward in select(unbroken, "SELECT serial, prompt_id, reward FROM trajectories ORDER BY serial"):
        before, rewards = newest.get(id, (serial, set()))
        newest[id] = (serial, rewards | {reward} if before == serial else {reward})
    counts = [sum(rewards == wanted for _, rewards in newest.values()) for wanted in ({1.0}, {0.0, 1.0}, {0.0})]
    expected = "{} solved, {} learning, {} unsolved, {} not yet seen".format(*counts, 46 - sum(counts))
    standing = DataSet()
    assert [standing.standing(unbroken), standing.standing(unbroken)] == [expected, expected]
    assert counts[1] > 0
    assert sum(counts) < 46

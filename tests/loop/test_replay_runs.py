"""Groups of earlier steps, trained on again (`buffer.replay`): chosen, booked, audited, killed and resumed."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from kills import killed_runs
from tiny_runs import Workshop, rows_of, same_bits, select, weights

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError
from headrace.learner.learner import Learner
from headrace.ledger.database import FILE_NAME
from headrace.runs.audit import audit, books

LIMIT = 3
REPLAY = ("loop.steps=7", "recovery.every_steps=2", "loop.groups_per_step=4", f"buffer.replay=[3,{LIMIT}]")
TBA = ("learner.loss=tba", "learner.kl_coef=0.02", "learner.kl_in=reward")


def steps_of(run: Path) -> list[list[tuple[int, int]]]:
    told = [json.loads(groups) for (groups,) in select(run, "SELECT groups FROM steps ORDER BY step")]
    return [[(serial, attempt) for serial, attempt in groups] for groups in told]


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    api.train(workshop.config("replayed", *REPLAY, *TBA, reward="dense"))
    return workshop.directory / "replayed"


def test_each_step_trains_on_old_groups_too_and_on_none_too_often(run: Path):
    times: Counter[tuple[int, int]] = Counter()
    for number, groups in enumerate(steps_of(run)):
        old = [group for group in groups if times[group]]
        assert len(groups) - len(old) == 4
        assert len(old) == (3 if number else 0)
        newest = sorted((group for group, n in times.items() if n < LIMIT), reverse=True)[:2]
        assert set(newest) <= set(old), "half of them are the newest that may be trained on again"
        times.update(groups)
    assert max(times.values()) == LIMIT


def test_the_other_half_are_those_with_the_best_answers_far_above_the_rest(run: Path):
    query = "SELECT serial, attempt, MAX(reward) - AVG(reward) FROM trajectories WHERE state = 'trained' GROUP BY 1, 2"
    worth = {(serial, attempt): value for serial, attempt, value in select(run, query)}
    times: Counter[tuple[int, int]] = Counter()
    for groups in steps_of(run):
        free = sorted((group for group, n in times.items() if n < LIMIT), reverse=True)
        if old := [group for group in groups if times[group]]:
            (chosen,) = set(old) - set(free[:2])
            assert worth[chosen] == pytest.approx(max(worth[group] for group in free[2:]))
        times.update(groups)


def test_the_books_count_a_token_once_and_say_what_was_trained_on_again(run: Path):
    assert audit(run) == []
    again = Counter()
    seen: set[tuple[int, int]] = set()
    for step, groups in enumerate(steps_of(run), 1):
        for serial, attempt in seen.intersection(groups):
            query = f"SELECT SUM(num_tokens) FROM trajectories WHERE serial = {serial} AND attempt = {attempt}"
            again[step] += select(run, f"{query} AND state = 'trained'")[0][0]
        seen.update(groups)
    rows = rows_of(run)
    assert [row.again_tokens for row in rows] == [again[row.step] for row in rows]
    assert books(run).trained.tokens == sum(row.trained_tokens for row in rows)
    assert all(row.lag_max == 0 and row.num_groups == 4 for row in rows), "of what was new in the step"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            "UPDATE rows SET data = json_set(data, '$.again_tokens', 1) WHERE step = 5",
            "row 5 shows 1 tokens trained",
        ),
        ("UPDATE steps SET groups = '[[0,1],[0,1],[0,1],[0,1]]' WHERE step = 7", "group 0 was trained on"),
        ("UPDATE steps SET groups = (SELECT groups FROM steps WHERE step = 7) WHERE step = 2", "step 2 names group"),
    ],
)
def test_other_books_are_found_out(run: Path, tmp_path: Path, damage: str, told: str):
    copy = tmp_path / "copy"
    copy.mkdir()
    with closing(sqlite3.connect(run / FILE_NAME)) as source, closing(sqlite3.connect(copy / FILE_NAME)) as target:
        source.backup(target)
        target.execute(damage)
        target.commit()
    assert any(told in problem for problem in audit(copy)), audit(copy)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TBA, ("learner.epochs=2",)], ids=["tba", "updates"])
def test_a_killed_run_ends_with_the_bits_of_an_unbroken_one(workshop: Workshop, settings: tuple[str, ...]):
    for run, unbroken in killed_runs(workshop, f"replay-{len(settings)}", (*REPLAY, *settings)):
        assert audit(run) == []
        assert same_bits(weights(run), weights(unbroken))
        assert [serials(groups) for groups in steps_of(run)] == [serials(groups) for groups in steps_of(unbroken)]
        assert [row.again_tokens for row in rows_of(run)] == [row.again_tokens for row in rows_of(unbroken)]


def serials(groups: list[tuple[int, int]]) -> list[int]:
    return [serial for serial, _ in groups]


def test_groups_whose_tokens_may_be_gone_are_left_alone(workshop: Workshop):
    api.train(workshop.config("replay-forgetful", *REPLAY, "recovery.journal_steps=1", "recovery.keep=1"))
    run = workshop.directory / "replay-forgetful"
    assert audit(run) == []
    named = [group for groups in steps_of(run) for group in groups]
    assert len(named) == len(set(named)), "nothing is kept longer than its step"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["buffer.replay=[8,1]"], "never trained on again"),
        (["buffer.replay=[8,4]", "learner.loss=reinforce"], "nothing corrects for old samples"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], told: str):
    with pytest.raises(ConfigError) as error:
        load_config(None, words)
    assert told in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["1000", "0"])
def test_a_longer_memory_after_a_restart_finds_no_tokens_that_are_gone(workshop: Workshop, journal: str):
    name = f"replay-memory{journal}"
    short = ("recovery.journal_steps=1", "recovery.keep=1", "recovery.every_steps=1", "buffer.replay=[4,8]")
    api.train(workshop.config(name, *REPLAY, *short))
    run = workshop.directory / name
    api.resume(run, overrides=["loop.steps=10", f"recovery.journal_steps={journal}"])
    assert audit(run) == []
    assert rows_of(run)[-1].again_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["[3,2]", "[0,4]"])
def test_less_replay_after_a_restart_leaves_sound_books(workshop: Workshop, replay: str):
    name = f"replay-less{replay[1]}"
    api.train(workshop.config(name, *REPLAY))
    api.resume(workshop.directory / name, overrides=["loop.steps=9", f"buffer.replay={replay}"])
    assert audit(workshop.directory / name) == []


def test_groups_of_another_temperature_do_not_come_back(workshop: Workshop):
    """An answer does not keep its temperature: the learner takes that of the settings."""
    api.train(workshop.config("replay-cold", *REPLAY, "learner.lr=1e-12"))
    run = workshop.directory / "replay-cold"
    api.resume(run, overrides=["loop.steps=10", "rollout.temperature=2.0"])
    assert audit(run) == []
    assert all(row.mismatch_mean < 1e-5 for row in rows_of(run))
    assert rows_of(run)[-1].again_tokens > 0
    before = {group for groups in steps_of(run)[:7] for group in groups}
    assert not before.intersection(group for groups in steps_of(run)[7:] for group in groups)


def test_nothing_is_trained_on_again_in_a_skipped_step(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    stock, calls = Learner.finish, []

    def broken(self: Learner):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 3:
            next(p for p in self.policy.model.parameters() if p.grad is not None).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return stock(self)

    monkeypatch.setattr(Learner, "finish", broken)
    api.train(workshop.config("replay-skipped", *REPLAY))
    run = workshop.directory / "replay-skipped"
    (skipped,) = [row for row in rows_of(run) if row.skipped]
    assert (skipped.trained_tokens, skipped.again_tokens) == (0, 0)
    assert audit(run) == []

"""Runs held against each other at equal cost, and runs that are made for it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from test_cli import headrace, problem
from tiny_runs import Workshop, rows_of

from headrace.cli.runs import alternatives
from headrace.errors import ConfigError
from headrace.runs.compare import Cost, Curve, curve_of, sides_of


def curve(lag: int, seed: int, costs: list[float], scores: list[float], num_answers: int = 100) -> Curve:
    settings = {"loop.max_lag": str(lag), "run.seed": str(seed), "run.dir": f"{lag}-{seed}"}
    return Curve(settings=settings, costs=costs, scores=scores, num_answers=num_answers)


def test_seeds_are_one_side_and_the_best_comes_first():
    sides = sides_of(
        [
            curve(0, 0, [0, 100], [0.2, 0.4]),
            curve(0, 1, [0, 50, 200], [0.2, 0.3, 0.6]),  # at 100: 0.4
            curve(4, 0, [0, 100], [0.2, 0.8]),
        ],
        cost=100.0,
    )
    assert [side.name for side in sides] == ["loop.max_lag=4", "loop.max_lag=0"]
    assert [side.seeds for side in sides] == [["0"], ["0", "1"]]
    assert sides[0].scores == pytest.approx([0.35, 0.5, 0.65, 0.8])
    assert sides[1].scores == pytest.approx([0.25, 0.3, 0.35, 0.4])
    assert sides[0].reached == pytest.approx(100 / 3)  # 0.4, the other's last score
    assert sides[1].reached == pytest.approx(100)


def test_the_error_is_that_of_the_seeds_or_of_the_evaluation_whichever_is_larger():
    far, near = [curve(0, s, [0, 1], [0, p]) for s, p in enumerate((0.3, 0.5))], curve(1, 0, [0, 1], [0, 0.5])
    alike = [curve(2, s, [0, 1], [0, 0.5]) for s in range(4)]
    large = curve(3, 0, [0, 1], [0, 7.0])  # a reward of another scale, and one seed: nobody knows
    found = {side.name[-1]: side.error for side in sides_of([*far, near, *alike, large], cost=1.0)}
    assert found["0"] == pytest.approx(0.1)  # deviation 0.1414 over the root of two
    assert found["1"] == pytest.approx(0.05)  # sqrt(0.25 / 100)
    assert found["2"] == pytest.approx(0.025)
    assert math.isnan(found["3"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("my.toml", ["my.toml"]),
        ("loop.max_lag=0,1,4", ["loop.max_lag=0", "loop.max_lag=1", "loop.max_lag=4"]),
        ("learner.betas=[0.9,0.95],[0.8,0.9]", ["learner.betas=[0.9,0.95]", "learner.betas=[0.8,0.9]"]),
        ('prompts.system="a, b"', ['prompts.system="a, b"']),
        ("prompts.system='it, \"is\"',x", ["prompts.system='it, \"is\"'", "prompts.system=x"]),
        ("rollout.command=", ["rollout.command="]),
        ('rollout.stop=["]","x"],["y"]', ['rollout.stop=["]","x"]', 'rollout.stop=["y"]']),
        ("loop.max_lag=0 , 1", ["loop.max_lag=0", "loop.max_lag=1"]),
        ("prompts.system=it's a, b", ["prompts.system=it's a, b"]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_separate_values(word: str, expected: list[str]):
    assert alternatives(word) == expected


def test_nothing_between_two_commas_is_a_mistake():
    with pytest.raises(ConfigError, match="nothing between two commas"):
        alternatives("loop.max_lag=0,,1")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """Four runs, the words that made them, and what the command showed."""
    directory = tmp_path_factory.mktemp("sweep")
    workshop = Workshop(directory)
    words = [word for word in workshop.overrides("x", reward="dense") if not word.startswith(("run.dir", "learner.lr"))]
    words += [
        "learner.lr=0.001,0.00001",
        "run.seed=0,1",
        "run.dollars_per_hour=2",
        "--dir",
        str(directory / "runs"),
        "--at-once",
        "2",
    ]
    result = headrace("sweep", *words)
    assert result.exit_code == 0, result.output
    return directory / "runs", words, result.output


@pytest.mark.slow
def test_a_sweep_trains_with_every_combination_and_compares(
    swept: tuple[Path, list[str], str], monkeypatch: pytest.MonkeyPatch
):
    directory, words, shown = swept
    names = [f"learner.lr={lr},run.seed={seed}" for lr in ("0.001", "0.00001") for seed in (0, 1)]
    assert sorted(path.name for path in directory.iterdir()) == sorted(names)
    assert all(len(rows_of(directory / name)) == 3 for name in names)
    assert "4 runs at" in shown
    assert "learner.lr=0.001" in shown
    assert "± is one standard error" in shown
    monkeypatch.chdir(directory.parent)  # a run keeps absolute paths, whatever was typed
    again = headrace("sweep", *(word.replace(f"{directory.parent}/", "") for word in words))
    assert again.exit_code == 0
    assert "headrace train" not in again.output  # all of them are there
    assert again.output == shown[shown.index("4 runs at") :]


@pytest.mark.slow
def test_a_curve_ends_with_the_run_and_costs_what_was_spent(swept: tuple[Path, list[str], str]):
    run = swept[0] / "learner.lr=0.001,run.seed=0"
    rows, summary = rows_of(run), json.loads((run / "summary.json").read_text())
    found = curve_of(run, Cost.TOKENS)
    assert found.costs == (0.0, sum(row.generated_tokens for row in rows))
    assert found.scores == (summary["score_before"], summary["score_after"])
    hours = sum(row.wall_s for row in rows) / 3600
    assert curve_of(run, Cost.DEVICE_HOURS).costs[-1] == pytest.approx(hours)
    assert curve_of(run, Cost.DOLLARS).costs[-1] == pytest.approx(2 * hours)


@pytest.mark.slow
def test_compare_for_programs(swept: tuple[Path, list[str], str]):
    runs = sorted(swept[0].iterdir())
    told = json.loads(headrace("compare", *runs, "--at", "dollars", "--json").output)
    assert told["at"] == "dollars"
    assert {tuple(side["seeds"]) for side in told["sides"]} == {("0", "1")}
    assert "$" in headrace("compare", *runs[:2], "--at", "dollars").output


@pytest.mark.slow
def test_a_price_is_no_setting_that_runs_differ_in_unless_they_are_compared_by_it(
    swept: tuple[Path, list[str], str], tmp_path: Path
):
    runs = [tmp_path / run.name for run in sorted(swept[0].iterdir())[:2]]
    for run in runs:
        shutil.copytree(swept[0] / run.name, run)
    settings = runs[0] / "config.toml"
    settings.write_text(settings.read_text().replace("dollars_per_hour = 2.0", "dollars_per_hour = 4.0"))
    assert len(json.loads(headrace("compare", *runs, "--json").output)["sides"]) == 1
    assert len(json.loads(headrace("compare", *runs, "--at", "dollars", "--json").output)["sides"]) == 2
    settings.write_text(settings.read_text().replace("dollars_per_hour = 4.0", "dollars_per_hour = 0.0"))
    assert "set run.dollars_per_hour" in problem(headrace("compare", *runs, "--at", "dollars"))
    assert headrace("resume", runs[0], "loop.steps=4", "run.dollars_per_hour=3").exit_code == 0


@pytest.mark.slow
def test_mistakes_are_told_before_anything_runs(swept: tuple[Path, list[str], str], tmp_path: Path):
    directory, words, _ = swept
    run = next(directory.iterdir())
    assert "two runs or more" in problem(headrace("compare", run, run))
    assert "which values are to be tried" in problem(headrace("sweep", "loop.steps=3"))
    priceless = headrace("sweep", "loop.steps=3,4", "--at", "dollars", "--dir", tmp_path / "new")
    assert "needs the price of a device: run.dollars_per_hour=2.5" in problem(priceless)
    assert "run.dir: a sweep names" in problem(headrace("sweep", "loop.steps=3,4", "run.dir=x"))
    wrong = headrace("sweep", "loop.steps=3,many", "--dir", tmp_path / "new")
    assert 'loop.steps: expected a whole number at least 0; got "many"' in problem(wrong)
    assert not (tmp_path / "new").exists()
    other = headrace("sweep", *words, "loop.groups_per_step=2")
    assert "holds a run with another loop.groups_per_step" in problem(other)
    assert "is a value given twice?" in problem(headrace("sweep", "loop.steps=3,3", "--dir", tmp_path / "new"))
    for lr in ("0.001", "0.00001"):
        shutil.copytree(directory / f"learner.lr={lr},run.seed=0", tmp_path / "seeds" / f"learner.lr={lr}")
    words = [word for word in words[: words.index("--dir")] if not word.startswith("run.seed")]
    other = headrace("sweep", *words, "run.seed=4", "--dir", tmp_path / "seeds")
    assert "holds a run with another run.seed" in problem(other)

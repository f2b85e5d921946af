"""Finding reward functions and reading what they return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import RewardError
from headrace.reward.function import Mode, read_verdict, read_verdicts, resolve
from headrace.reward.worker import HEADER, _reply, score_of
from headrace.types import DropReason
from headrace.user_code import source_hash


def test_a_file_is_loaded_by_its_path(rewards: str) -> None:
    function = resolve(f"{rewards}:score")
    assert (function.name, function.mode) == ("score", "single")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("score", "single"),
        ("later", "async"),
        ("batch", "batch"),
        ("async_batch", "batch"),
        ("with_default", "single"),
    ],
)
def test_the_parameter_decides_how_it_is_called(rewards: str, name: str, mode: Mode) -> None:
    assert resolve(f"{rewards}:{name}").mode is mode


def test_a_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards.py").write_text("def score(completion):\n    return 2.0\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("user_rewards:score").call(None) == 2.0


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "user_neighbour.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text("from user_neighbour import VALUE\n\ndef score(c):\n    return VALUE\n")
    assert resolve(f"{tmp_path}/mine.py:score").call(None) == 4.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scor", "did you mean 'score'"),
        ("zzz", "has no function 'zzz'$"),
        ("NUMBER", "is a int, not a function"),
        ("two", r"wrong parameters \(completion, answer\)"),
        ("none_at_all", "wrong parameters"),
    ],
)
def test_a_wrong_function_is_named(rewards: str, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(f"{rewards}:{name}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exat", "did you mean 'exact'"),
        ("no_such_module_at_all:score", "there is no module 'no_such_module_at_all'"),
        ("headrace.nothing:score", "there is no module 'headrace.nothing'"),
        ("there/is/no.py:score", "there is no file .*there/is/no.py"),
        (":score", "expected 'module:function'"),
        ("module:", "expected 'module:function'"),
        ("regex", "not built in; there are exact, regex:PATTERN, math"),
        ("regex:", "expected 'module:function'"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(spec)


@pytest.mark.parametrize("text", ["import user_missing_library", "1 / 0", "def (", "raise SystemExit(1)"])
def test_code_that_cannot_be_imported_shows_its_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(RewardError, match="cannot be imported:\n"):
        resolve(f"{tmp_path}/bad.py:score")


@pytest.mark.parametrize("verdict", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_numbers_of_all_kinds_are_verdicts(verdict: Any) -> None:
    score = read_verdict(verdict, "mine")
    assert (score.reward, score.parts, score.failure) == (1.0, {"mine": 1.0}, None)
    assert type(score.reward) is float


def test_parts_are_summed() -> None:
    score = read_verdict({"correct": 1, "format": 0.25}, "mine")
    assert score.reward == 1.25
    assert score.parts == {"correct": 1.0, "format": 0.25}


def test_a_part_may_be_given_step_by_step() -> None:
    score = read_verdict({"format": 0.25, "steps": [[5, 1], (9, np.float32(-0.5))]}, "mine")
    assert (score.reward, score.parts) == (0.75, {"format": 0.25, "steps": 0.5})
    assert score.steps == ((5, 1.0), (9, -0.5))
    assert read_verdict({"steps": 3}, "mine").steps == ()
    empty = read_verdict({"steps": [[np.int64(0), 0.5], [4, 1.0], [4, 2.0]]}, "mine")
    assert empty.steps == ((0, 0.5), (4, 1.0), (4, 2.0)), "a step may be empty"
    assert read_verdict({"steps": []}, "mine").parts == {"steps": 0.0}
    reply = json.loads(_reply(0, score, 0.5)[HEADER.size :])
    assert score_of(reply) == score, "also from a process of its own"
    assert score_of(reply | {"steps": [[5, 9.0]]}).failure is DropReason.REWARD_ERROR


@pytest.mark.parametrize(
    "steps",
    [[1.0], [[1, 2.0, 3]], [[-1, 1.0]], [[4, 1.0], [3, 1.0]], [["4", 1.0]], [[4.5, 1.0]], [[4, None]],
     [[4, float("nan")]], [[None, 1.0]], {"4": 1.0}],
)  # fmt: skip
def test_steps_that_make_no_sense_are_a_failure(steps: Any) -> None:
    score = read_verdict({"right": 1.0, "steps": steps}, "mine")
    assert score.failure is DropReason.REWARD_ERROR
    assert "part 'steps'" in score.detail
    assert "ends whole and not falling" in score.detail


@pytest.mark.parametrize(
    ("verdict", "named"),
    [
        (None, "returned None"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**400, "int"),
        ("1.0", "'1.0' (str)"),
        ([1.0], "[1.0] (list)"),
        (np.ones(2), "ndarray"),
        ({}, "{} (dict)"),
        ({"correct": None}, "part 'correct'"),
        ({"a": 1.0, "b": float("nan")}, "part 'b'"),
        ({1: 1.0}, "part 1"),
        ({"a": 1e308, "b": 1e308}, "no finite sum"),
    ],
)
def test_anything_else_is_a_failure_that_names_it(verdict: Any, named: str) -> None:
    score = read_verdict(verdict, "mine")
    assert score.failure is DropReason.REWARD_ERROR
    assert score.reward is None
    assert named in score.detail


def test_a_batch_has_one_verdict_each() -> None:
    scores = read_verdicts([1.0, None, {"a": 2.0}], "mine", 3)
    assert [score.reward for score in scores] == [1.0, None, 2.0]
    assert [score.reward for score in read_verdicts(np.array([1.0, 2.0]), "mine", 2)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("verdicts", "named"), [([1.0], "1 verdicts for 2"), (1.0, "1.0 (float)"), (None, "None"), ("ab", "str")]
)
def test_a_batch_of_the_wrong_shape_fails_for_all(verdicts: Any, named: str) -> None:
    scores = read_verdicts(verdicts, "mine", 2)
    assert [score.failure for score in scores] == [DropReason.REWARD_ERROR] * 2
    assert named in scores[0].detail


def test_the_source_hash_follows_the_file(rewards: str) -> None:
    before = source_hash(f"{rewards}:score")
    Path(rewards).write_text("x = 1")
    assert source_hash(f"{rewards}:score") != before
    assert source_hash("exact") == source_hash("some.module:score") == source_hash("no/file.py:f") == ""

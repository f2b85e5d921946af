"""The built-in reward functions."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from reward_completions import completion

from headrace.errors import MissingExtraError, RewardError
from headrace.reward.function import resolve, tagged_answer


@pytest.mark.parametrize(("text", "answer", "reward"), [(" 21\n", 21, 1.0), ("21", " 21 ", 1.0), ("21.", "21", 0.0)])
def test_exact(text: str, answer: Any, reward: float) -> None:
    assert resolve("exact").call(completion(text, answer=answer)) == reward
    assert resolve("exact", answer_field="gold").call(completion(text, gold=answer)) == reward


def test_a_missing_answer_field_is_an_error_that_lists_the_fields() -> None:
    with pytest.raises(RewardError, match=r"'answer' is not a field of the prompt; there are: question, gold"):
        resolve("exact").call(completion("21", question="", gold=""))


@pytest.mark.parametrize(
    ("pattern", "text", "reward"),
    [
        (r"\d+", "12 then 21", 1.0),
        (r"\d+", "21 then 12", 0.0),
        (r"answer: *(\d+)", "answer: 3, answer: 21.", 1.0),
        (r"answer: *( \d+ )?", "answer: ", 0.0),
        (r"\[(.*?)\]", "[ 21 ]", 1.0),
        (r"\d+", "none", 0.0),
    ],
)
def test_regex_takes_the_last_match(pattern: str, text: str, reward: float) -> None:
    assert resolve("regex", pattern=pattern).call(completion(text, answer="21")) == reward


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(RewardError, match="not a regular expression"):
        resolve("regex", pattern="(")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> no: <answer> 2\n</answer> done", "2"),
        ("see <answer> I think <answer>3</answer>", "3"),
        (" 4 \n", "4"),
        ("<answer>5", "<answer>5"),
        ("6</answer>", "6</answer>"),
    ],
)
def test_the_tagged_answer_is_the_last_one(text: str, answer: str) -> None:
    assert tagged_answer(text) == answer


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_reasoning_gym_scores_with_the_task() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    call = resolve("reasoning-gym").call
    fields = {"reasoning_gym_task": "leg_counting", "entry": entry}
    assert call(completion(f"So <answer>{entry['answer']}</answer>", **fields)) == 1.0
    assert call(completion(f" {entry['answer']} ", **fields)) == 1.0
    assert call(completion("<answer>-1</answer>", **fields)) == 0.0
    with pytest.raises(RewardError, match="no task 'leg_cutting'"):
        call(completion("1", reasoning_gym_task="leg_cutting", entry=entry))
    with pytest.raises(RewardError, match="has no field 'reasoning_gym_task'"):
        call(completion("1"))


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"It is $\frac{1}{2}$.", "0.5", 1.0),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
        (r"2\sqrt{3}", r"2\sqrt{3}", 1.0),
        ("$1+x^2$", "x^2+1", 1.0),
        ("the answer is 1000", "1,000", 1.0),
        ("the answer is 7", "8", 0.0),
        ("I do not know", "8", 0.0),
    ],
)
def test_math(text: str, answer: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert resolve("math").call(completion(text, answer=answer)) == reward


def test_an_expected_answer_without_mathematics_is_an_error() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="no expression in the expected answer"):
        resolve("math").call(completion("1", answer=""))


@pytest.mark.parametrize(("name", "module"), [("math", "math_verify"), ("reasoning-gym", "reasoning_gym")])
def test_a_missing_library_names_the_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"headrace.reward.builtin_{module}", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[tasks\]'"):
        resolve(name)

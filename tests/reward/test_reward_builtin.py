"""The built-in reward functions."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from reward_completions import completion

from headrace.errors import MissingExtraError, RewardError
from headrace.reward.function import resolve


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
    assert resolve(f"regex:{pattern}").call(completion(text, answer="21")) == reward


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(RewardError, match="not a regular expression"):
        resolve("regex:(")


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


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "headrace.reward.builtin_math_verify", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[tasks\]'"):
        resolve("math")

import subprocess
import sys

import pytest

from headrace.recipes.arithmetic import score, tasks, work
from headrace.types import Completion


def completion(text: str, answer: str) -> Completion:
    return Completion(prompt="", text=text, fields={"answer": answer}, num_tokens=1, finish="eos")


@pytest.mark.parametrize(
    ("left", "right", "slips", "worked"),
    [
        (47, 85, [0, 0, 0], "7+5=12,4+8+1=13;132"),
        (5, 120, [0, 0, 0], "5+0=5,0+2=2,0+1=1;125"),
        (0, 0, [0, 0, 0], "0+0=0;0"),
        (999, 1, [0, 0, 0], "9+1=10,9+0+1=10,9+0+1=10;1000"),
        # a slip changes no carry: 7+5 becomes 11, 9+0 becomes 8 and not 10, 9+1 becomes 11 and not 9
        (47, 85, [-1, 0, 0], "7+5=11,4+8+1=13;131"),
        (49, 10, [1, 0, 0], "9+0=8,4+1=5;58"),
        (49, 11, [-1, 0, 0], "9+1=11,4+1+1=6;61"),
        (0, 10, [-1, 0, 0], "0+0=1,0+1=1;11"),
        (99, 99, [0, 1, 0], "9+9=18,9+9+1=18;188"),
    ],
)
def test_worked_solution(left, right, slips, worked):
    assert work(left, right, slips) == worked


def test_the_teacher_is_hasty_in_every_other_column():
    wrong = total = 0
    for record in tasks(count=3000, seed=3):
        left, right = map(int, record["prompt"].rstrip("=").split("+"))
        assert record["answer"] == str(left + right)
        steps, _, answer = record["worked"].partition(";")
        errors = [abs(eval(step.partition("=")[0]) - int(step.partition("=")[2])) for step in steps.split(",")]
        assert max(errors) <= 1
        assert any(errors) == (answer != record["answer"])
        wrong, total = wrong + sum(errors), total + len(errors)
        assert len(record["worked"]) < 48
    assert 0.47 < wrong / total < 0.53


def test_solutions_without_slips_are_right():
    for left, right in [(0, 9), (9, 9), (95, 5), (123, 877), (999, 999), (1, 999)]:
        assert score(completion(work(left, right, [0, 0, 0]), str(left + right))) == 1.0


def test_records_follow_from_seed_and_position_alone():
    few, many, other = (tasks(count=n, seed=s) for n, s in ((10, 0), (1000, 0), (1000, 1)))
    assert few == many[:10] != other[:10]
    assert len({len(record["worked"]) for record in many[:200]}) > 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7+5=12;132", 1.0), (";132", 1.0), ("132", 0.0), ("1;132;133", 0.0), ("1;132 ", 0.0), ("", 0.0), ("132;", 0.0)],
)
def test_score(text, expected):
    assert score(completion(text, "132")) == expected


def test_scoring_needs_no_torch():
    code = "import sys, headrace.recipes.arithmetic; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

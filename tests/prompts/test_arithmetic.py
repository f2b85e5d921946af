import subprocess
import sys

import pytest

from headrace.prompts.arithmetic import ArithmeticSource, Problem, score
from headrace.types import Completion


def completion(text: str, answer: str) -> Completion:
    return Completion(prompt="", text=text, fields={"answer": answer}, num_tokens=1, finish="eos")


@pytest.mark.parametrize(
    ("problem", "prompt", "worked"),
    [
        (Problem(47, "+", 85), "47+85=", "7+5=12,4+8+1=13;132"),
        (Problem(85, "-", 47), "85-47=", "15-7=8,8-4-1=3;38"),
        (Problem(100, "-", 99), "100-99=", "10-9=1,10-9-1=0,1-0-1=0;1"),
        (Problem(5, "+", 1203), "5+1203=", "5+3=8,0+0=0,0+2=2,0+1=1;1208"),
        (Problem(0, "-", 0), "0-0=", "0-0=0;0"),
    ],
)
def test_worked_solution(problem, prompt, worked):
    assert (problem.prompt, problem.worked) == (prompt, worked)


def test_worked_solutions_are_right_everywhere():
    for record in map(ArithmeticSource(count=3000, seed=3).__getitem__, range(3000)):
        steps, _, answer = record["worked"].partition(";")
        assert answer == record["answer"] == str(eval(record["prompt"].rstrip("=").replace("=", "")))
        for step in steps.split(","):
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
        assert not answer.startswith("-")
        assert len(record["worked"]) < 64
        assert score(completion(record["worked"], record["answer"])) == 1.0


def test_records_follow_from_seed_and_position_alone():
    few, many, other = (ArithmeticSource(count=n, seed=s) for n, s in ((10, 0), (1000, 0), (1000, 1)))
    assert [few[i] for i in range(10)] == [many[i] for i in range(10)]
    assert [few[i] for i in range(10)] != [other[i] for i in range(10)]
    assert len({len(many[i]["worked"]) for i in range(200)}) > 10
    with pytest.raises(IndexError):
        few[10]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7+5=12;132", 1.0), (";132", 1.0), ("132", 0.0), ("1;132;133", 0.0), ("1;132 ", 0.0), ("", 0.0), ("132;", 0.0)],
)
def test_score(text, expected):
    assert score(completion(text, "132")) == expected


def test_scoring_needs_no_torch():
    code = "import sys, headrace.prompts.arithmetic; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

import gzip
import itertools
import json
import operator
import re
import shlex
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hand_made import group_of, trajectory
from needs import needs_sandbox
from typer.testing import CliRunner

from headrace import Done
from headrace.cli import app
from headrace.config_file import load_config
from headrace.errors import DataError
from headrace.prompts.source import open_source
from headrace.recipes import countdown, gsm8k, guess, mbpp
from headrace.recipes.code_sandbox import score
from headrace.recipes.python_tool import PythonTool
from headrace.reward.function import resolve
from headrace.types import Completion, FinishReason, Prompt, Turn

RECIPES = sorted((Path(__file__).parent.parent / "src" / "headrace" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_says_what_it_is(path):
    load_config(path)
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_recipes_are_found():
    assert {"code_sandbox", "demo", "smollm2"} <= {path.stem for path in RECIPES}


ANSWERS = {
    "Here:\n```python\ndef solve(x):\n    return x * 6\n```\nIt multiplies.": 1.1,
    "def solve(x): return x * 6": 1.1,
    "```\ndef solve(x):\n    return 102\n": 0.35,
    "```python\ndef solve(x): return x * 6\nprint('noise')\n```": 1.1,
    "def solve(x): return 1j": 0.0,
    "def solve(x):\n  while True: pass": 0.0,
    "def solve(x): return open('/etc/shadow').read()": 0.0,
    "import sys; print('[-54, -84, 102, 96]', flush=True); sys.exit()": 1.1,  # it cannot know them: they are not there
    "print('[' * 100_000)": 0.0,
    "I do not know": 0.0,
}


@needs_sandbox
def test_code_is_rewarded_for_what_it_returns():
    fields = {"calls": [[-9], [-14], [17], [16]], "results": [-54, -84, 102, 96]}
    for text, reward in ANSWERS.items():
        parts = score(Completion(prompt="", text=text, fields=fields, num_tokens=9, finish="eos"))
        assert sum(parts.values()) == pytest.approx(reward), text


@needs_sandbox
def test_a_tool_runs_programs_and_the_last_word_is_judged():
    tool = PythonTool()
    tool.start(Prompt(id="p", text="2 + 3?", token_ids=np.array([1]), fields={"answer": "<<2+3=5>>5\n#### 5"}))
    assert tool.python("print(2 + 3)") == "5\n"
    assert "ZeroDivisionError" in tool.python("1 / 0")
    assert tool.python("import os; os.kill(os.getpid(), 11)").startswith("crash: ")
    for answer, reward in {"#### 5": 1.0, "It is 6": 0.0, "I give up": 0.0}.items():
        with pytest.raises(Done) as ended:
            tool.reply(answer)
        assert ended.value.reward == reward


FUNCTIONS = {
    "```python\ndef add(a, b):\n    return a + b\n```": 1.0,
    "def add(a, b): return a - b": 0.0,
    "import sys; sys.exit()": 0.0,
    "import os; os._exit(0)": 0.0,
    "def add(a, b):\n    print('[1, 2]'); return a + b": 1.0,
    "def add(a, b):\n    import os; os.kill(os.getpid(), 11)": 0.0,
}


@needs_sandbox
def test_a_function_has_to_pass_its_tests():
    fields = {"before": "import math", "tests": "assert add(1, 2) == 3\nassert add(0, math.inf) == math.inf"}
    for text, reward in FUNCTIONS.items():
        completion = Completion(prompt="", text=text, fields=fields, num_tokens=9, finish="eos")
        assert mbpp.score(completion) == reward, text


def test_problems_are_read_with_what_a_function_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    doc = {"text": "Add.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "test_setup_code": ""}
    head = "import math\n\ndef help(): ...\n\ndef area(r):\n"
    human = {"entry_point": "area", "prompt": head, "test": "def check(f): assert f(0) == 0"}
    for path, record in ((mbpp.MBPP, {"doc": doc}), (mbpp.HUMANEVAL, human)):
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(json.dumps(record).encode()))
    (asked,) = mbpp.problems(5, 0)
    assert doc["test_list"][0] in asked["prompt"]
    assert doc["test_list"][1] not in asked["prompt"]
    (held_out,) = mbpp.humaneval(5, 0)
    assert held_out["before"] == "import math\n\ndef help(): ...\n\n"
    assert held_out["tests"].endswith("check(area)")


SOLUTIONS = {
    ("She has 3 + 4 = 7.\n#### 7", "... <<3+4=7>>7\n#### 7"): 1.0,
    ("So it costs $1,250.00.", "#### 1,250"): 1.0,
    ("It is -3 degrees", "#### -3"): 1.0,
    ("#### 7\nor was it 8?", "#### 7"): 0.0,
    ("I do not know", "#### 7"): 0.0,
    ("1" * 400, "#### 7"): 0.0,
}


@pytest.mark.parametrize(("answer", "solution"), SOLUTIONS)
def test_the_last_number_is_the_answer(answer: str, solution: str):
    completion = Completion(prompt="", text=answer, fields={"answer": solution}, num_tokens=9, finish="eos")
    assert gsm8k.score(completion) == SOLUTIONS[answer, solution]


EXPRESSIONS = {
    "2*3*4": 1.0,
    "It is: (4 * 3) * 2 = 24": 1.0,
    "1 + 2\n`4 * (2 * 3)`.": 1.0,
    "2 * 3 * 4\n2 + 3": 0.0,  # the last one counts
    "2 * 3 * 4 * 1": 0.0,
    "24": 0.0,
    "2 ** 3 * 4": 0.0,
    "4 / (2 - 2)": 0.0,
    "((2 * 3 * 4": 0.0,
    "1" + "+" * 5000: 0.0,
}


@pytest.mark.parametrize("answer", EXPRESSIONS, ids=lambda text: text[:20])
def test_an_expression_must_have_the_numbers_and_the_value(answer: str):
    fields = {"numbers": [3, 2, 4], "target": 24}
    completion = Completion(prompt="", text=answer, fields=fields, num_tokens=9, finish="eos")
    assert countdown.score(completion) == EXPRESSIONS[answer]


OPERATORS = (operator.add, operator.sub, operator.mul)


def test_every_countdown_can_be_solved():
    for problem in countdown.problems(200, seed=1):
        orders = itertools.permutations(map(Fraction, problem["numbers"]))
        values = {g(f(a, b), c) for a, b, c in orders for f in OPERATORS for g in OPERATORS}
        assert problem["target"] in values - {sum(problem["numbers"])}
        assert str(problem["target"]) in problem["prompt"]


# ---- recipes for models that fit no single GPU: planned and simulated

PLANNED = [path for path in RECIPES if "headrace plan" in path.read_text(encoding="utf-8")]


def commands_in(path: Path, name: str) -> list[list[str]]:
    found = re.findall(rf"#     headrace ({name} .*)", path.read_text(encoding="utf-8"))
    return [shlex.split(one.replace("recipes/", f"{path.parent}/")) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_a_recipe_for_a_cluster_is_the_plan_that_it_names(path: Path):
    ((*plan,), (*simulate,)) = (*commands_in(path, "plan"), *commands_in(path, "simulate"))
    best = json.loads(CliRunner().invoke(app, [*plan, "--json"]).stdout)["plans"][0]
    config = load_config(path)
    settings = best["settings"]
    if config.episode.environment:  # rollout.max_new_tokens is a turn's there, and the plan knows episodes only
        settings = [one for one in settings if not one.startswith("rollout.max_new_tokens=")]
    assert load_config(path, settings) == config
    (found,) = json.loads(CliRunner().invoke(app, [*simulate, "--steps", "5", "--json"]).stdout)["simulated"]
    assert found["step_s"] == pytest.approx(best["step_s"], rel=0.4)


def test_there_are_recipes_for_clusters():
    names = {"rlvr_7b", "rlvr_32b", "reasoning_70b", "mixture_30b", "long_cot_7b", "agent_tools"}
    assert {path.stem for path in PLANNED} == names


GYM = "src/headrace/recipes/reasoning_gym_task.py"


def test_a_task_of_reasoning_gym_makes_prompts_and_scores_answers():
    pytest.importorskip("reasoning_gym")
    records = open_source(f"{GYM}:leg_counting", count=6, seed=0)
    again, other = (open_source(f"{GYM}:leg_counting", count=6, seed=seed) for seed in (0, 1))
    assert again[2] == records[2] != other[2]
    json.dumps(records[2])
    judge = resolve(f"{GYM}:score").call
    answer = str(records[2]["answer"])
    answers = (
        f"So <answer>{answer}</answer>",
        f"<answer>0</answer> no: <answer> {answer}\n</answer> done",
        f" {answer} ",
    )
    for text, reward in [*((text, 1.0) for text in answers), ("<answer>-1</answer>", 0.0), ("6</answer>", 0.0)]:
        assert judge(Completion(prompt="", text=text, fields=records[2], num_tokens=1, finish="eos")) == reward


@pytest.mark.parametrize(
    ("task", "told"), [("leg_countin", "no task 'leg_countin'; nearest: leg_counting"), ("composite", "failed")]
)
def test_a_task_that_cannot_be_made_is_told(task: str, told: str):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=told):
        open_source(f"{GYM}:{task}", count=6, seed=0)


def test_guesses_are_rewarded_for_how_evenly_they_divide():
    game = guess.Guess()
    prompt = Prompt(id="p0", text="", token_ids=np.array([1]), fields={"n": 50})

    def said(x: int | None) -> Turn:
        replies = () if x is None or x == 50 else (game.guess(x),)
        return Turn(start=0, end=0, finish=FinishReason.EOS, replies=replies)

    def played(guesses: list[int | None], reward: float) -> list[float]:
        game.start(prompt)
        answer = replace(trajectory(reward=reward), turns=tuple(map(said, guesses)))
        return guess.evenness(group_of(answer))[0]

    assert played([32, 48, 50], 1.0) == pytest.approx([1 - 1 / 64, 1 - 1 / 32, 1.0])
    assert played([1, 64, 32], 0.0) == pytest.approx([1 / 64, 1 / 63, 1 - 1 / 62])
    assert played([32, 32, 10], 0.0) == pytest.approx([1 - 1 / 64, 0.0, 0.0])  # these were ruled out
    assert played([32, None], 0.0) == pytest.approx([1 - 1 / 64, 0.0])  # a malformed call

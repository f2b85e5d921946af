from pathlib import Path

import pytest

from headrace import sandbox
from headrace.config_file import load_config
from headrace.errors import SandboxError
from headrace.recipes import gsm8k
from headrace.recipes.code_sandbox import score
from headrace.types import Completion

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


def test_code_is_rewarded_for_what_it_returns():
    try:
        sandbox.check_system()
    except SandboxError as error:
        pytest.skip(str(error))
    fields = {"calls": [[-9], [-14], [17], [16]], "results": [-54, -84, 102, 96]}
    for text, reward in ANSWERS.items():
        parts = score(Completion(prompt="", text=text, fields=fields, num_tokens=9, finish="eos"))
        assert sum(parts.values()) == pytest.approx(reward), text


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

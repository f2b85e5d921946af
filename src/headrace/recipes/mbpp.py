"""Prompts and reward of mbpp.toml: functions that have to pass their tests.

The tests run after the answer's code in one process of the sandbox. It has passed if a word that is drawn anew for each
answer is printed after them, so code that ends the program early, or prints what a test would, gains nothing.
"""

from __future__ import annotations

import gzip
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.recipes.code_sandbox import code_in
from headrace.sandbox import run
from headrace.types import Completion

MBPP, HUMANEVAL = Path("data/mbpp/requests.jsonl.gz"), Path("data/humaneval/humaneval.jsonl.gz")


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """MBPP: a task in words, and one of its tests to tell the function's name."""
    for record in records(MBPP)[:count]:
        doc = record["doc"]
        shown = f"```python\n{doc['test_list'][0]}\n```"
        asked = f"{doc['text']} It has to pass this test:\n{shown}\nAnswer with the code alone."
        yield {"prompt": asked, "before": doc["test_setup_code"], "tests": "\n".join(doc["test_list"])}


def humaneval(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """HumanEval: the head of a function, to be written out whole."""
    for record in records(HUMANEVAL)[:count]:
        name, head = record["entry_point"], record["prompt"]
        asked = f"Complete this function. Answer with the whole code alone.\n```python\n{head}```"
        before = head[: head.index(f"def {name}")]  # what it imports, and functions that it may use
        yield {"prompt": asked, "before": before, "tests": f"{record['test']}\ncheck({name})"}


def score(completion: Completion) -> float:
    """One if all tests pass."""
    fields, word = completion.fields, secrets.token_hex(8)
    code = f"{fields['before']}\n{code_in(completion.text)}\n{fields['tests']}\nprint('{word}')"
    return float(run(code, timeout_s=5, memory_mb=256).stdout.endswith(f"{word}\n"))


def records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: python benchmarks/fetch.py {path.parent.name}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]

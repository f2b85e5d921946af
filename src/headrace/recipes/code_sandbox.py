"""The reward of code_sandbox.toml: run the answer's function in a sandbox, and compare what it returns.

The expected values never enter the sandbox, so the code cannot look them up.
"""

from __future__ import annotations

import json
import re
from typing import Any

from headrace.sandbox import run
from headrace.types import Completion

CALLS = """
import json, sys
print(json.dumps([solve(*arguments) for arguments in json.load(sys.stdin)]))
"""


def score(completion: Completion) -> dict[str, float]:
    """The share of calls with the right result, and a little for code that ran at all."""
    ran = run(
        code_in(completion.text) + CALLS, stdin=json.dumps(completion.fields["calls"]), timeout_s=3, memory_mb=256
    )
    found, expected = results(ran.stdout), completion.fields["results"]
    right = [value == wanted for value, wanted in zip(found, expected, strict=False)]
    return {"right": sum(right) / len(expected), "ran": 0.1 * (ran.exit_code == 0)}


def code_in(text: str) -> str:
    """The first block of code, or all of it where there is none."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return block[1] if block else text


def results(stdout: str) -> list[Any]:
    """What the last line holds, if it is what CALLS prints."""
    try:
        found = json.loads(stdout.rstrip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []

"""An agent with a tool: problems in words, and Python in a sandbox to work them out with. See agent_tools.toml."""

from __future__ import annotations

from typing import Any

from headrace import Done
from headrace.recipes.gsm8k import NUMBER, value
from headrace.sandbox import run

MOST_SHOWN = 2000  # characters of what a program prints


class PythonTool:
    """Ends with the first answer that calls no tool; its last number counts."""

    max_turns = 8

    def start(self, prompt: Any) -> None:
        self.solution = prompt.fields["answer"].rpartition("####")[2]

    def python(self, code: str) -> str:
        """Run a Python program and see what it prints.

        Args:
            code: the whole program; nothing is kept from one to the next
        """
        ran = run(code, timeout_s=5, memory_mb=256)
        shown = ran.stdout[-MOST_SHOWN:] or ran.stderr[-MOST_SHOWN:] or "it printed nothing"
        return f"{ran.failure}: {shown}" if ran.failure else shown

    def reply(self, text: str) -> None:
        found = NUMBER.findall(text)
        raise Done("", reward=float(bool(found) and value(found[-1]) == value(self.solution)))

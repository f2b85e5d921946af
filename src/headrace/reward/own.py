"""A reward function that is given as a Python object: how worker processes get it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.reward.function import Setup, own_function
from headrace.user_code import source_hash


def shipped(function: Callable[[Any], Any], setup: Setup) -> tuple[Setup, str]:
    """The setup for workers that call `function`, or why there can be none."""
    setup = replace(setup, function=own_function(function).name)
    if getattr(function, "__module__", "") == "__main__":  # a worker has another main module
        return _from_script(function, setup)
    try:
        return replace(setup, pickled=pickle.dumps(function)), ""
    except Exception as error:  # pickling runs the object's own code
        return setup, f"it cannot be pickled ({error})"


def _from_script(function: Callable[[Any], Any], setup: Setup) -> tuple[Setup, str]:
    """A worker imports the script, which must not train again: it needs a main guard."""
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "")
    names = [name for name, value in vars(main).items() if value is function]
    if not names or not path.is_file():
        return setup, "it is in no file that could be imported"
    tests = [ast.unparse(node.test) for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.If)]
    if not any("__name__" in test for test in tests):
        return setup, f"{path} trains when it is imported, as it has no line \"if __name__ == '__main__':\""
    return replace(setup, function=f"{path.resolve()}:{names[0]}"), ""


def digest(setup: Setup, function: Callable[[Any], Any] | None) -> str:
    """Equal for two runs only if their functions are; of one whose content is not known, never."""
    if not setup.pickled:
        return source_hash(setup.function) if function is None or ":" in setup.function else os.urandom(16).hex()
    source = b""
    with suppress(OSError, TypeError):  # built in, or made at run time
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
        source = Path(file or "").read_bytes()
    return hashlib.sha256(setup.pickled + source).hexdigest()

"""Importing headrace leaves the process as it was: a library's import must not decide for its user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# What other libraries do when they are imported is not ours: they come first, then the look around, then headrace.
LIBRARIES = """
    torch torch.distributed.checkpoint.hf_storage torch.distributed.fsdp transformers huggingface_hub pydantic typer
    rich datasets pyarrow.parquet reasoning_gym math_verify peft gguf ray nicegui
    tensorboard.summary.writer.event_file_writer
"""
SCRIPT = """
import importlib, logging, os, pkgutil, sys, warnings

for library in sys.argv[1].split():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(library)
    except ImportError:
        pass  # an optional one

from transformers import AutoModelForCausalLM  # loads more of itself
from transformers.utils import logging as transformers_logging
import torch

def look():
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    return {
        "environment": dict(os.environ),
        "levels": {logger.name: logger.level for logger in loggers if logger.level},
        "handlers": {logger.name: list(logger.handlers) for logger in loggers if logger.handlers},
        "warnings": list(warnings.filters),
        "verbosity": transformers_logging.get_verbosity(),
        "progress bars": transformers_logging.is_progress_bar_enabled(),
        "directory": os.getcwd(),
        "threads": torch.get_num_threads(),
        "numbers": (torch.get_default_dtype(), torch.initial_seed(), torch.are_deterministic_algorithms_enabled()),
        "path": list(sys.path),
    }

def compare(before, what):
    for name, value in look().items():
        if value != before[name]:
            print(f"{what} changed {name}: {before[name]} -> {value}")

before = look()
import headrace
compare(before, "headrace")
imported = 0
for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in ("triton", "wandb", "nicegui", "ray"):
            raise
        continue
    imported += 1
    compare(before, module.name)
print("imported", imported)
"""


# in the end it is shown that each of these would have been noticed
CHANGES = {
    "environment": "os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'",
    "levels": "logging.getLogger('transformers').setLevel(40)",
    "warnings": "warnings.filterwarnings('ignore', message='x')",
    "progress bars": "transformers_logging.disable_progress_bar()",
    "directory": "os.chdir('/')",
}
CONTROL = "\n".join(["before = look()", *CHANGES.values(), "compare(before, 'it')"])


@pytest.fixture(scope="module")
def told() -> list[str]:
    """What a process prints that imports everything; without the settings that the tests themselves make."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PYTEST"))}
    command = [sys.executable, "-c", SCRIPT + CONTROL, LIBRARIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_headrace_and_all_its_modules_changes_nothing(told: list[str]):
    changes, imported, _ = in_parts(told)
    assert imported > 100
    assert changes == []


def test_a_change_would_be_noticed(told: list[str]):
    _, _, noticed = in_parts(told)
    assert all(any(f"it changed {name}:" in line for line in noticed) for name in CHANGES)


def in_parts(told: list[str]) -> tuple[list[str], int, list[str]]:
    """Changes by headrace, the number of its modules, changes in the end."""
    (middle,) = (i for i, line in enumerate(told) if line.startswith("imported "))
    return told[:middle], int(told[middle].removeprefix("imported ")), told[middle + 1 :]

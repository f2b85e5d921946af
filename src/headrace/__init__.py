"""Headrace trains language models by reinforcement learning.

Example:
    import headrace
    config = headrace.load_config("my.toml", ["loop.steps=20"])
    summary = headrace.train(config)
    print(summary["score_before"], "->", summary["score_after"])
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _choose_waiting() -> None:
    """Say how torch's CPU threads wait for each other: spinning, their default, or asleep.

    Spinning is faster while they have the cores to themselves, but spinning threads starve each other when anything
    else wants one. Measured on two cores, generating with a small model: alone 21,000 tokens per second spinning and
    16,000 asleep; beside one busy process 5,000 and 14,000. It takes effect only before torch is first imported.
    """
    try:
        with open("/proc/loadavg") as file:
            num_running = int(file.read().split()[3].split("/")[0])  # this process is one of them
    except OSError:
        return  # not Linux
    if num_running > 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_choose_waiting()

__version__ = "0.1.0"
__all__ = ["UnavailableError", "evaluate_run", "export", "load_config", "resume", "train"]


def __getattr__(name: str) -> Any:
    """The public functions, loaded when asked for: reward processes and the lighter commands do without torch."""
    if name == "UnavailableError":
        return importlib.import_module("headrace.errors").UnavailableError
    if name in __all__:
        return getattr(importlib.import_module("headrace.api"), name)
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")

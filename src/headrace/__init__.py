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

# OpenMP threads that spin at a barrier starve each other as soon as anything else (a reward process, a browser) wants
# a core: measured on two cores beside one busy process, generation ran at 240 tokens per second with spinning threads
# and at 14,000 with sleeping ones. It only takes effect before torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = ["evaluate_run", "export", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """The public functions, loaded when asked for: reward processes and the lighter commands do without torch."""
    if name in __all__:
        return getattr(importlib.import_module("headrace.api"), name)
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")

"""Headrace trains language models by reinforcement learning.

Example:
    import headrace
    config = headrace.load_config("my.toml", ["loop.steps=20"])
    summary = headrace.train(config)
    print(summary["score_before"], "->", summary["score_after"])
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = [
    *("Done", "Observation", "UnavailableError", "Watcher", "evaluate_run", "export", "load_config", "resume"),
    *("sandbox", "serve_run", "train"),
]


def __getattr__(name: str) -> Any:
    """The public functions, loaded when asked for: reward processes and the lighter commands do without torch."""
    if name == "UnavailableError":
        return importlib.import_module("headrace.errors").UnavailableError
    if name in ("Done", "Observation"):
        return getattr(importlib.import_module("headrace.reward.environment"), name)
    if name == "sandbox":
        return importlib.import_module("headrace.sandbox")
    if name in __all__:
        return getattr(importlib.import_module("headrace.api"), name)
    raise AttributeError(f"module 'headrace' has no attribute '{name}'")

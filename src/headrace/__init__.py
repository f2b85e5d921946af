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
_HOMES = {"UnavailableError": "errors", "Done": "reward.environment", "Observation": "reward.environment"}


def __getattr__(name: str) -> Any:
    """The public functions, loaded when asked for: reward processes and the lighter commands do without torch."""
    if name == "sandbox":
        return importlib.import_module("headrace.sandbox")
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    return getattr(importlib.import_module(f"headrace.{_HOMES.get(name, 'api')}"), name)

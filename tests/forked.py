"""Processes for tests, with torch and transformers imported when they start: that takes many seconds on a slow machine.

They are forked from multiprocessing's fork server. A process has one of those, and one list of what it imports: both
are here. The server never computes: a fork of a process with busy threads would hang.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "qwen3_moe", "starcoder2", "llama")]
PRELOADED = [
    "pytest",
    "headrace.api",
    "headrace.cli",
    "headrace.place.cluster_ray",
    "headrace.policy.adapters_peft",
    "headrace.publish.collective",
    "headrace.publish.disk",
    *MODELS,
]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def start(log: Path, work: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """A process that does `work(*args)`, exits with 0 or 1, and adds what it prints to `log`."""
    process = context.Process(target=_logged, args=(log, work, *args), daemon=True)
    process.start()
    return process


def _logged(log: Path, work: Callable[..., Any], *args: Any) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    work(*args)

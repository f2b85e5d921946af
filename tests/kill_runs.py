"""Runs that are killed at random instants and resumed, in processes forked from one that has everything imported.

    python tests/kill_runs.py SPEC.json

SPEC: a list of {"directory": .., "settings": [..], "kills_s": [..]}. Trains in the directory; kills the process after
each of these many seconds with SIGKILL and starts another that resumes; the last one runs to the end. Prints how many
kills hit a living process. It never computes itself: a fork of a process with busy threads would hang.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from headrace import api
from headrace.config_file import load_config


def start(work: Callable[[], object]) -> int:
    """The id of a child that does the work and exits with 0, or prints why not and exits with 1."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def wait(child: int, most_s: float) -> int | None:
    """The child's exit status, or None when it still runs after so many seconds."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    return None


def run(directory: Path, settings: list[str], kills_s: list[float]) -> int:
    """How many kills hit."""
    for num_hit, most_s in enumerate([*kills_s, 300.0]):
        summary = directory / api.SUMMARY
        if summary.exists() and json.loads(summary.read_text())["finished"]:  # killed on its way out
            return num_hit
        if (directory / api.SETTINGS).exists():
            child = start(lambda: api.resume(directory))
        else:
            child = start(lambda: api.train(load_config(None, settings)))
        status = wait(child, most_s)
        if status is not None:
            assert status == 0, f"exit status {status}"
            return num_hit
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    raise TimeoutError("the last run did not end")


if __name__ == "__main__":
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        print(run(Path(spec["directory"]), spec["settings"], spec["kills_s"]), flush=True)

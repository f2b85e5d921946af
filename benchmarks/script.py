"""What the scripts share: the commit that they measure, processes of their own, options that count. No torch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Of this checkout; HEADRACE_COMMIT names it where the files come without git."""
    if named := os.environ.get("HEADRACE_COMMIT"):
        return named
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def result_of(file: str, job: dict[str, Any]) -> dict[str, Any]:
    """What `file --child JOB` prints last, in a process of its own."""
    command = [sys.executable, file, "--child", json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def positive(text: str) -> int:
    """The type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)

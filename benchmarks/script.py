"""What the scripts share: the commit that they measure, and options that count something. No torch."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

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


def positive(text: str) -> int:
    """The type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)

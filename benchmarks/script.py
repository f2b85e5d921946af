"""What the scripts share: the commit that they measure, processes of their own, options that count. No torch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def all_of(run: Callable[[Any], Any], jobs: list[Any], results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """`run` each of the `jobs`, so many at once, and keep what was measured so far in `--json`."""
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for found in pool.map(run, jobs):
            results["runs"].append(found)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def options_of_runs(doc: str | None, *, tokens: int) -> argparse.ArgumentParser:
    """What a script takes that compares runs of several seeds at equal generated tokens."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=positive, default=tokens, help="that a run generates")
    parser.add_argument("--at-once", type=positive, default=2, help="runs beside each other, one thread each")
    parser.add_argument("--json", type=Path, help="everything measured, written after each run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def positive(text: str) -> int:
    """The type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)

"""The files of a run directory besides the ledger: settings, summary, lock, wanted workers."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.config_file import load_config
from headrace.errors import RunError
from headrace.ledger.database import FILE_NAME, LOCK_NAME

SETTINGS, SUMMARY = "config.toml", "summary.json"
WEIGHTS, START, CHECKPOINTS, REFERENCE = "model", "start", "checkpoints", "reference"  # directories
WANTED_WORKERS = "rollout_workers"  # the number that `scale` asked for


def run_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved settings of a run, with `overrides` on top."""
    path = run_dir / SETTINGS
    if not path.exists():
        raise RunError(f"{run_dir} is not a run directory: it has no {SETTINGS}")
    return load_config(path, overrides)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What `summary.json` says; empty if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def says_finished(run_dir: Path) -> bool:
    return read_summary(run_dir).get("finished") is True


def is_run(path: Path) -> bool:
    """Whether a run was ever started here: there is a ledger, or settings and a lock."""
    return (path / FILE_NAME).is_file() or ((path / SETTINGS).is_file() and (path / LOCK_NAME).is_file())


def is_claimed(run_dir: Path) -> bool:
    """Whether a process trains there. A shared lock: two readers do not see each other."""
    try:
        with (run_dir / LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no such file, or not ours to open
    return False


def scale(run_dir: Path, workers: int) -> str:
    """Ask a run on a cluster for this number of rollout workers; returns what will happen."""
    config = run_config(run_dir)
    if config.place.cluster != "ray" or config.place.layout != "disaggregated":
        raise RunError(
            f"{run_dir} runs with place.cluster = '{config.place.cluster}' and place.layout = "
            f"'{config.place.layout}': the number of rollout workers changes only on a cluster, with "
            "devices of their own (disaggregated)"
        )
    if says_finished(run_dir):
        raise RunError(f"{run_dir} has finished")
    if workers < 1:
        raise RunError(f"{workers} rollout workers cannot sample anything: at least 1 is needed")
    before = wanted_workers(run_dir, config.rollout.workers)
    path = run_dir / WANTED_WORKERS
    new = path.with_suffix(".new")
    try:
        new.write_text(f"{workers}\n")
        new.replace(path)  # whoever reads it finds one number or the other
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    told = f"{run_dir}: {before} -> {workers} rollout workers"
    return told if is_claimed(run_dir) else f"{told}, when it is resumed"


def wanted_workers(run_dir: Path, default: int) -> int:
    """The number that `scale` asked for last, else `default`."""
    try:
        return max(1, int((run_dir / WANTED_WORKERS).read_text()))
    except (OSError, ValueError):
        return default

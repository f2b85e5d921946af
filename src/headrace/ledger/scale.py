"""How many rollout workers a run is to have: a number in its directory, which may change while it goes on."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import RunError
from headrace.ledger.runs import is_claimed, run_config, says_finished

WANTED_WORKERS = "rollout_workers"  # a file of the run


def scale(run_dir: Path, workers: int) -> str:
    """Ask a run on a cluster for so many rollout workers; returns what will come of it."""
    config = run_config(run_dir)
    if config.place.cluster != "ray" or config.place.layout != "disaggregated":
        raise RunError(
            f"{run_dir} runs with place.cluster = '{config.place.cluster}' and place.layout = '{config.place.layout}': "
            "the number of rollout workers changes only on a cluster, with devices of their own (disaggregated)"
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
    """What `scale` asked for last, else the setting."""
    try:
        return max(1, int((run_dir / WANTED_WORKERS).read_text()))
    except (OSError, ValueError):
        return default

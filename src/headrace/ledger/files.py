"""The files of a run directory besides the ledger: settings, summary, lock, wanted workers.

A new run that replaces another (`run.overwrite`) sets the old one's files aside, in `replaced/`.
They are deleted once the new run has its first checkpoint, and come back if it fails before that.
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.config_file import load_config, to_toml
from headrace.errors import HungError, RunError
from headrace.ledger.database import DATABASE, FILE_NAME, LOCK_NAME, claimed, is_complete

SETTINGS, SUMMARY = "config.toml", "summary.json"
WEIGHTS, BEST, START, CHECKPOINTS, REFERENCE = "model", "best", "start", "checkpoints", "reference"  # directories
WANTED_WORKERS = "rollout_workers"  # the number that `scale` asked for
PLOT = "reward.svg"
STACKS = "stacks.txt"  # of a hung run
SERVED = "served"  # weights for servers of the user's
REPLACED = "replaced"
MOVING = "replaced.moving"  # its name while not all is in it
# all that a run leaves behind, besides its lock
PARTS = (
    *DATABASE,
    *(SETTINGS, SUMMARY, WANTED_WORKERS, STACKS, "rows.jsonl", "samples.jsonl", PLOT),
    *(WEIGHTS, BEST, START, CHECKPOINTS, REFERENCE, SERVED, "tensorboard", "wandb"),
)


def prepare_run_dir(config: Config) -> Path:
    """The directory of a new run. An earlier run in it is set aside, if `run.overwrite` says so."""
    run_dir = Path(config.run.dir or "runs")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not config.run.dir:
            run_dir = _new_run_dir(run_dir)
        with claimed(run_dir):
            if (run_dir / REPLACED).exists() or (run_dir / MOVING).exists():  # a start was killed
                undo_start(run_dir)
            if (run_dir / FILE_NAME).exists():
                _set_aside(run_dir, config)
            save_settings(config, run_dir)
    except OSError as error:
        raise RunError(f"run.dir = '{run_dir}' cannot be written: {error.strerror}") from error
    return run_dir


def _new_run_dir(runs: Path) -> Path:
    """A directory that was not there before, even if several runs start within one second."""
    name, number = f"{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        run_dir = runs / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir()
            return run_dir
        number += 1


def _set_aside(run_dir: Path, config: Config) -> None:
    if not config.run.overwrite:
        told = f"Go on with it by `headrace resume {run_dir}`, choose another run.dir, or"
        raise RunError(f"{run_dir} holds an earlier run. {told} replace it with run.overwrite=true")
    for key in ("path", "tokenizer"):
        path = Path(getattr(config.model, key)).resolve()
        if any(path.is_relative_to((run_dir / name).resolve()) for name in PARTS):
            told = f"model.{key} = '{path}' is a part of the run that run.overwrite=true would replace"
            raise RunError(f"{told}: choose another run.dir")
    (run_dir / MOVING).mkdir()
    _move(run_dir, run_dir / MOVING)
    (run_dir / MOVING).rename(run_dir / REPLACED)


def undo_start(run_dir: Path, keep: str = "") -> None:
    """Take back the start of a run that has no first checkpoint; what it replaced comes back.

    May be killed at any moment, and called again.
    """
    aside, moving = run_dir / REPLACED, run_dir / MOVING
    if not moving.exists():  # else all that is here belongs to the earlier run
        if is_complete(run_dir):
            shutil.rmtree(aside, ignore_errors=True)
            return
        for name in (part for part in PARTS if part != keep):
            if (run_dir / name).is_dir():
                shutil.rmtree(run_dir / name, ignore_errors=True)
            else:
                (run_dir / name).unlink(missing_ok=True)
        if not aside.exists():
            return
        aside.rename(moving)
    _move(moving, run_dir)
    moving.rmdir()


def _move(source: Path, target: Path) -> None:
    for name in PARTS:
        if (source / name).exists():
            (source / name).rename(target / name)


@contextlib.contextmanager
def starting(run_dir: Path) -> Iterator[None]:
    """A failed start leaves nothing behind that looks like a run, not even an empty directory."""
    try:
        yield
    except BaseException as error:
        begun = is_complete(run_dir) or any((run_dir / CHECKPOINTS).glob("step-*"))
        if not begun and not isinstance(error, HungError):
            undo_start(run_dir)
            if {path.name for path in run_dir.iterdir()} <= {LOCK_NAME}:
                shutil.rmtree(run_dir, ignore_errors=True)
        raise


def save_settings(config: Config, run_dir: Path) -> None:
    """Write them for `resume`. Leave to replace a run is given once: it is not among them."""
    write_whole(run_dir / SETTINGS, to_toml(config.but(run={"overwrite": False})))


def write_whole(path: Path, text: str) -> None:
    """Atomically: a reader finds the old or the new."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def run_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    path = run_dir / SETTINGS
    if not path.exists():
        raise RunError(f"{run_dir} is not a run directory: it has no {SETTINGS}")
    return load_config(path, overrides)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What `summary.json` says; empty if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads((run_dir / SUMMARY).read_text(encoding="utf-8")))
    return {}


def is_run(path: Path) -> bool:
    """Whether a run was ever started here: there is a ledger, or settings and a lock."""
    return (path / FILE_NAME).is_file() or ((path / SETTINGS).is_file() and (path / LOCK_NAME).is_file())


def is_claimed(run_dir: Path) -> bool:
    """Whether a process trains there. A shared lock: two readers do not see each other."""
    try:
        with (run_dir / LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else it is not there, or not ours to open
    return False


def scale(run_dir: Path, workers: int) -> str:
    """Ask a run on a cluster for this number of rollout workers; returns what will happen."""
    config = run_config(run_dir)
    cluster, layout = config.place.cluster, config.place.layout
    if cluster != "ray" or layout != "disaggregated":
        told = "the number of rollout workers changes only on a cluster, with devices of their own"
        told = f"place.cluster = '{cluster}' and place.layout = '{layout}': {told} (disaggregated)"
        raise RunError(f"{run_dir} runs with {told}")
    if read_summary(run_dir).get("finished") is True:
        raise RunError(f"{run_dir} has finished")
    if workers < 1:
        raise RunError(f"{workers} rollout workers cannot sample anything: at least 1 is needed")
    before = wanted_workers(run_dir, config.rollout.workers)
    path = run_dir / WANTED_WORKERS
    try:
        write_whole(path, f"{workers}\n")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    told = f"{run_dir}: {before} -> {workers} rollout workers"
    return told if is_claimed(run_dir) else f"{told}, when it is resumed"


def wanted_workers(run_dir: Path, default: int) -> int:
    try:
        return max(1, int((run_dir / WANTED_WORKERS).read_text()))
    except (OSError, ValueError):
        return default

"""Runs on disk: what lies in a run directory, and how each run stands. Nothing is written, also while the run goes on.

A run is a directory with a ledger, or with settings and a lock when it has not come as far as a ledger.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.config_file import load_config
from headrace.errors import HeadraceError, RunError
from headrace.ledger.database import FILE_NAME, LOCK_NAME, explain, open_database

# What lies in a run directory besides the ledger: files, and directories.
SETTINGS, SUMMARY = "config.toml", "summary.json"
WEIGHTS, START, CHECKPOINTS, REFERENCE = "model", "start", "checkpoints", "reference"


class RunState(StrEnum):
    """How a run stands."""

    FINISHED = "finished"
    RUNNING = "running"  # a process holds its lock
    STOPPED = "stopped"  # interrupted, killed, or ended by an error
    UNREADABLE = "unreadable"  # damaged, or of another version of headrace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run, in a line.

    Example:
        RunFacts(path=Path("runs/a"), state=RunState.STOPPED, written=datetime(2026, 5, 1, 12, 0), steps=40,
            wanted_steps=120, score_before=0.34, score_after=None, num_restarts=1, trained_tokens=81920,
            checkpoints=(40, 20))
    """

    path: Path
    state: RunState
    written: datetime  # when anything was last written to it
    problem: str = ""  # why it is unreadable
    steps: int = 0  # that have a row
    wanted_steps: int = 0
    score_before: float | None = None  # on held-out prompts
    score_after: float | None = None  # of an unfinished run the latest
    num_restarts: int = 0
    trained_tokens: int = 0
    checkpoints: tuple[int, ...] = ()  # their steps, newest first; complete ones only

    @property
    def can_be_resumed(self) -> bool:
        """Whether `headrace resume` has something to go on from; what never came to a ledger starts afresh."""
        begun = (self.path / FILE_NAME).exists()
        return self.state is RunState.STOPPED and (bool(self.checkpoints) or not begun)


def read_runs(directory: Path) -> list[RunFacts]:
    """The directory itself, if it is a run, and the runs right below it; the newest first."""
    if not directory.is_dir():
        raise RunError(f"there is no directory {directory}; name the one that your runs are in")
    try:
        found = [path for path in (directory, *directory.iterdir()) if is_run(path)]
    except OSError as error:
        raise RunError(f"cannot look into {directory}: {error.strerror}") from error
    if not found:
        raise RunError(f"there is no run in {directory}; `headrace train` makes one, by default in runs/")
    return sorted((read_run(path) for path in found), key=lambda facts: facts.written, reverse=True)


def read_run(run_dir: Path) -> RunFacts:
    """How a run stands. One that cannot be read is said to be so, and why."""
    if not is_run(run_dir):
        raise RunError(f"{run_dir} holds no run: there is no {FILE_NAME} in it.")
    written = _written(run_dir)  # before anything is opened
    summary = _summary(run_dir)
    state = RunState.RUNNING if is_claimed(run_dir) else RunState.STOPPED
    if summary.get("finished") is True:
        state = RunState.FINISHED
    try:
        config = run_config(run_dir)
        booked = _booked(run_dir) if (run_dir / FILE_NAME).exists() else {}
    except HeadraceError as error:
        return RunFacts(path=run_dir, state=RunState.UNREADABLE, written=written, problem=str(error))
    if state is RunState.FINISHED:  # steps after which nothing was measured have no say
        booked |= {name: summary.get(name) for name in ("score_before", "score_after")}
    return RunFacts(
        path=run_dir,
        state=state,
        written=written,
        wanted_steps=config.loop.steps,
        checkpoints=_checkpoints(run_dir),
        **booked,
    )


def run_config(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved settings of a run, with `overrides` on top."""
    path = run_dir / SETTINGS
    if not path.exists():
        raise RunError(f"{run_dir} is not a run directory: it has no {SETTINGS}")
    return load_config(path, overrides)


def says_finished(run_dir: Path) -> bool:
    """Whether the run's summary says so."""
    return _summary(run_dir).get("finished") is True


@contextlib.contextmanager
def reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One view of the books, however much a live run adds meanwhile."""
    connection = open_database(run_dir)
    try:
        connection.execute("BEGIN")
        yield connection
    except sqlite3.ProgrammingError:
        raise  # our mistake, not the user's
    except sqlite3.DatabaseError as error:
        raise explain(error, run_dir / FILE_NAME) from error
    finally:
        connection.close()


def is_run(path: Path) -> bool:
    """Whether a run was ever started here."""
    return (path / FILE_NAME).is_file() or ((path / SETTINGS).is_file() and (path / LOCK_NAME).is_file())


def is_claimed(run_dir: Path) -> bool:
    """Whether a process trains there; asked with a shared lock, so that two who ask do not take each other for one."""
    try:
        with (run_dir / LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no such file, or not ours to open
    return False


def _written(run_dir: Path) -> datetime:
    names = (FILE_NAME, f"{FILE_NAME}-wal", SETTINGS, SUMMARY)
    changed_s = [0.0]
    for name in names:
        with contextlib.suppress(OSError):  # SQLite may take its log away at any moment
            changed_s.append((run_dir / name).stat().st_mtime)
    return datetime.fromtimestamp(max(changed_s))


def _summary(run_dir: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _booked(run_dir: Path) -> dict[str, Any]:
    """What the ledger knows."""
    with reading(run_dir) as connection:
        (steps,) = connection.execute("SELECT COALESCE(MAX(step), 0) FROM rows").fetchone()
        (num_restarts,) = connection.execute("SELECT COUNT(*) FROM restarts").fetchone()
        (tokens,) = connection.execute("SELECT tokens FROM accounts WHERE name = 'trained'").fetchone()
        before = connection.execute("SELECT value FROM meta WHERE key = 'run:before'").fetchone()
        after = connection.execute(
            "SELECT score FROM rows WHERE score IS NOT NULL ORDER BY step DESC LIMIT 1"
        ).fetchone()
    return {
        "steps": steps,
        "num_restarts": num_restarts,
        "trained_tokens": tokens,
        "score_before": json.loads(before[0]).get("score_before") if before else None,
        "score_after": after[0] if after else None,
    }


def _checkpoints(run_dir: Path) -> tuple[int, ...]:
    names = [path.name.removeprefix("step-") for path in (run_dir / CHECKPOINTS).glob("step-*") if path.is_dir()]
    return tuple(sorted((int(name) for name in names if name.isdecimal()), reverse=True))

"""The runs in a directory, and how each one stands. Only reads, also while a run goes on."""

import contextlib
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from headrace.errors import HeadraceError, RunError
from headrace.ledger.database import FILE_NAME
from headrace.ledger.files import CHECKPOINTS, SETTINGS, SUMMARY, is_claimed, is_run, read_summary, run_config
from headrace.runs.columns import reading

_BOOKED, _REWARDS = Path(__file__).with_name("facts.sql").read_text(encoding="utf-8").split(";")
_WRITTEN = (FILE_NAME, f"{FILE_NAME}-wal", SETTINGS, SUMMARY)
MOST_REWARDS = 40  # of a run's curve in a list


class UnknownNameError(RunError):
    """What was asked for does not exist: a run, a trajectory, a group."""


class RunState(StrEnum):
    """How a run stands."""

    FINISHED = "finished"
    RUNNING = "running"  # a process holds its lock
    STOPPED = "stopped"  # interrupted, killed, or ended by an error
    UNREADABLE = "unreadable"  # damaged, or of another version of headrace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run in a line."""

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
    rewards: tuple[float, ...] = ()  # means of at most MOST_REWARDS steps, spread over the run

    @property
    def can_be_resumed(self) -> bool:
        """Whether `headrace resume` can continue it; without a ledger it starts from the start."""
        begun = (self.path / FILE_NAME).exists()
        return self.state is RunState.STOPPED and (bool(self.checkpoints) or not begun)

    def readable(self) -> Self:
        """These facts; for a run that cannot be read, its problem is raised."""
        if self.state is RunState.UNREADABLE:
            raise RunError(self.problem)
        return self


Known = dict[Path, tuple[tuple[int, ...], RunFacts]]
"""What was read of each run, and the state of its files when it was."""


def read_runs(directory: Path, known: Known | None = None) -> list[RunFacts]:
    """`directory` itself, if it is a run, and the runs right below it; the newest first.

    Of the runs in `known` only those whose files changed are read again; it keeps what is read.
    """
    if not directory.is_dir():
        raise RunError(f"there is no directory {directory}; name the one that your runs are in")
    try:
        found = [path for path in (directory, *directory.iterdir()) if is_run(path)]
    except OSError as error:
        raise RunError(f"cannot look into {directory}: {error.strerror}") from error
    if not found:
        raise RunError(f"there is no run in {directory}; `headrace train` makes one, by default in runs/")
    known = {} if known is None else known
    for path in found:
        state = (int(is_claimed(path)), *(_changed_ns(path / name) for name in (*_WRITTEN, CHECKPOINTS)))
        before = known.get(path)
        if before is None or before[0] != state or before[1].state is RunState.UNREADABLE:
            known[path] = (state, read_run(path))
    return sorted((known[path][1] for path in found), key=lambda facts: facts.written, reverse=True)


def read_run(run_dir: Path) -> RunFacts:
    """How a run stands; one that cannot be read is UNREADABLE, with the `problem`."""
    if not is_run(run_dir):
        raise RunError(f"{run_dir} holds no run: there is no {FILE_NAME} in it.")
    written_ns = max(_changed_ns(run_dir / name) for name in _WRITTEN)  # before anything is opened
    written = datetime.fromtimestamp(written_ns / 1e9)
    summary = read_summary(run_dir)
    state = RunState.RUNNING if is_claimed(run_dir) else RunState.STOPPED
    if summary.get("finished") is True:
        state = RunState.FINISHED
    facts = RunFacts(path=run_dir, state=state, written=written)
    try:
        config = run_config(run_dir)
        booked = _booked(run_dir) if (run_dir / FILE_NAME).exists() else {}
    except HeadraceError as error:
        return replace(facts, state=RunState.UNREADABLE, problem=str(error))
    if state is RunState.FINISHED:  # the summary has the scores of the run's own evaluations
        booked |= {name: summary.get(name) for name in ("score_before", "score_after")}
    steps = [path.name.removeprefix("step-") for path in (run_dir / CHECKPOINTS).glob("step-*/")]
    newest_first = tuple(sorted((int(step) for step in steps if step.isdecimal()), reverse=True))
    return replace(facts, wanted_steps=config.loop.steps, checkpoints=newest_first, **booked)


def _changed_ns(path: Path) -> int:
    with contextlib.suppress(OSError):  # SQLite may take its log away at any moment
        return path.stat().st_mtime_ns
    return 0


def _booked(run_dir: Path) -> dict[str, Any]:
    with reading(run_dir) as connection:
        told = connection.execute(_BOOKED)
        found = dict(zip((name for name, *_ in told.description), told.fetchone(), strict=True))
        # of some steps only: a list of runs must not take a look at all rows of each
        last_step, num = found["steps"], min(found["steps"], MOST_REWARDS)
        steps = [1 + i * (last_step - 1) // max(num - 1, 1) for i in range(num)]
        rewards = [reward for (reward,) in connection.execute(_REWARDS, (json.dumps(steps),))]
    known = tuple(r for r in rewards if isinstance(r, float) and math.isfinite(r))
    before = json.loads(found["score_before"] or "{}").get("score_before")
    return found | {"score_before": before, "rewards": known}

"""What a run's ledger says about its speed and its health, as one record: what triage needs.

The first steps of a run are unlike the others (caches fill, programs are compiled), so by default the numbers are
about the steps after them. Nothing is written, and the run may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.errors import RunError
from headrace.insight.answers import Answers
from headrace.insight.occupancy import Occupancy, StepTimes, read_occupancy
from headrace.insight.step_rows import Numbers, StepRows
from headrace.ledger.runs import RunState, read_run, reading, run_config
from headrace.types import STAGES, StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution in a few numbers.

    Example:
        Spread(count=7424, mean=212.0, cv=0.8, p50=160.0, p95=610.0, p99=1004.0, max=1024.0)
    """

    count: int
    mean: float
    cv: float  # standard deviation over mean
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Numbers) -> Spread | None:
        """Of those that are known; None if none is."""
        known = values[np.isfinite(values)]
        if not len(known):
            return None
        mean = float(known.mean())
        p50, p95, p99 = (float(value) for value in np.quantile(known, (0.5, 0.95, 0.99)))
        cv = float(known.std()) / mean if mean else 0.0
        return cls(count=len(known), mean=mean, cv=cv, p50=p50, p95=p95, p99=p99, max=float(known.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One run. `num_steps` and the restarts are of all of it, the rest is about its `measured_steps`.

    Example:
        Reading(run_dir=Path("runs/a"), config=Config(...), num_steps=60, num_restarts=1, redone_steps=7,
            measured_steps=range(3, 61), wall_s=81.2, step_s=Spread(...), stage_s=StageTimes(rollout=0.9, train=0.45),
            stage_p50_s=StageTimes(...), stage_p95_s=StageTimes(...), occupancy=Occupancy(...), trained_tokens=118_784,
            dropped_tokens={"no_signal": 9_000}, answer_tokens=Spread(...), tail_s=Spread(...), verdict_s=Spread(...),
            no_signal_share=0.12, lag_mean=0.9, lag_max=2, ratio_outside=0.001, effective_samples=0.998, preemptions=0)
    """

    run_dir: Path
    config: Config
    num_steps: int  # that have a row
    num_restarts: int
    redone_steps: int  # because of these
    measured_steps: range
    wall_s: float
    step_s: Spread | None
    stage_s: StageTimes | None  # mean per step
    stage_p50_s: StageTimes | None
    stage_p95_s: StageTimes | None
    occupancy: Occupancy | None
    trained_tokens: int
    dropped_tokens: Mapping[str, int]
    answer_tokens: Spread | None  # sampled, per answer
    tail_s: Spread | None  # of each step: from the end of 95 in 100 answers to the end of the last
    verdict_s: Spread | None  # from an answer's end to its verdict, with what it waited for a worker
    no_signal_share: float | None  # of the groups: all their answers earned the same
    lag_mean: float | None  # over trained tokens
    lag_max: int | None
    ratio_outside: float | None  # means over steps, with `Row`'s names
    effective_samples: float | None
    preemptions: int

    @property
    def goodput_tokens_per_s(self) -> float | None:
        """Trained tokens per second."""
        return self.trained_tokens / self.wall_s if self.wall_s else None

    @property
    def useful_share(self) -> float | None:
        """Of the tokens whose fate was decided, those that were trained on."""
        decided = self.trained_tokens + sum(self.dropped_tokens.values())
        return self.trained_tokens / decided if decided else None

    @property
    def tail_share(self) -> float | None:
        """Of a step's time, in which only its last answers (one in twenty) were still being generated."""
        if self.tail_s is None or self.step_s is None or not self.step_s.mean:
            return None
        return min(1.0, self.tail_s.mean / self.step_s.mean)


def read(run_dir: Path, *, last_steps: int | None = None, after_step: int = 2) -> Reading:
    """What is known of a run; what is not known yet is None.

    Measured are the steps after `after_step` (all of them, if there are no more), or of these the last so many.
    """
    facts = read_run(run_dir)
    if facts.state is RunState.UNREADABLE:
        raise RunError(facts.problem)
    config = run_config(run_dir)
    with reading(run_dir) as connection:
        (num_steps, last_step) = connection.execute("SELECT COUNT(*), COALESCE(MAX(step), 0) FROM rows").fetchone()
        after = after_step if last_step > after_step else 0
        if last_steps is not None:
            after = max(after, last_step - last_steps)
        rows = StepRows.read(connection, after_step=after)
        times = StepTimes.read(connection, rows.column("step"), rows.column("wall_s"))
        answers = Answers.read(connection, since_s=float(times.starts_s[0]) if times and after else 0.0)
        occupancy = read_occupancy(connection, times, reward_workers=config.reward.workers) if times else None
        restarts = connection.execute("SELECT COUNT(*), COALESCE(SUM(redone_steps), 0) FROM restarts").fetchone()
    tokens, signal = rows.column("trained_tokens"), answers.signal()
    return Reading(
        run_dir=run_dir,
        config=config,
        num_steps=num_steps,
        num_restarts=restarts[0],
        redone_steps=restarts[1],
        measured_steps=range(last_step + 1 - len(rows), last_step + 1),
        wall_s=float(np.nansum(rows.column("wall_s"))),
        step_s=Spread.of(rows.column("wall_s")),
        stage_s=_stages(rows, np.mean),
        stage_p50_s=_stages(rows, np.median),
        stage_p95_s=_stages(rows, lambda values: np.quantile(values, 0.95)),
        occupancy=occupancy,
        trained_tokens=rows.total("trained_tokens"),
        dropped_tokens=rows.dropped_tokens(),
        answer_tokens=Spread.of(answers.num_tokens),
        tail_s=Spread.of(answers.tails_s(times)) if times else None,
        verdict_s=Spread.of(answers.scored_s - answers.finished_s),
        no_signal_share=1.0 - float(signal.mean()) if len(signal) else None,
        lag_mean=float(np.average(rows.column("lag_mean"), weights=tokens)) if tokens.sum() else None,
        lag_max=int(rows.column("lag_max").max()) if tokens.sum() else None,
        ratio_outside=rows.mean("ratio_outside"),
        effective_samples=rows.mean("effective_samples"),
        preemptions=rows.total("preemptions"),
    )


def _stages(rows: StepRows, combine: Callable[[Numbers], Any]) -> StageTimes | None:
    """The stage times of all steps, made one by `combine`."""
    if not len(rows):
        return None
    return StageTimes(**{stage: float(combine(rows.stage(stage))) for stage in STAGES})

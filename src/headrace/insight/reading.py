"""What a run's ledger says about its speed and its health, as one record: what triage, calibration and the page need.

The first steps of a run are unlike the others (caches fill, programs are compiled), so by default the numbers are
about the steps after them. Nothing is written, and the run may go on meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.errors import RunError
from headrace.insight.answers import Answers
from headrace.insight.occupancy import Occupancy, StepTimes, read_occupancy
from headrace.insight.step_rows import Numbers, StepRows
from headrace.ledger.ledger import Books
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
class Lengths:
    """How long answers are, and what the longest cost.

    Example:
        Lengths(tokens=Spread(...), prompt_tokens=31.0, cut_share=0.02, longest_of_group=430.0, longest_of_step=990.0,
            token_s=0.011, running=118.0, tail_s=Spread(...))
    """

    tokens: Spread  # sampled, per answer
    prompt_tokens: float | None  # mean
    cut_share: float  # of the answers: they ran into max_new_tokens or max_wall_s
    longest_of_group: float | None  # tokens, mean over groups
    longest_of_step: float | None  # tokens, mean over steps
    token_s: float | None  # median seconds per token of one answer
    running: float | None  # mean number of answers being generated at a time
    tail_s: Spread | None  # of each step: from the end of 95 in 100 answers to the end of the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What answers earned, and how long the verdicts took.

    Example:
        Rewards(mean=0.41, std=0.49, no_signal_share=0.12, latency_s=Spread(...))
    """

    mean: float
    std: float
    no_signal_share: float | None  # of the groups: all their answers earned the same
    latency_s: Spread | None  # from an answer's end to its verdict, with what it waited for a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags:
    """How old trained tokens were.

    Example:
        Lags(mean=0.9, max=2, token_share={0: 0.3, 1: 0.5, 2: 0.2})
    """

    mean: float  # over trained tokens
    max: int
    token_share: Mapping[int, float]  # by lag, of the tokens that were both booked and trained on in these steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """How far the learner's probabilities are from those sampled with; means over steps, with `Row`'s names.

    Example:
        Ratios(mismatch_mean=0.004, mismatch_k3=0.0001, ratio_p01=0.96, ratio_p99=1.05, ratio_outside=0.001,
            clipped_share=0.002, effective_samples=0.998, least_effective_samples=0.97)
    """

    mismatch_mean: float | None
    mismatch_k3: float | None
    ratio_p01: float | None
    ratio_p99: float | None
    ratio_outside: float | None
    clipped_share: float | None
    effective_samples: float | None
    least_effective_samples: float | None  # of any step


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """What failures cost, over the whole run.

    Example:
        Restarts(num=1, redone_steps=7, retrained_tokens=28672, lost_tokens=512, lost_trajectories=16)
    """

    num: int
    redone_steps: int
    retrained_tokens: int
    lost_tokens: int
    lost_trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One run. `books`, `total_wall_s` and `restarts` are about all of it, the rest about its `measured_steps`.

    Example:
        Reading(run_dir=Path("runs/a"), state=RunState.FINISHED, config=Config(...), num_steps=60, total_wall_s=84.0,
            measured_steps=range(3, 61), wall_s=81.2, step_s=Spread(...), stage_s=StageTimes(rollout=0.9, train=0.45),
            stage_p50_s=StageTimes(...), stage_p95_s=StageTimes(...), occupancy=Occupancy(...), books=Books(...),
            generated_tokens=130_000, trained_tokens=118_784, dropped_tokens={"no_signal": 9_000},
            groups_per_step=16.0, group_size=8.0, lengths=Lengths(...), rewards=Rewards(...), lags=Lags(...),
            ratios=Ratios(...), preemptions=0, parks=0, publish_bytes=0.0, restarts=Restarts(...))
    """

    run_dir: Path
    state: RunState
    config: Config
    num_steps: int  # that have a row
    total_wall_s: float  # of these
    books: Books
    restarts: Restarts
    measured_steps: range
    wall_s: float
    step_s: Spread | None
    stage_s: StageTimes | None  # mean per step
    stage_p50_s: StageTimes | None
    stage_p95_s: StageTimes | None
    occupancy: Occupancy | None
    generated_tokens: int
    trained_tokens: int
    dropped_tokens: Mapping[str, int]
    groups_per_step: float | None
    group_size: float | None  # complete answers
    lengths: Lengths | None
    rewards: Rewards | None
    lags: Lags | None
    ratios: Ratios | None
    preemptions: int
    parks: int
    publish_bytes: float | None  # per step

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
    def decode_tokens_per_s(self) -> float | None:
        """Sampled tokens per second that the engine was busy."""
        return self._per_busy_s(self.generated_tokens, "rollout")

    @property
    def train_tokens_per_s(self) -> float | None:
        """Trained tokens per second that the learner was busy."""
        return self._per_busy_s(self.trained_tokens, "train")

    @property
    def tail_share(self) -> float | None:
        """Of a step's time, in which only its last answers (one in twenty) were still being generated."""
        if self.lengths is None or self.lengths.tail_s is None or self.step_s is None or not self.step_s.mean:
            return None
        return min(1.0, self.lengths.tail_s.mean / self.step_s.mean)

    def _per_busy_s(self, num_tokens: int, stage: str) -> float | None:
        busy_s = getattr(self.stage_s, stage) * len(self.measured_steps) if self.stage_s else 0.0
        return num_tokens / busy_s if busy_s else None


def read(run_dir: Path, *, last_steps: int | None = None, after_step: int = 2) -> Reading:
    """What is known of a run; what is not known yet is None.

    Measured are the steps after `after_step` (all of them, if there are no more), or of these the last so many.
    """
    facts = read_run(run_dir)
    if facts.state is RunState.UNREADABLE:
        raise RunError(facts.problem)
    config = run_config(run_dir)
    with reading(run_dir) as connection:
        (num_steps, last_step, total_wall_s) = connection.execute(
            "SELECT COUNT(*), COALESCE(MAX(step), 0), COALESCE(SUM(wall_s), 0.0) FROM rows"
        ).fetchone()
        after = after_step if last_step > after_step else 0
        if last_steps is not None:
            after = max(after, last_step - last_steps)
        rows = StepRows.read(connection, after_step=after)
        times = StepTimes.read(connection, rows.column("step"), rows.column("wall_s"))
        answers = Answers.read(connection, since_s=float(times.starts_s[0]) if times and after else 0.0)
        occupancy = read_occupancy(connection, times, reward_workers=config.reward.workers) if times else None
        accounts = connection.execute("SELECT name, tokens, trajectories FROM accounts").fetchall()
        restarts = _restarts(connection)
    return Reading(
        run_dir=run_dir,
        state=facts.state,
        config=config,
        num_steps=num_steps,
        total_wall_s=total_wall_s,
        books=Books.of({name: (tokens, trajectories) for name, tokens, trajectories in accounts}),
        restarts=restarts,
        measured_steps=range(last_step + 1 - len(rows), last_step + 1),
        wall_s=float(np.nansum(rows.column("wall_s"))),
        step_s=Spread.of(rows.column("wall_s")),
        stage_s=_stages(rows, np.mean),
        stage_p50_s=_stages(rows, np.median),
        stage_p95_s=_stages(rows, lambda values: np.quantile(values, 0.95)),
        occupancy=occupancy,
        generated_tokens=rows.total("generated_tokens"),
        trained_tokens=rows.total("trained_tokens"),
        dropped_tokens=rows.dropped_tokens(),
        groups_per_step=rows.mean("num_groups"),
        group_size=float(sizes.mean()) if len(sizes := answers.group_sizes()) else None,
        lengths=_lengths(answers, rows, times),
        rewards=_rewards(answers),
        lags=_lags(answers, rows),
        ratios=_ratios(rows),
        preemptions=rows.total("preemptions"),
        parks=rows.total("parks"),
        publish_bytes=rows.mean("publish_bytes"),
    )


def _stages(rows: StepRows, combine: Callable[[Numbers], Any]) -> StageTimes | None:
    """The stage times of all steps, made one by `combine`."""
    if not len(rows):
        return None
    return StageTimes(**{stage: float(combine(rows.stage(stage))) for stage in STAGES})


def _lengths(answers: Answers, rows: StepRows, times: StepTimes | None) -> Lengths | None:
    tokens = Spread.of(answers.num_tokens)
    if tokens is None:
        return None
    took_s = answers.finished_s - answers.started_s
    per_token_s = Spread.of(took_s[answers.num_tokens > 0] / answers.num_tokens[answers.num_tokens > 0])
    running = None
    if times is not None and times.wall_s:
        known = np.isfinite(took_s)
        in_steps_s = times.measured(answers.finished_s[known]) - times.measured(answers.started_s[known])
        running = float(in_steps_s.sum()) / times.wall_s
    return Lengths(
        tokens=tokens,
        prompt_tokens=_mean(answers.num_prompt_tokens),
        cut_share=float(answers.cut.mean()),
        longest_of_group=_mean(answers.longest_of_groups()),
        longest_of_step=rows.mean("length_max"),
        token_s=per_token_s.p50 if per_token_s else None,
        running=running,
        tail_s=Spread.of(answers.tails_s(times)) if times else None,
    )


def _rewards(answers: Answers) -> Rewards | None:
    rewards = answers.reward[answers.scored]
    if not len(rewards):
        return None
    signal = answers.signal()
    return Rewards(
        mean=float(rewards.mean()),
        std=float(rewards.std()),
        no_signal_share=1.0 - float(signal.mean()) if len(signal) else None,
        latency_s=Spread.of(answers.scored_s - answers.finished_s),
    )


def _lags(answers: Answers, rows: StepRows) -> Lags | None:
    tokens = rows.column("trained_tokens")
    if not tokens.sum():
        return None
    trained = np.isfinite(answers.lag)
    by_lag = np.bincount(answers.lag[trained].astype(np.int64), weights=answers.num_tokens[trained])
    return Lags(
        mean=float(np.average(rows.column("lag_mean"), weights=tokens)),
        max=int(rows.column("lag_max").max()),
        token_share={lag: float(share) for lag, share in enumerate(by_lag / max(1.0, by_lag.sum())) if share},
    )


def _ratios(rows: StepRows) -> Ratios | None:
    if not len(rows):
        return None
    effective = Spread.of(-rows.column("effective_samples"))
    names = [field.name for field in fields(Ratios) if field.name != "least_effective_samples"]
    means = {name: rows.mean(name) for name in names}
    return Ratios(**means, least_effective_samples=-effective.max if effective else None)


def _mean(values: Numbers) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _restarts(connection: sqlite3.Connection) -> Restarts:
    names = [field.name for field in fields(Restarts)][1:]
    sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in names)
    num, *totals = connection.execute(f"SELECT COUNT(*), {sums} FROM restarts").fetchone()
    return Restarts(num=num, **dict(zip(names, totals, strict=True)))

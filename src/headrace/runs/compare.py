"""Several runs at equal cost: held-out scores along the way, and a verdict with an error bar.

Runs whose settings differ in the seed alone are one side, with the mean of their scores. The error
of a mean is the standard error over its seeds, but not less than that of the evaluation itself:
with n held-out answers, sqrt(p (1 - p) / n).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import numpy as np

from headrace.config_file import cost_of, num_devices, values
from headrace.errors import RunError
from headrace.ledger.files import SETTINGS, run_config
from headrace.ledger.ledger import Ledger
from headrace.runs.facts import RunState, read_run
from headrace.runs.report import Report, Section, Table, dollars, short

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the cost that all runs reached
NOT_COMPARED = ("run.seed", "run.dir", "run.overwrite")
SURE = 2.0  # standard errors: a smaller difference may be chance


class Cost(StrEnum):
    """What runs are compared at."""

    TOKENS = "tokens"  # generated
    DEVICE_HOURS = "device-hours"
    DOLLARS = "dollars"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Held-out scores of one run, and what it had cost by then."""

    settings: dict[str, str]
    costs: Sequence[float]
    scores: Sequence[float]
    num_answers: int  # of one evaluation

    def at(self, cost: float) -> float:
        return float(np.interp(cost, self.costs, self.scores))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Runs that differ in their seeds alone: mean scores at `SHARES` of the cost, and the last one's error."""

    name: str
    seeds: Sequence[str]
    before: float
    scores: Sequence[float]
    error: float
    reached: float  # the cost at which it has the lowest of the sides' last scores


def curve_of(run_dir: Path, at: Cost) -> Curve:
    facts, config = read_run(run_dir).readable(), run_config(run_dir)
    with Ledger.open(run_dir) as ledger:
        rows = ledger.rows()
    per_s = cost_of(config, 1.0) if at is Cost.DOLLARS else num_devices(config) / 3600
    if per_s is None:
        raise RunError(f"{run_dir} does not say what a device costs: set run.dollars_per_hour, here in its {SETTINGS}")
    spent = np.cumsum([row.generated_tokens if at is Cost.TOKENS else row.wall_s * per_s for row in rows])
    points = [(0.0, facts.score_before), *zip(spent.tolist(), (row.score for row in rows), strict=True)]
    if rows and facts.state is RunState.FINISHED:
        points[-1] = points[-1][0], facts.score_after
    known = [(cost, score) for cost, score in points if score is not None and math.isfinite(score)]
    if len(known) < 2 or known[0][0] > 0:
        needed = "comparing takes one before the first step and one after it (loop.eval_every, or the end of the run)"
        raise RunError(f"{run_dir} has {len(known)} held-out scores; {needed}")
    costs, scores = zip(*known, strict=True)
    num_answers = config.prompts.eval_count * config.loop.eval_samples
    if at is not Cost.DOLLARS:
        config = config.but(run={"dollars_per_hour": 0.0})
    return Curve(settings=values(config), costs=costs, scores=scores, num_answers=num_answers)


def sides_of(curves: Sequence[Curve], cost: float) -> list[Side]:
    """The best first. A side is named by the settings in which it differs from another."""
    settings = [curve.settings for curve in curves]
    differing = [k for k in settings[0] if k not in NOT_COMPARED and len({known[k] for known in settings}) > 1]
    groups: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        groups["  ".join(f"{key}={curve.settings[key]}" for key in differing) or "all"].append(curve)
    means = {name: [_mean(group, share * cost) for share in SHARES] for name, group in groups.items()}
    level = min(scores[-1] for scores in means.values())
    sides = [
        Side(
            name=name,
            seeds=[curve.settings["run.seed"] for curve in group],
            before=_mean(group, 0.0),
            scores=means[name],
            error=_error(group, cost),
            reached=_reached(group, cost, level),
        )
        for name, group in groups.items()
    ]
    return sorted(sides, key=lambda side: side.scores[-1], reverse=True)


def _mean(group: Sequence[Curve], cost: float) -> float:
    return sum(curve.at(cost) for curve in group) / len(group)


def _error(group: Sequence[Curve], cost: float) -> float:
    """Standard error of the mean; NaN if neither the seeds nor the scores tell it."""
    scores, chances = [curve.at(cost) for curve in group], [math.nan]
    if all(0 <= score <= 1 for score in scores):
        variance = sum(p * (1 - p) / curve.num_answers for p, curve in zip(scores, group, strict=True))
        chances.append(math.sqrt(variance) / len(group))
    if len(group) > 1:
        chances.append(float(np.std(scores, ddof=1)) / math.sqrt(len(group)))
    return float(np.fmax.reduce(chances))


def _reached(group: Sequence[Curve], cost: float, level: float) -> float:
    """The least cost at which the mean score, on straight lines between evaluations, is `level`; none ends below it."""
    known = sorted({0.0, cost, *(x for curve in group for x in curve.costs if x < cost)})
    points = [(x, _mean(group, x)) for x in known]
    if points[0][1] >= level:
        return 0.0
    (x, low), (y, high) = next(both for both in pairwise(points) if both[1][1] >= level)
    return x + (y - x) * (level - low) / (high - low)


def compare(run_dirs: Sequence[Path], at: Cost) -> tuple[Report, float, list[Side]]:
    """What to tell, the cost that all runs reached, and the sides at it."""
    found = {run_dir.resolve(): run_dir for run_dir in run_dirs}
    if len(found) < 2:
        raise RunError("comparing takes two runs or more")
    curves = [curve_of(run_dir, at) for run_dir in found.values()]
    cost = min(curve.costs[-1] for curve in curves)
    if not cost > 0:
        raise RunError(f"not all of these runs cost anything yet, in {at}")
    sides = sides_of(curves, cost)
    lines = [_line(side, sides[-1].scores[-1], at) for side in sides]
    table = Table.of(lines, numeric=range(2, len(lines[0])))
    verdicts = (*_verdicts(sides), f"± is one standard error; {SURE:g} of them count as a difference.")
    title = f"{len(curves)} runs at {_amount(cost, at)}, which all of them reached"
    return Report(title=title, sections=(Section(tables=(table,), sentences=verdicts),)), cost, sides


def _line(side: Side, level: float, at: Cost) -> dict[str, str]:
    told = {"settings": side.name, "seeds": ", ".join(side.seeds), "before": f"{side.before:.3f}"}
    told |= {f"at {share:.0%}": f"{score:.3f}" for share, score in zip(SHARES, side.scores, strict=True)}
    told["±"] = "-" if math.isnan(side.error) else f"{side.error:.3f}"
    return told | {f"{level:.3f} after": _amount(side.reached, at)}


def _verdicts(sides: Sequence[Side]) -> list[str]:
    if len(sides) == 1:
        return ["These runs differ in their seeds alone: there is nothing to choose between."]
    best, told = sides[0], []
    for other in sides[1:]:
        gap, error = best.scores[-1] - other.scores[-1], math.hypot(best.error, other.error)
        versus = f"{best.name} is ahead of {other.name} by {gap:.3f}"
        if math.isnan(error):
            told.append(f"{versus}; how sure that is cannot be told without more seeds.")
        elif gap < SURE * error:
            told.append(f"{versus} ± {error:.3f}: no difference that is more than chance.")
        else:
            told.append(f"{versus} ± {error:.3f}.")
    return told


def _amount(cost: float, at: Cost) -> str:
    return dollars(cost) if at is Cost.DOLLARS else f"{short(cost)} {at}"

"""The curves of a run's page: those that are declared here, and one for every number of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.dashboard import charts
from headrace.dashboard.books import OVER, Points, Series, Tally
from headrace.dashboard.charts import Options
from headrace.measured import STAGES
from headrace.row import ROW_METRICS
from headrace.runs.facts import RunFacts, RunState

NO_ROW = "There is no row yet: the first step is under way."


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How curves are drawn: along one of `AXES`, and how smooth, from 0 to less than 1."""

    by: str = "step"
    smoothing: float = 0.0


LOOK = Look()
_FIRST = ("reward", "learner", "length", "mismatch", "lag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Lines over a run's steps, and what they mean; by name a column, its colour and scale."""

    title: str
    says: str
    y: str
    lines: Mapping[str, tuple[str, str, float]]
    low: float | None = 0  # where the axis begins, if not near the smallest value
    band: tuple[str, str, str] | None = None  # its name, and the columns that it lies between
    held_out: bool = False  # add the scores on held-out prompts
    only_busy: bool = False  # leave out what is zero throughout

    def first(self, series: Series, look: Look) -> Points:
        """Its first line alone."""
        column, _, scale = next(iter(self.lines.values()))
        return along(series, column, look, scale)

    def drawn(self, series: Series, look: Look = LOOK, facts: RunFacts | None = None) -> tuple[Options, str]:
        """A chart of what there is, and a sentence on its points; before the first row, only that."""
        if not series.last_step:
            return {}, NO_ROW
        curves = {}
        for name, (column, colour, scale) in self.lines.items():
            curves[name] = (along(series, column, look, scale), colour)
        known = [y for points, _ in curves.values() for _, y in points if y is not None]
        if not known:
            return {}, "It was not measured in this run."
        if self.only_busy and not any(known):
            return {}, "It was 0 in every step."
        if self.only_busy:
            curves = {name: curve for name, curve in curves.items() if any(y for _, y in curve[0])}
        options = charts.lines(curves, y=self.y, low=self.low, by=look.by, smoothing=look.smoothing)
        if self.band:
            name, low, high = self.band
            charts.add_band(options, name, along(series, low, look), along(series, high, look))
        if self.held_out:
            _add_scores(options, series, look, facts)
        return options, per_point(series)


REWARD = Curve(
    title="Reward",
    says="The mean reward of all answers that were scored during a step. Training works if it rises. "
    "Diamonds are scores on held-out prompts, which are never trained on: before training, on the way, and after it.",
    y="reward",
    lines={"mean reward": ("reward_mean", charts.BLUE, 1)},
    low=None,
    held_out=True,
)
GOODPUT = Curve(
    title="Goodput",
    says="Tokens trained on per second: the speed that counts. Generated tokens that were dropped are not in it.",
    y="trained tokens per second",
    lines={"goodput": ("goodput", charts.GREEN, 1)},
)
STAGE_TIMES = Curve(
    title="Stage times",
    says="Seconds of a step in which each stage was busy. Stages may be busy at the same time, so they need "
    "not add up to the step.",
    y="seconds per step",
    lines={stage: (f"stage_s.{stage}", charts.STAGE_COLOURS[stage], 1) for stage in STAGES},
    only_busy=True,
)
RATIO = Curve(
    title="Importance ratio",
    says="How much more likely the learner finds a token than the policy that sampled it: 1 means nothing "
    "changed. The band holds 98 of 100 tokens; a wide band means that the learner corrects a lot.",
    y="ratio",
    lines={"mean ratio": ("ratio_mean", charts.BLUE, 1)},
    low=None,
    band=("98 of 100 tokens", "ratio_p01", "ratio_p99"),
)
WEIGHTS = Curve(
    title="Effective samples",
    says="What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few "
    "heavy ones dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
    y="% of tokens",
    lines={
        "effective samples": ("effective_samples", charts.GREEN, 100),
        "ratio outside 0.9 to 1.1": ("ratio_outside", charts.RED, 100),
    },
)
LATENCY = Curve(
    title="Publish latency",
    says="Milliseconds of a step in which new weights were handed to the engine.",
    y="ms per step",
    lines={"latency": ("stage_s.publish", charts.RED, 1e3)},
)
BYTES = Curve(
    title="Bytes sent",
    says="Megabytes that moved in a step. 0 means that engine and learner share one copy of the weights.",
    y="MB per step",
    lines={"bytes": ("publish_bytes", charts.BLUE, 1e-6)},
)
SPREAD = Curve(
    title="Mean and spread",
    says="The band is one standard deviation each way. Without spread inside a group there is nothing to learn.",
    y="reward",
    lines={"mean reward": ("reward_mean", charts.BLUE, 1)},
    low=None,
    band=("± 1 standard deviation", "reward_low", "reward_high"),
)
LENGTHS = Curve(
    title="Length of answers",
    says="Sampled tokens of an answer: the mean, and the longest of the step, for which others may wait.",
    y="tokens",
    lines={"mean": ("length_mean", charts.BLUE, 1), "longest": ("length_max", charts.ORANGE, 1)},
)


def metric_curves() -> dict[str, list[Curve]]:
    """A chart for every number of a row, by the first part of its label: what is looked at most comes first."""
    found: dict[str, list[Curve]] = {group: [] for group in _FIRST}
    for name, metric in ROW_METRICS.items():
        parts = name.removesuffix("_s").removeprefix("num_").split("_")
        words = " ".join(part.upper() if len(part) == 2 else part for part in parts)  # LR, KL
        title = words[0].upper() + words[1:]
        share = name.endswith("share")
        curve = Curve(
            title=title,
            says=f"{metric.help[0].upper()}{metric.help[1:]}.",
            y="%" if share else metric.unit,
            lines={words: (name, charts.BLUE, 100 if share else 1)},
            low=None,
            only_busy=True,
        )
        found.setdefault(metric.label.split("/")[0], []).append(curve)
    return found


def parts_drawn(parts: Tally, series: Series, look: Look) -> tuple[Options, str]:
    """The mean of each part of the rewards."""
    means = parts.means(series, look.by)
    if not means:
        return {}, "No answer has been scored yet." if series.last_step else NO_ROW
    curves = {name: (points, colour_of(place)) for place, (name, points) in enumerate(sorted(means.items()))}
    return charts.lines(curves, y="mean", by=look.by, smoothing=look.smoothing), per_point(series)


def along(series: Series, column: str, look: Look = LOOK, scale: float = 1.0) -> Points:
    """A column as points of a curve; what a row adds up is the mean of the steps that a point stands for."""
    return series.curve(column, scale, over="mean" if OVER.get(column) == "sum" else "", by=look.by)


def per_point(series: Series) -> str:
    return f"Each point stands for {series.width} steps." if series.width > 1 else ""


def colour_of(place: int) -> str:
    return str(charts.THEME["color"][place % charts.NUM_COLOURS])


def _add_scores(options: Options, series: Series, look: Look, facts: RunFacts | None) -> None:
    before = None if facts is None else facts.score_before
    after = facts.score_after if facts is not None and facts.state is RunState.FINISHED else None
    charts.add_points(options, "held-out, before", [(0, before)], charts.GREY)
    charts.add_points(options, "held-out score", along(series, "score", look), charts.ORANGE)
    charts.add_points(options, "held-out, after", [(series.places(look.by)[-1].item(), after)], charts.GREEN)

"""The curves of a run as charts, each with a title and what it means to a newcomer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.dashboard import charts
from headrace.dashboard.charts import BLUE, GREEN, ORANGE, RED, STAGE_COLOURS, Options
from headrace.dashboard.series import Series
from headrace.types import STAGES


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of a run's rows."""

    title: str
    says: str
    draw: Callable[[Series], Options]

    def drawn(self, series: Series) -> tuple[Options, str]:
        """A chart of what there is, and a sentence on its points; before the first row, the sentence alone."""
        if not series.last_step:
            return {}, "There is no row yet: the first step is under way."
        return self.draw(series), f"Each point is the mean of {series.width} steps." if series.width > 1 else ""


def _reward(series: Series) -> Options:
    options = charts.lines({"mean reward": (series.curve("reward_mean"), BLUE)}, y="reward")
    return charts.with_points(options, "held-out score", series.curve("score"), ORANGE)


def _stages(series: Series) -> Options:
    """Those that were ever busy."""
    curves = {stage: (series.curve(f"stage_s.{stage}"), STAGE_COLOURS[stage]) for stage in STAGES}
    busy = {stage: curve for stage, curve in curves.items() if any(y for _, y in curve[0])}
    return charts.lines(busy, y="seconds per step", low=0)


def _ratio(series: Series) -> Options:
    middle, low, high = (series.curve(name) for name in ("ratio_mean", "ratio_p01", "ratio_p99"))
    return charts.band(middle, low, high, names=("mean ratio", "98 of 100 tokens"), y="ratio", colour=BLUE)


def _weights(series: Series) -> Options:
    curves = {
        "effective samples": (series.curve("effective_samples", 100), GREEN),
        "ratio outside 0.9 to 1.1": (series.curve("ratio_outside", 100), RED),
    }
    return charts.lines(curves, y="% of tokens", low=0)


def _spread(series: Series) -> Options:
    middle = series.curve("reward_mean")
    both = list(zip(middle, series.curve("reward_std"), strict=True))
    low, high = (
        [(x, None if y is None or std is None else y + sign * std) for (x, y), (_, std) in both] for sign in (-1, 1)
    )
    return charts.band(middle, low, high, names=("mean reward", "± 1 standard deviation"), y="reward", colour=BLUE)


def _lengths(series: Series) -> Options:
    curves = {"mean": (series.curve("length_mean"), BLUE), "longest": (series.curve("length_max"), ORANGE)}
    return charts.lines(curves, y="tokens", low=0)


REWARD = Curve(
    "Reward",
    "The mean reward of all answers that were scored during a step. Training works if it rises. Diamonds are scores on "
    "held-out prompts, which are never trained on.",
    _reward,
)
GOODPUT = Curve(
    "Goodput",
    "Tokens that were trained on, per second: the speed that counts. Generated tokens that were dropped are not in it.",
    lambda series: charts.lines({"goodput": (series.goodput_curve(), GREEN)}, y="trained tokens per second", low=0),
)
STAGE_TIMES = Curve(
    "Stage times",
    "Seconds of a step in which each stage was busy. Stages may be busy at the same time, so they need not add up to "
    "the step.",
    _stages,
)
RATIO = Curve(
    "Importance ratio",
    "How much more likely the learner finds a token than the policy that sampled it: 1 means that nothing changed. The "
    "band holds 98 of 100 tokens; a wide band means that the learner corrects a lot.",
    _ratio,
)
WEIGHTS = Curve(
    "Effective samples",
    "What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few heavy ones "
    "dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
    _weights,
)
LATENCY = Curve(
    "Publish latency",
    "Milliseconds of a step in which new weights were handed to the engine.",
    lambda series: charts.lines({"latency": (series.curve("stage_s.publish", 1e3), RED)}, y="ms per step", low=0),
)
BYTES = Curve(
    "Bytes sent",
    "Megabytes that moved in a step. 0 means that engine and learner share one copy of the weights.",
    lambda series: charts.lines({"bytes": (series.curve("publish_bytes", 1e-6), BLUE)}, y="MB per step", low=0),
)
SPREAD = Curve(
    "Mean and spread",
    "The band is one standard deviation each way. Without spread inside a group there is nothing to learn from it.",
    _spread,
)
LENGTHS = Curve(
    "Length of answers",
    "Sampled tokens of an answer: the mean, and the longest of the step, for which others may wait.",
    _lengths,
)

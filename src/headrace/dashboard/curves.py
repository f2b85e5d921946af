"""The curves of a run as charts, each with a title and what it means to a newcomer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.dashboard import charts
from headrace.dashboard.charts import BLUE, GREEN, ORANGE, RED, STAGE_COLOURS, Options
from headrace.dashboard.series import Series
from headrace.types import STAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A chart of a run's rows: lines by name, each a column with its colour and scale; a band around one; points."""

    title: str
    says: str
    y: str
    lines: Mapping[str, tuple[str, str, float]]
    low: float | None = 0  # where the axis begins, if not near the smallest value
    band: tuple[str, str, str] | None = None  # its name, and the columns that it lies between
    points: tuple[str, str, str] | None = None  # their name, column and colour
    only_busy: bool = False  # leave out what is zero throughout

    def drawn(self, series: Series) -> tuple[Options, str]:
        """A chart of what there is, and a sentence on its points; before the first row, the sentence alone."""
        if not series.last_step:
            return {}, "There is no row yet: the first step is under way."
        return self.draw(series), f"Each point is the mean of {series.width} steps." if series.width > 1 else ""

    def draw(self, series: Series) -> Options:
        lines = {name: (series.curve(column, scale), colour) for name, (column, colour, scale) in self.lines.items()}
        if self.only_busy:
            lines = {name: line for name, line in lines.items() if any(y for _, y in line[0])}
        options = charts.lines(lines, y=self.y, low=self.low)
        if self.band:
            name, low, high = self.band
            charts.add_band(options, name, series.curve(low), series.curve(high))
        if self.points:
            name, column, colour = self.points
            charts.add_points(options, name, series.curve(column), colour)
        return options


REWARD = Curve(
    title="Reward",
    says="The mean reward of all answers that were scored during a step. Training works if it rises. Diamonds are "
    "scores on held-out prompts, which are never trained on.",
    y="reward",
    lines={"mean reward": ("reward_mean", BLUE, 1)},
    low=None,
    points=("held-out score", "score", ORANGE),
)
GOODPUT = Curve(
    title="Goodput",
    says="Tokens trained on per second: the speed that counts. Generated tokens that were dropped are not in it.",
    y="trained tokens per second",
    lines={"goodput": ("goodput", GREEN, 1)},
)
STAGE_TIMES = Curve(
    title="Stage times",
    says="Seconds of a step in which each stage was busy. Stages may be busy at the same time, so they need not add "
    "up to the step.",
    y="seconds per step",
    lines={stage: (f"stage_s.{stage}", STAGE_COLOURS[stage], 1) for stage in STAGES},
    only_busy=True,
)
RATIO = Curve(
    title="Importance ratio",
    says="How much more likely the learner finds a token than the policy that sampled it: 1 means nothing changed. "
    "The band holds 98 of 100 tokens; a wide band means that the learner corrects a lot.",
    y="ratio",
    lines={"mean ratio": ("ratio_mean", BLUE, 1)},
    low=None,
    band=("98 of 100 tokens", "ratio_p01", "ratio_p99"),
)
WEIGHTS = Curve(
    title="Effective samples",
    says="What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few heavy ones "
    "dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
    y="% of tokens",
    lines={
        "effective samples": ("effective_samples", GREEN, 100),
        "ratio outside 0.9 to 1.1": ("ratio_outside", RED, 100),
    },
)
LATENCY = Curve(
    title="Publish latency",
    says="Milliseconds of a step in which new weights were handed to the engine.",
    y="ms per step",
    lines={"latency": ("stage_s.publish", RED, 1e3)},
)
BYTES = Curve(
    title="Bytes sent",
    says="Megabytes that moved in a step. 0 means that engine and learner share one copy of the weights.",
    y="MB per step",
    lines={"bytes": ("publish_bytes", BLUE, 1e-6)},
)
SPREAD = Curve(
    title="Mean and spread",
    says="The band is one standard deviation each way. Without spread inside a group there is nothing to learn.",
    y="reward",
    lines={"mean reward": ("reward_mean", BLUE, 1)},
    low=None,
    band=("± 1 standard deviation", "reward_low", "reward_high"),
)
LENGTHS = Curve(
    title="Length of answers",
    says="Sampled tokens of an answer: the mean, and the longest of the step, for which others may wait.",
    y="tokens",
    lines={"mean": ("length_mean", BLUE, 1), "longest": ("length_max", ORANGE, 1)},
)

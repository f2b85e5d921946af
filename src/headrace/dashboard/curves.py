"""The curves of a run as charts, and a sentence on what a point is."""

from __future__ import annotations

from collections.abc import Callable

from headrace.dashboard import charts
from headrace.dashboard.charts import BLUE, GREEN, ORANGE, RED, STAGE_COLOURS, Options
from headrace.dashboard.series import Series
from headrace.types import STAGES

Chart = Callable[[Series], Options]


def drawn(series: Series, chart: Chart) -> tuple[Options, str]:
    """A chart of what there is; before the first row, the sentence alone."""
    if not series.last_step:
        return {}, "There is no row yet: the first step is under way."
    return chart(series), f"Each point is the mean of {series.width} steps." if series.width > 1 else ""


def reward_chart(series: Series) -> Options:
    """Mean reward, and held-out scores on top."""
    options = charts.lines({"mean reward": (series.curve("reward_mean"), BLUE)}, x="step", y="reward")
    return charts.with_points(options, "held-out score", series.curve("score"), ORANGE)


def goodput_chart(series: Series) -> Options:
    """Trained tokens per second."""
    return charts.lines({"goodput": (series.goodput_curve(), GREEN)}, x="step", y="trained tokens per second", low=0)


def stage_chart(series: Series) -> Options:
    """Seconds of every stage that was ever busy."""
    curves = {stage: (series.curve(f"stage_s.{stage}"), STAGE_COLOURS[stage]) for stage in STAGES}
    busy = {stage: curve for stage, curve in curves.items() if any(y for _, y in curve[0])}
    return charts.lines(busy, x="step", y="seconds per step", low=0)


def ratio_chart(series: Series) -> Options:
    """Mean ratio in its band."""
    middle, low, high = (series.curve(name) for name in ("ratio_mean", "ratio_p01", "ratio_p99"))
    names = ("mean ratio", "98 of 100 tokens")
    return charts.band(middle, low, high, names=names, x="step", y="ratio", colour=BLUE)


def weight_chart(series: Series) -> Options:
    """Effective samples, and ratios far from one."""
    curves = {
        "effective samples": (series.curve("effective_samples", 100), GREEN),
        "ratio outside 0.9 to 1.1": (series.curve("ratio_outside", 100), RED),
    }
    return charts.lines(curves, x="step", y="% of tokens", low=0)


def publish_chart(series: Series) -> Options:
    """Milliseconds of publishing."""
    curve = (series.curve("stage_s.publish", 1e3), STAGE_COLOURS["publish"])
    return charts.lines({"latency": curve}, x="step", y="ms per step", low=0)


def bytes_chart(series: Series) -> Options:
    """Megabytes of publishing."""
    return charts.lines({"bytes": (series.curve("publish_bytes", 1e-6), BLUE)}, x="step", y="MB per step", low=0)


def spread_chart(series: Series) -> Options:
    """Mean reward with a standard deviation each way."""
    middle, spread = series.curve("reward_mean"), series.curve("reward_std")
    sides = [
        [(x, None if y is None or s is None else y + sign * s) for (x, y), (_, s) in zip(middle, spread, strict=True)]
        for sign in (-1, 1)
    ]
    names = ("mean reward", "± 1 standard deviation")
    return charts.band(middle, *sides, names=names, x="step", y="reward", colour=BLUE)


def length_chart(series: Series) -> Options:
    """Mean and largest length."""
    curves = {"mean": (series.curve("length_mean"), BLUE), "longest": (series.curve("length_max"), ORANGE)}
    return charts.lines(curves, x="step", y="tokens", low=0)

"""The curves of a run as charts, each with a sentence on what a point is; before the first row, the sentence alone."""

from __future__ import annotations

from headrace.dashboard import charts
from headrace.dashboard.charts import BLUE, GREEN, ORANGE, RED, STAGE_COLOURS, Options
from headrace.dashboard.series import Series
from headrace.types import STAGES

_NO_ROWS = "There is no row yet: the first step is under way."


def reward_chart(series: Series) -> tuple[Options, str]:
    """Mean reward, and held-out scores on top."""
    if not series.buckets:
        return {}, _NO_ROWS
    options = charts.lines({"mean reward": (series.curve("reward_mean"), BLUE)}, x="step", y="reward")
    return charts.with_points(options, "held-out score", series.curve("score"), ORANGE), _averaged(series)


def goodput_chart(series: Series) -> tuple[Options, str]:
    """Trained tokens per second."""
    if not series.buckets:
        return {}, _NO_ROWS
    points = [(bucket.last_step, bucket.goodput_tokens_per_s) for bucket in series.buckets]
    return charts.lines({"goodput": (points, GREEN)}, x="step", y="trained tokens per second", low=0), _averaged(series)


def stage_chart(series: Series) -> tuple[Options, str]:
    """Seconds of every stage that was ever busy, and of the step."""
    if not series.buckets:
        return {}, _NO_ROWS
    curves = {stage: (series.curve(f"stage_s.{stage}"), STAGE_COLOURS[stage]) for stage in STAGES}
    busy = {stage: curve for stage, curve in curves.items() if any(y for _, y in curve[0])}
    return charts.lines(busy, x="step", y="seconds per step", low=0), _averaged(series)


def ratio_chart(series: Series) -> tuple[Options, str]:
    """Mean ratio in its band."""
    if not series.buckets:
        return {}, _NO_ROWS
    middle, low, high = (series.curve(name) for name in ("ratio_mean", "ratio_p01", "ratio_p99"))
    names = ("mean ratio", "98 of 100 tokens")
    return charts.band(middle, low, high, names=names, x="step", y="ratio", colour=BLUE), _averaged(series)


def weight_chart(series: Series) -> tuple[Options, str]:
    """Effective samples, and ratios far from one."""
    if not series.buckets:
        return {}, _NO_ROWS
    curves = {
        "effective samples": (series.curve("effective_samples", 100), GREEN),
        "ratio outside 0.9 to 1.1": (series.curve("ratio_outside", 100), RED),
    }
    return charts.lines(curves, x="step", y="% of tokens", low=0), _averaged(series)


def one_curve(series: Series, name: str, y: str, colour: str, scale: float) -> tuple[Options, str]:
    """A single curve from zero."""
    if not series.buckets:
        return {}, _NO_ROWS
    return charts.lines({y: (series.curve(name, scale), colour)}, x="step", y=y, low=0), _averaged(series)


def spread_chart(series: Series) -> tuple[Options, str]:
    """Mean reward with a standard deviation each way."""
    if not series.buckets:
        return {}, _NO_ROWS
    middle, spread = series.curve("reward_mean"), series.curve("reward_std")
    sides = [
        [(x, None if y is None or s is None else y + sign * s) for (x, y), (_, s) in zip(middle, spread, strict=True)]
        for sign in (-1, 1)
    ]
    names = ("mean reward", "± 1 standard deviation")
    return charts.band(middle, *sides, names=names, x="step", y="reward", colour=BLUE), _averaged(series)


def length_chart(series: Series) -> tuple[Options, str]:
    """Mean and largest length."""
    if not series.buckets:
        return {}, _NO_ROWS
    curves = {"mean": (series.curve("length_mean"), BLUE), "longest": (series.curve("length_max"), ORANGE)}
    return charts.lines(curves, x="step", y="tokens", low=0), _averaged(series)


def _averaged(series: Series) -> str:
    return f"Each point is the mean of {series.width} steps." if series.width > 1 else ""

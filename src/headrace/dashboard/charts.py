"""Charts as ECharts options, made of what was read. Colours and axes are in theme.json.

Colours are told apart by people with any kind of colour vision (the palette of Okabe and Ito), and one
thing has one colour everywhere. Text and lines take theirs from the style sheet, for light and dark.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.dashboard.books import LagShares, RewardShape, Series, Timeline
from headrace.runs.show import Account
from headrace.types import STAGES

Options = dict[str, Any]
Points = Sequence[tuple[float, float | None]]

THEME: Options = json.loads((Path(__file__).parent / "theme.json").read_text(encoding="utf-8"))
BLUE, ORANGE, PINK, GREEN, RED, SKY, YELLOW, GREY = THEME["color"]
STAGE_COLOURS = dict(zip(STAGES, (BLUE, ORANGE, PINK, GREEN, RED), strict=True))
FATE_COLOURS = {"trained": GREEN, "dropped": RED, "buffered": SKY, "in flight": GREY}
RUN_COLOURS = (BLUE, ORANGE)
LAG_COLOURS = (GREEN, SKY, YELLOW, ORANGE, RED, PINK)
MOST_LAG_BARS = 32
MOST_LAGS = len(LAG_COLOURS) - 1  # told apart; larger ones are one colour

# A bar of the timeline: where its lane and its seconds are.
_DRAW_BAR = """(params, api) => {
    const start = api.coord([api.value(1), api.value(0)]), end = api.coord([api.value(2), api.value(0)]);
    const height = api.size([0, 1])[1] * 0.6, area = params.coordSys, last = area.x + area.width;
    const left = Math.max(start[0], area.x), right = Math.min(Math.max(end[0], start[0] + 1), last);
    return right <= left ? null : {type: 'rect', style: api.style(),
        shape: {x: left, y: start[1] - height / 2, width: right - left, height: height}};
}"""
_SHORT = "v => Math.abs(v) >= 1e6 ? v / 1e6 + ' M' : Math.abs(v) >= 1e3 ? v / 1e3 + ' k' : v"
_FEW_DIGITS = "v => v == null ? '-' : Number(v.toPrecision(4)).toLocaleString('en')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Lines over a run's steps, and what they mean; by name a column, its colour and scale."""

    title: str
    says: str
    y: str
    lines: Mapping[str, tuple[str, str, float]]
    low: float | None = 0  # where the axis begins, if not near the smallest value
    band: tuple[str, str, str] | None = None  # its name, and the columns that it lies between
    points: tuple[str, str, str] | None = None  # their name, column and colour
    only_busy: bool = False  # leave out what is zero throughout

    def drawn(self, series: Series) -> tuple[Options, str]:
        """A chart of what there is, and a sentence on its points; before the first row, only that."""
        if not series.last_step:
            return {}, "There is no row yet: the first step is under way."
        curves = {}
        for name, (column, colour, scale) in self.lines.items():
            curves[name] = (series.curve(column, scale), colour)
        if self.only_busy:
            curves = {name: curve for name, curve in curves.items() if any(y for _, y in curve[0])}
        options = lines(curves, y=self.y, low=self.low)
        if self.band:
            name, low, high = self.band
            _add_band(options, name, series.curve(low), series.curve(high))
        if self.points:
            name, column, colour = self.points
            known = [list(point) for point in series.curve(column) if point[1] is not None]
            look = {"type": "scatter", "itemStyle": {"color": colour}}
            options["series"] += [{"name": name, "data": known} | look] if known else []
            options["legend"]["data"] += [name] if known else []
        return options, f"Each point is the mean of {series.width} steps." if series.width > 1 else ""


REWARD = Curve(
    title="Reward",
    says="The mean reward of all answers that were scored during a step. Training works if it rises. "
    "Diamonds are scores on held-out prompts, which are never trained on.",
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
    says="Seconds of a step in which each stage was busy. Stages may be busy at the same time, so they need "
    "not add up to the step.",
    y="seconds per step",
    lines={stage: (f"stage_s.{stage}", STAGE_COLOURS[stage], 1) for stage in STAGES},
    only_busy=True,
)
RATIO = Curve(
    title="Importance ratio",
    says="How much more likely the learner finds a token than the policy that sampled it: 1 means nothing "
    "changed. The band holds 98 of 100 tokens; a wide band means that the learner corrects a lot.",
    y="ratio",
    lines={"mean ratio": ("ratio_mean", BLUE, 1)},
    low=None,
    band=("98 of 100 tokens", "ratio_p01", "ratio_p99"),
)
WEIGHTS = Curve(
    title="Effective samples",
    says="What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few "
    "heavy ones dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
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


def lines(curves: Mapping[str, tuple[Points, str]], *, y: str, low: float | None = None) -> Options:
    """Curves over steps, each with its colour; the axis begins at `low`, or near the least value."""
    y_axis = _left(y) | ({"scale": True} if low is None else {"min": low})
    pointer = {"label": {"precision": 0, "formatter": "step {value}"}}
    x_axis = _below("step") | {"minInterval": 1, "scale": True, "axisPointer": pointer}
    series = [_line(name, *curve) for name, curve in curves.items()]
    return _chart(series, x_axis, y_axis, _FEW_DIGITS)


def _add_band(options: Options, name: str, low: Points, high: Points) -> None:
    """A shaded band from `low` to `high`, in the colour of the chart's first line."""
    line = options["series"][0]
    colour = line["lineStyle"]["color"]
    spread = [
        (place, None if top is None or bottom is None else top - bottom)
        for (place, bottom), (_, top) in zip(low, high, strict=True)
    ]
    unseen: Options = {"stack": "band", "stackStrategy": "all", "symbol": "none", "silent": True}
    unseen |= {"lineStyle": {"opacity": 0}, "tooltip": {"show": False}}
    shade = {"areaStyle": {"color": colour, "opacity": 0.25}}
    shade["itemStyle"] = {"color": colour, "opacity": 0.35}
    band = _line(name, spread, colour) | unseen | shade
    options["series"] = [_line("", low, colour) | unseen, band, line]
    options["legend"] |= {"show": True, "data": [line["name"], name]}
    options["grid"] = {"top": 60}


def sankey(accounts: Sequence[Account]) -> Options:
    shown = [account for account in accounts if account.amount.tokens > 0]
    total = sum(account.amount.tokens for account in shown)
    label = {"formatter": f"generated {total:,}", "position": [0, -18]}
    nodes = [{"name": "generated", "itemStyle": {"color": BLUE}, "label": label}]
    links = []
    for account in shown:
        tokens, colour = account.amount.tokens, FATE_COLOURS[account.state]
        label = {"formatter": f"{account.name} {tokens / total:.1%}"}
        nodes.append({"name": account.name, "itemStyle": {"color": colour}, "label": label})
        link = {"source": "generated", "target": account.name, "value": tokens}
        links.append(link | {"lineStyle": {"color": colour, "opacity": 0.4}})
    series = {"type": "sankey", "data": nodes, "links": links, "emphasis": {"focus": "adjacency"}}
    return {"tooltip": {"trigger": "item"}, "series": [series]}


def timeline(shown: Timeline) -> Options:
    """A lane for each stage and worker, seconds to the right."""
    series = []
    for stage in dict.fromkeys(stage for _, stage, _, _ in shown.bars):
        data = [
            {"value": [shown.lanes.index(lane), round(start_s, 4), round(end_s, 4)], "name": lane}
            for lane, of, start_s, end_s in shown.bars
            if of == stage
        ]
        look = {"type": "custom", ":renderItem": _DRAW_BAR, "encode": {"x": [1, 2], "y": 0}}
        look["itemStyle"] = {"color": STAGE_COLOURS.get(stage, GREY)}
        series.append({"name": stage, "data": data} | look)
    says = "p => p.name + ': ' + p.value[1].toFixed(3) + ' to ' + p.value[2].toFixed(3) + ' s'"
    x_axis = _below("seconds on the run's clock") | {"splitLine": {"show": True}}
    x_axis |= {"min": round(shown.start_s, 3), "max": round(shown.end_s, 3)}
    x_axis["axisLabel"] = {"showMinLabel": False, "showMaxLabel": False}
    # with a key, so that the wheel and a finger still move the page
    by_key = {"zoomOnMouseWheel": "shift", "moveOnMouseMove": "shift"}
    return {
        "tooltip": {"trigger": "item", ":formatter": says, "renderMode": "richText"},
        "grid": {"right": 16, "top": 8},
        "xAxis": x_axis,
        "yAxis": {"type": "category", "data": list(shown.lanes), "inverse": True},
        "dataZoom": [{"type": "inside", "filterMode": "weakFilter"} | by_key],
        "series": series,
    }


def lag_bars(shares: LagShares, last_step: int) -> Options:
    """The share of each lag in the tokens of a few steps, stacked to a whole."""
    width = 2 ** max(0, math.ceil(math.log2(max(last_step, 1) / MOST_LAG_BARS)))
    totals: Counter[int] = Counter()
    held: Counter[tuple[int, int]] = Counter()
    for (step, lag), tokens in shares.tokens.items():
        bucket = (step - 1) // width
        totals[bucket] += tokens
        held[bucket, min(lag, MOST_LAGS)] += tokens
    names, series = [], []
    for bucket in sorted(totals):
        end = min((bucket + 1) * width, max(last_step, 1))
        names.append(str(end) if width == 1 else f"{bucket * width + 1}-{end}")
    for lag in sorted({lag for _, lag in held}):
        data = [held[bucket, lag] / max(totals[bucket], 1) for bucket in sorted(totals)]
        name = f"lag {lag}{' or more' if lag == MOST_LAGS else ''}"
        series.append(_bar(name, LAG_COLOURS[lag], data) | {"stack": "all", "barCategoryGap": "8%"})
    options = _bars(series, names, x="step", y="% of trained tokens")
    options["yAxis"]["max"] = 100
    return options


def reward_bars(shape: RewardShape) -> Options:
    series = [
        _bar(f"first {shape.num_first:,} answers", GREY, shape.first),
        _bar(f"newest {shape.num_newest:,} answers", BLUE, shape.newest),
    ]
    return _bars(series, list(shape.labels), x="reward", y="% of answers")


def placement_bars(step_s: Mapping[str, float], best: str) -> Options:
    """Seconds of a step for each placement, lying down so that long names fit."""
    data = [
        {"value": round(seconds, 3), "itemStyle": {"color": GREEN if name == best else GREY}}
        for name, seconds in step_s.items()
    ]
    label = {"show": True, "position": "right", "color": "var(--ink)"}
    label[":formatter"] = "p => p.value.toFixed(2) + ' s'"
    return {
        "grid": {"right": 64, "top": 8},
        "xAxis": _below("seconds per step") | {"min": 0},
        "yAxis": {"type": "category", "data": list(step_s), "inverse": True},
        "series": [{"type": "bar", "data": data, "label": label, "barMaxWidth": 28}],
    }


def _line(name: str, points: Points, colour: str) -> Options:
    data = [list(point) for point in points]
    look = {"lineStyle": {"color": colour}, "itemStyle": {"color": colour}}
    return {"name": name, "type": "line", "data": data, "showSymbol": len(points) < 3} | look


def _bar(name: str, colour: str, shares: Sequence[float]) -> Options:
    data = [round(100 * share, 2) for share in shares]
    return {"name": name, "type": "bar", "itemStyle": {"color": colour}, "data": data}


def _bars(series: list[Options], names: list[str], *, x: str, y: str) -> Options:
    x_axis = _below(x) | {"type": "category", "data": names}
    return _chart(series, x_axis, _left(y) | {"min": 0}, "v => v + ' %'")


def _chart(series: list[Options], x_axis: Options, y_axis: Options, value: str) -> Options:
    named = [one["name"] for one in series if one["name"]]
    return {
        "tooltip": {"trigger": "axis", ":valueFormatter": value},
        "legend": {"type": "scroll", "show": len(series) > 1, "data": named},
        "grid": {"top": 60 if len(series) > 1 else 32},
        "xAxis": x_axis,
        "yAxis": y_axis,
        "series": series,
    }


def _below(name: str) -> Options:
    place = {"nameLocation": "middle", "nameGap": 28}
    return {"type": "value", "name": name, "splitLine": {"show": False}} | place


def _left(name: str) -> Options:
    look = {"nameTextStyle": {"align": "left"}, "axisLabel": {":formatter": _SHORT}}
    return {"type": "value", "name": name} | look

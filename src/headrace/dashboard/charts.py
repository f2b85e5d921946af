"""Charts as ECharts options: plain dictionaries, made of what was read.

Colours are told apart by people with any kind of colour vision (the palette of Okabe and Ito), and one thing has one
colour everywhere. Text and lines take theirs from the page's style sheet, so that light and dark need no second chart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.dashboard.books import Flow, LagShares, RewardShape, Timeline
from headrace.types import STAGES

Options = dict[str, Any]
Points = Sequence[tuple[float, float | None]]

BLUE, ORANGE, PINK, GREEN, RED = "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00"
SKY, YELLOW, GREY = "#56B4E9", "#F0E442", "#8C8C8C"
STAGE_COLOURS = dict(zip(STAGES, (BLUE, ORANGE, PINK, GREEN, RED), strict=True))
FATE_COLOURS = {"trained": GREEN, "dropped": RED, "buffered": SKY, "in_flight": GREY}
RUN_COLOURS = (BLUE, ORANGE)
INK, MUTED, LINE, CARD = "var(--ink)", "var(--muted)", "var(--line)", "var(--card)"
MOST_LAGS = 5  # told apart; larger ones are one colour

# A bar of the timeline: where its lane and its seconds are.
_DRAW_BAR = """(params, api) => {
    const start = api.coord([api.value(1), api.value(0)]), end = api.coord([api.value(2), api.value(0)]);
    const height = api.size([0, 1])[1] * 0.6, area = params.coordSys;
    const left = Math.max(start[0], area.x), right = Math.min(Math.max(end[0], start[0] + 1), area.x + area.width);
    return right <= left ? null : {type: 'rect', style: api.style(),
        shape: {x: left, y: start[1] - height / 2, width: right - left, height: height}};
}"""
_SHORT = "value => Math.abs(value) >= 1e6 ? value / 1e6 + ' M' : Math.abs(value) >= 1e3 ? value / 1e3 + ' k' : value"


def lines(curves: Mapping[str, tuple[Points, str]], *, x: str, y: str, low: float | None = None) -> Options:
    """Curves by name, each with its colour; `low` is where the axis begins, if not near the smallest value."""
    return _plane([_line(name, *curve) for name, curve in curves.items()], x=x, y=y, low=low)


def band(middle: Points, low: Points, high: Points, *, names: tuple[str, str], x: str, y: str, colour: str) -> Options:
    """A curve, and a shaded band around it from `low` to `high`; `names` are of the two."""
    spread = [
        (place, None if top is None or bottom is None else top - bottom)
        for (place, bottom), (_, top) in zip(low, high, strict=True)
    ]
    unseen: Options = {"stack": "band", "stackStrategy": "all", "symbol": "none", "lineStyle": {"opacity": 0}}
    unseen |= {"silent": True, "tooltip": {"show": False}}
    shade = {"areaStyle": {"color": colour, "opacity": 0.25}, "itemStyle": {"color": colour, "opacity": 0.35}}
    series = [
        _line("", low, colour) | unseen,
        _line(names[1], spread, colour) | unseen | shade,
        _line(names[0], middle, colour),
    ]
    options = _plane(series, x=x, y=y, low=None)
    options["legend"]["data"] = list(names)
    return options


def with_points(options: Options, name: str, points: Points, colour: str) -> Options:
    """The chart with single points on top, where there is a value."""
    known = [list(point) for point in points if point[1] is not None]
    if known:
        style = {"color": colour, "borderColor": CARD, "borderWidth": 1}
        options["series"].append(
            {"name": name, "type": "scatter", "data": known, "symbol": "diamond", "symbolSize": 10, "itemStyle": style}
        )
        options["legend"]["data"].append(name)
    return options


def sankey(flows: Sequence[Flow]) -> Options:
    """Tokens from generated to what became of them."""
    shown = [flow for flow in flows if flow.tokens > 0]
    total = sum(flow.tokens for flow in shown)
    nodes = [
        {
            "name": "generated",
            "itemStyle": {"color": BLUE},
            "label": {"formatter": f"generated {total:,}", "position": [0, -18]},
        }
    ]
    links = []
    for flow in shown:
        share = f"{flow.tokens / total:.1%}"
        colour = FATE_COLOURS.get(flow.kind, GREY)
        nodes.append(
            {"name": flow.name, "itemStyle": {"color": colour}, "label": {"formatter": f"{flow.name} {share}"}}
        )
        style = {"color": colour, "opacity": 0.4}
        links.append({"source": "generated", "target": flow.name, "value": flow.tokens, "lineStyle": style})
    return {
        "tooltip": _tooltip("item"),
        "animation": False,
        "series": [
            {
                "type": "sankey",
                "data": nodes,
                "links": links,
                "left": 8,
                "right": 168,
                "top": 24,
                "bottom": 12,
                "nodeWidth": 14,
                "nodeGap": 18,
                "layoutIterations": 0,
                "draggable": False,
                "label": {"color": INK, "fontSize": 12},
                "emphasis": {"focus": "adjacency"},
            }
        ],
    }


def timeline(shown: Timeline) -> Options:
    """A lane for each stage and worker, seconds to the right."""
    series = []
    for stage in dict.fromkeys(bar.stage for bar in shown.bars):
        colour = STAGE_COLOURS.get(stage, GREY)
        data = [
            {"value": [shown.lanes.index(bar.lane), round(bar.start_s, 4), round(bar.end_s, 4)], "name": bar.lane}
            for bar in shown.bars
            if bar.stage == stage
        ]
        series.append(
            {
                "name": stage,
                "type": "custom",
                ":renderItem": _DRAW_BAR,
                "itemStyle": {"color": colour},
                "encode": {"x": [1, 2], "y": 0},
                "data": data,
            }
        )
    says = "p => p.name + ': ' + p.value[1].toFixed(3) + ' to ' + p.value[2].toFixed(3) + ' s'"
    x_axis = _below("seconds on the run's clock") | {"min": round(shown.start_s, 3), "max": round(shown.end_s, 3)}
    x_axis["axisLabel"] |= {"showMinLabel": False, "showMaxLabel": False, "hideOverlap": True}
    y_axis = _axis("") | {"type": "category", "data": list(shown.lanes), "inverse": True, "splitLine": {"show": False}}
    # with a key, so that the wheel and a finger still move the page
    zoom = {"type": "inside", "filterMode": "weakFilter", "zoomOnMouseWheel": "shift", "moveOnMouseMove": "shift"}
    return {
        "tooltip": _tooltip("item") | {":formatter": says, "renderMode": "richText"},
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 8, "bottom": 28, "containLabel": True},
        "xAxis": x_axis | {"splitLine": {"lineStyle": {"color": LINE}}},
        "yAxis": y_axis,
        "dataZoom": [zoom],
        "series": series,
    }


def lag_bars(shares: LagShares, last_step: int) -> Options:
    """The share of each lag in the tokens of a few steps, stacked to a whole."""
    lags = sorted({min(lag, MOST_LAGS) for _, lag in shares.tokens})
    buckets = sorted({bucket for bucket, _ in shares.tokens})
    totals = dict.fromkeys(buckets, 0)
    held: dict[tuple[int, int], int] = {}
    for (bucket, lag), tokens in shares.tokens.items():
        totals[bucket] += tokens
        held[bucket, min(lag, MOST_LAGS)] = held.get((bucket, min(lag, MOST_LAGS)), 0) + tokens
    colours = (GREEN, SKY, YELLOW, ORANGE, RED, PINK)
    series = [
        {
            "name": f"lag {lag}{' or more' if lag == MOST_LAGS else ''}",
            "type": "bar",
            "stack": "all",
            "barCategoryGap": "8%",
            "itemStyle": {"color": colours[lag]},
            "data": [round(100 * held.get((bucket, lag), 0) / max(totals[bucket], 1), 2) for bucket in buckets],
        }
        for lag in lags
    ]
    ends = [min((bucket + 1) * shares.width, max(last_step, 1)) for bucket in buckets]
    names = [
        str(end) if shares.width == 1 else f"{bucket * shares.width + 1}-{end}"
        for bucket, end in zip(buckets, ends, strict=True)
    ]
    options = _bars(series, names, x="step", y="% of trained tokens")
    options["yAxis"]["max"] = 100
    return options


def reward_bars(shape: RewardShape) -> Options:
    """Two histograms side by side."""
    series = [
        {"name": name, "type": "bar", "itemStyle": {"color": colour}, "data": [round(100 * s, 2) for s in shares]}
        for name, colour, shares in (
            (f"first {shape.num_first:,} answers", GREY, shape.first),
            (f"newest {shape.num_newest:,} answers", BLUE, shape.newest),
        )
    ]
    return _bars(series, list(shape.labels), x="reward", y="% of answers")


def placement_bars(step_s: Mapping[str, float], best: str) -> Options:
    """Seconds of a step for each placement, lying down so that long names fit."""
    data = [
        {"value": round(seconds, 3), "itemStyle": {"color": GREEN if name == best else GREY}}
        for name, seconds in step_s.items()
    ]
    label = {"show": True, "position": "right", ":formatter": "p => p.value.toFixed(2) + ' s'", "color": INK}
    y_axis = _axis("") | {"type": "category", "data": list(step_s), "inverse": True, "splitLine": {"show": False}}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 64, "top": 8, "bottom": 28, "containLabel": True},
        "xAxis": _below("seconds per step") | {"min": 0},
        "yAxis": y_axis,
        "series": [{"type": "bar", "data": data, "label": label, "barMaxWidth": 28}],
    }


def _line(name: str, points: Points, colour: str) -> Options:
    return {
        "name": name,
        "type": "line",
        "data": [list(point) for point in points],
        "showSymbol": len(points) < 3,
        "symbolSize": 5,
        "emphasis": {"disabled": True},
        "lineStyle": {"width": 2, "color": colour},
        "itemStyle": {"color": colour},
    }


def _plane(series: list[Options], *, x: str, y: str, low: float | None) -> Options:
    """Two axes of numbers."""
    y_axis = _left(y) | ({"scale": True} if low is None else {"min": low})
    pointer = {"label": {"precision": 0, "formatter": f"{x} {{value}}"}}
    x_axis = _below(x) | {"minInterval": 1, "scale": True, "axisPointer": pointer}
    value = "v => v == null ? '-' : Number(v.toPrecision(4)).toLocaleString('en')"
    return _chart(series, x_axis, y_axis, value, legend=len(series) > 1)


def _bars(series: list[Options], names: list[str], *, x: str, y: str) -> Options:
    """Bars over names."""
    return _chart(series, _below(x) | {"type": "category", "data": names}, _left(y) | {"min": 0}, "v => v + ' %'")


def _chart(series: list[Options], x_axis: Options, y_axis: Options, value: str, *, legend: bool = True) -> Options:
    named = {"show": legend, "data": [one["name"] for one in series if one["name"]]}
    return {
        "tooltip": _tooltip("axis") | {":valueFormatter": value},
        "legend": _legend() | named,
        "animation": False,
        "grid": {"left": 8, "right": 28, "top": 60 if legend else 32, "bottom": 28, "containLabel": True},
        "xAxis": x_axis,
        "yAxis": y_axis,
        "series": series,
    }


def _axis(name: str) -> Options:
    return {
        "type": "value",
        "name": name,
        "nameTextStyle": {"color": MUTED, "align": "left" if name else "center", "fontSize": 12},
        "axisLabel": {"color": MUTED, "fontSize": 12, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": LINE}},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": LINE}},
    }


def _below(name: str) -> Options:
    """The axis along the bottom, its name under the middle."""
    axis = _axis(name)
    return axis | {
        "nameLocation": "middle",
        "nameGap": 28,
        "nameTextStyle": axis["nameTextStyle"] | {"align": "center"},
        "splitLine": {"show": False},
    }


def _left(name: str) -> Options:
    """The axis on the left, with short numbers."""
    axis = _axis(name)
    axis["axisLabel"][":formatter"] = _SHORT
    return axis


def _legend() -> Options:
    shape = {"icon": "roundRect", "itemWidth": 14, "itemHeight": 10, "textStyle": {"color": INK}}
    return shape | {"type": "scroll", "top": 0, "left": 0}


def _tooltip(trigger: str) -> Options:
    colours = {"backgroundColor": CARD, "borderColor": LINE, "textStyle": {"color": INK, "fontSize": 12}}
    return colours | {"trigger": trigger, "confine": True}

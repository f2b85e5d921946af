"""Charts as ECharts options: plain dictionaries, made of what was read. Colours and axes are in theme.json.

Colours are told apart by people with any kind of colour vision (the palette of Okabe and Ito), and one thing has one
colour everywhere. Text and lines take theirs from the page's style sheet: light and dark need no second chart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.dashboard.books import LagShares, RewardShape, Timeline
from headrace.runs.tables import Account
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
    const height = api.size([0, 1])[1] * 0.6, area = params.coordSys;
    const left = Math.max(start[0], area.x), right = Math.min(Math.max(end[0], start[0] + 1), area.x + area.width);
    return right <= left ? null : {type: 'rect', style: api.style(),
        shape: {x: left, y: start[1] - height / 2, width: right - left, height: height}};
}"""
_SHORT = "value => Math.abs(value) >= 1e6 ? value / 1e6 + ' M' : Math.abs(value) >= 1e3 ? value / 1e3 + ' k' : value"
_FEW_DIGITS = "v => v == null ? '-' : Number(v.toPrecision(4)).toLocaleString('en')"


def lines(curves: Mapping[str, tuple[Points, str]], *, y: str, low: float | None = None) -> Options:
    """Curves over steps, each with its colour; `low` is where the axis begins, if not near the smallest value."""
    return _plane([_line(name, *curve) for name, curve in curves.items()], y=y, low=low)


def add_band(options: Options, name: str, low: Points, high: Points) -> None:
    """A shaded band from `low` to `high`, in the colour of the chart's first line."""
    line = options["series"][0]
    colour = line["lineStyle"]["color"]
    spread = [
        (place, None if top is None or bottom is None else top - bottom)
        for (place, bottom), (_, top) in zip(low, high, strict=True)
    ]
    unseen: Options = {"stack": "band", "stackStrategy": "all", "symbol": "none", "lineStyle": {"opacity": 0}}
    unseen |= {"silent": True, "tooltip": {"show": False}}
    shade = {"areaStyle": {"color": colour, "opacity": 0.25}, "itemStyle": {"color": colour, "opacity": 0.35}}
    options["series"] = [_line("", low, colour) | unseen, _line(name, spread, colour) | unseen | shade, line]
    options["legend"] |= {"show": True, "data": [line["name"], name]}
    options["grid"] = {"top": 60}


def add_points(options: Options, name: str, points: Points, colour: str) -> None:
    """Single points on top, where there is a value."""
    known = [list(point) for point in points if point[1] is not None]
    if known:
        options["series"].append({"name": name, "type": "scatter", "data": known, "itemStyle": {"color": colour}})
        options["legend"]["data"].append(name)


def sankey(accounts: Sequence[Account]) -> Options:
    shown = [account for account in accounts if account.amount.tokens > 0]
    total = sum(account.amount.tokens for account in shown)
    label = {"formatter": f"generated {total:,}", "position": [0, -18]}
    nodes = [{"name": "generated", "itemStyle": {"color": BLUE}, "label": label}]
    links = []
    for account in shown:
        colour = FATE_COLOURS[account.state]
        label = {"formatter": f"{account.name} {account.amount.tokens / total:.1%}"}
        nodes.append({"name": account.name, "itemStyle": {"color": colour}, "label": label})
        style = {"color": colour, "opacity": 0.4}
        links.append(
            {"source": "generated", "target": account.name, "value": account.amount.tokens, "lineStyle": style}
        )
    place = {"left": 8, "right": 168, "top": 24, "bottom": 12, "nodeWidth": 14, "nodeGap": 18}
    look = {"layoutIterations": 0, "draggable": False, "emphasis": {"focus": "adjacency"}}
    return {
        "tooltip": {"trigger": "item"},
        "series": [{"type": "sankey", "data": nodes, "links": links} | place | look],
    }


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
        colour = STAGE_COLOURS.get(stage, GREY)
        series.append({"name": stage, "itemStyle": {"color": colour}, "data": data} | look)
    says = "p => p.name + ': ' + p.value[1].toFixed(3) + ' to ' + p.value[2].toFixed(3) + ' s'"
    x_axis = _below("seconds on the run's clock") | {"splitLine": {"show": True}}
    x_axis |= {"min": round(shown.start_s, 3), "max": round(shown.end_s, 3)}
    x_axis["axisLabel"] = {"showMinLabel": False, "showMaxLabel": False}
    # with a key, so that the wheel and a finger still move the page
    zoom = {"type": "inside", "filterMode": "weakFilter", "zoomOnMouseWheel": "shift", "moveOnMouseMove": "shift"}
    return {
        "tooltip": {"trigger": "item", ":formatter": says, "renderMode": "richText"},
        "grid": {"right": 16, "top": 8},
        "xAxis": x_axis,
        "yAxis": {"type": "category", "data": list(shown.lanes), "inverse": True},
        "dataZoom": [zoom],
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
    buckets = sorted(totals)
    series = [
        {
            "name": f"lag {lag}{' or more' if lag == MOST_LAGS else ''}",
            "type": "bar",
            "stack": "all",
            "barCategoryGap": "8%",
            "itemStyle": {"color": LAG_COLOURS[lag]},
            "data": [round(100 * held[bucket, lag] / max(totals[bucket], 1), 2) for bucket in buckets],
        }
        for lag in sorted({lag for _, lag in held})
    ]
    names = []
    for bucket in buckets:
        end = min((bucket + 1) * width, max(last_step, 1))
        names.append(str(end) if width == 1 else f"{bucket * width + 1}-{end}")
    options = _bars(series, names, x="step", y="% of trained tokens")
    options["yAxis"]["max"] = 100
    return options


def reward_bars(shape: RewardShape) -> Options:
    sides = (("first", shape.num_first, GREY, shape.first), ("newest", shape.num_newest, BLUE, shape.newest))
    series = [
        {
            "name": f"{name} {number:,} answers",
            "type": "bar",
            "itemStyle": {"color": colour},
            "data": [round(100 * share, 2) for share in shares],
        }
        for name, number, colour, shares in sides
    ]
    return _bars(series, list(shape.labels), x="reward", y="% of answers")


def placement_bars(step_s: Mapping[str, float], best: str) -> Options:
    """Seconds of a step for each placement, lying down so that long names fit."""
    data = [
        {"value": round(seconds, 3), "itemStyle": {"color": GREEN if name == best else GREY}}
        for name, seconds in step_s.items()
    ]
    label = {"show": True, "position": "right", ":formatter": "p => p.value.toFixed(2) + ' s'", "color": "var(--ink)"}
    return {
        "grid": {"right": 64, "top": 8},
        "xAxis": _below("seconds per step") | {"min": 0},
        "yAxis": {"type": "category", "data": list(step_s), "inverse": True},
        "series": [{"type": "bar", "data": data, "label": label, "barMaxWidth": 28}],
    }


def _line(name: str, points: Points, colour: str) -> Options:
    return {
        "name": name,
        "type": "line",
        "data": [list(point) for point in points],
        "showSymbol": len(points) < 3,
        "lineStyle": {"color": colour},
        "itemStyle": {"color": colour},
    }


def _plane(series: list[Options], *, y: str, low: float | None) -> Options:
    y_axis = _left(y) | ({"scale": True} if low is None else {"min": low})
    pointer = {"label": {"precision": 0, "formatter": "step {value}"}}
    x_axis = _below("step") | {"minInterval": 1, "scale": True, "axisPointer": pointer}
    return _chart(series, x_axis, y_axis, _FEW_DIGITS)


def _bars(series: list[Options], names: list[str], *, x: str, y: str) -> Options:
    return _chart(series, _below(x) | {"type": "category", "data": names}, _left(y) | {"min": 0}, "v => v + ' %'")


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
    """The axis along the bottom, its name under the middle."""
    return {"type": "value", "name": name, "nameLocation": "middle", "nameGap": 28, "splitLine": {"show": False}}


def _left(name: str) -> Options:
    """The axis on the left, with short numbers."""
    return {
        "type": "value",
        "name": name,
        "nameTextStyle": {"align": "left"},
        "axisLabel": {":formatter": _SHORT},
    }

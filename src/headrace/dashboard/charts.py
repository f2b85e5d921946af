"""Charts as ECharts options, made of what was read. Colours and axes are in theme.json.

Colours are told apart by people with any kind of colour vision (the palette of Okabe and Ito), and one
thing has one colour everywhere. Text and lines take theirs from the style sheet, for light and dark.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.dashboard.books import RewardShape, Tally, Timeline
from headrace.measured import STAGES
from headrace.runs.show import Account

Options = dict[str, Any]
Points = Sequence[tuple[float, float | None]]

THEME: Options = json.loads((Path(__file__).parent / "theme.json").read_text(encoding="utf-8"))
BLUE, ORANGE, PINK, GREEN, RED, SKY, YELLOW, GREY = THEME["color"]
STAGE_COLOURS = dict(zip(STAGES, (BLUE, ORANGE, PINK, GREEN, RED), strict=True))
FATE_COLOURS = {"trained": GREEN, "dropped": RED, "buffered": SKY, "in flight": GREY}
NUM_COLOURS = len(THEME["color"])
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
_POINTED = "p => '%s ' + Number(p.value.toPrecision(4)).toLocaleString('en')"
_FEW_DIGITS = "v => v == null ? '-' : Number(v.toPrecision(4)).toLocaleString('en')"


def lines(
    curves: Mapping[str, tuple[Points, str]],
    *,
    y: str,
    low: float | None = None,
    by: str = "step",
    smoothing: float = 0.0,
) -> Options:
    """Curves along `by`, each with its colour; the axis begins at `low`, or near the least value.

    With `smoothing`, the curves as they were measured lie pale behind.
    """
    y_axis = _left(y) | ({"scale": True} if low is None else {"min": low})
    x_axis = _below(by) | {"scale": True, "axisLabel": {":formatter": _SHORT}}
    x_axis["axisPointer"] = {"label": {":formatter": _POINTED % by}}
    x_axis |= {"minInterval": 1} if by != "hours" else {}
    series, pale = [], {"silent": True, "tooltip": {"show": False}, "z": 1}
    for place, (name, (points, colour)) in enumerate(curves.items()):
        dashed = {"type": "dashed"} if place >= NUM_COLOURS else {}  # colours come round again
        if smoothing:
            faint = _line("", points, colour) | pale
            series.append(faint | {"lineStyle": {"color": colour, "opacity": 0.3, "width": 1}})
        drawn = _line(name, smoothed(points, smoothing), colour)
        series.append(drawn | {"lineStyle": {"color": colour} | dashed})
    return _chart(series, x_axis, y_axis, _FEW_DIGITS)


def smoothed(points: Points, weight: float) -> Points:
    """The exponential moving average, in which the past has this weight; gaps stay."""
    found, mean, mass = [], 0.0, 0.0
    for x, y in points:
        if y is not None:
            mean, mass = weight * mean + (1 - weight) * y, weight * mass + (1 - weight)
        found.append((x, y if y is None or not weight else mean / mass))
    return found


def add_band(options: Options, name: str, low: Points, high: Points) -> None:
    """A shaded band from `low` to `high`, in the colour of the chart's first line."""
    line = next(one for one in options["series"] if one["name"])
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
    options["series"] = [_line("", low, colour) | unseen, band, *options["series"]]
    _list(options, name)


def add_points(options: Options, name: str, points: Points, colour: str) -> None:
    """Single points, which no line joins."""
    known = [list(point) for point in points if point[1] is not None]
    if known:
        options["series"].append({"name": name, "type": "scatter", "data": known, "itemStyle": {"color": colour}})
        _list(options, name)


def _list(options: Options, name: str) -> None:
    options["legend"]["data"].append(name)
    options["legend"] |= {"show": True, "type": "plain"}
    options["grid"] = {"top": 60 if len(options["legend"]["data"]) < 4 else 76}  # two lines on a phone


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


def lag_bars(shares: Tally, last_step: int) -> Options:
    """The share of each lag in the tokens of a few steps, stacked to a whole."""
    width = 2 ** max(0, math.ceil(math.log2(max(last_step, 1) / MOST_LAG_BARS)))
    totals: Counter[int] = Counter()
    held: Counter[tuple[int, int]] = Counter()
    for (step, lag), tokens in shares.sums.items():
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
    num_known = sum(y is not None for _, y in points)
    few = num_known < 3 or num_known < len(points) / 2  # such as scores: single points, joined
    look = {"lineStyle": {"color": colour}, "itemStyle": {"color": colour}}
    return {"name": name, "type": "line", "data": data, "showSymbol": few, "connectNulls": few} | look


def _bar(name: str, colour: str, shares: Sequence[float]) -> Options:
    data = [round(100 * share, 2) for share in shares]
    return {"name": name, "type": "bar", "itemStyle": {"color": colour}, "data": data}


def _bars(series: list[Options], names: list[str], *, x: str, y: str) -> Options:
    x_axis = _below(x) | {"type": "category", "data": names}
    return _chart(series, x_axis, _left(y) | {"min": 0}, "v => v + ' %'")


def _chart(series: list[Options], x_axis: Options, y_axis: Options, value: str) -> Options:
    named = [one["name"] for one in series if one["name"]]
    several = len(named) > 1
    return {
        "tooltip": {"trigger": "axis", ":valueFormatter": value},
        "legend": {"type": "plain" if len(named) < 3 else "scroll", "show": several, "data": named},
        "grid": {"top": 60 if several else 32},
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

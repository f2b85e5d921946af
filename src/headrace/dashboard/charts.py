"""Charts as ECharts options, made of what was read: curves over a run's steps, bars, lanes, flows.

Colours and axes are in theme.json. Colours are told apart by people with any kind of colour vision
(the palette of Okabe and Ito), and one thing has one colour everywhere. Text and lines take theirs
from the style sheet, for light and dark.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config_file import read_toml
from headrace.dashboard.books import Points, Series, Tally, Timeline, steps_together
from headrace.measured import ROW_METRICS
from headrace.runs.columns import Numbers
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.show import Account

Options = dict[str, Any]
Curves = Mapping[str, tuple[Points, str]]  # by name, each with its colour
Shares = tuple[str, Numbers]  # their colour, and what they are
Drawn = tuple[Options, str]  # a chart, if there is anything to draw, and a sentence about it

HERE = Path(__file__)
THEME: Options = json.loads(HERE.with_name("theme.json").read_text(encoding="utf-8"))
BLUE, ORANGE, PINK, GREEN, RED, SKY, YELLOW, GREY = THEME["color"]
COLOURS = {"blue": BLUE, "orange": ORANGE, "pink": PINK, "green": GREEN, "red": RED}
FATE_COLOURS = {"trained": GREEN, "dropped": RED, "buffered": SKY, "in flight": GREY}
NUM_COLOURS = len(THEME["color"])
LAG_COLOURS = (GREEN, SKY, YELLOW, ORANGE, RED, PINK)
MOST_LAG_BARS = 32
MOST_LAGS = len(LAG_COLOURS) - 1  # told apart; larger ones are one colour
MOST_REWARD_BARS = 20
NO_ROW = "There is no row yet: the first step is under way."
_FIRST = ("reward", "learner", "length", "mismatch", "lag")  # of the groups of curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How curves are drawn: along one of `AXES`, and how smooth, from 0 to less than 1."""

    by: str = "step"
    smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A part of the page and what it means, as cards.toml has it; of a curve, also what to draw."""

    title: str = ""
    says: str = ""
    y: str = ""
    lines: Mapping[str, tuple[str, str, float]] = field(default_factory=dict)
    low: float | None = None
    band: tuple[str, str, str] | None = None
    held_out: bool = False  # add the scores on held-out prompts
    only_busy: bool = False  # leave out what is zero throughout

    def drawn(self, series: Series, look: Look, facts: RunFacts | None = None) -> Drawn:
        if not series.last_step:
            return {}, NO_ROW
        curves = {}
        for name, (column, colour, scale) in self.lines.items():
            curves[name] = (series.curve(column, scale, look.by), COLOURS[colour])
        if all(y is None for points, _ in curves.values() for _, y in points):
            return {}, "It was not measured in this run."
        if self.only_busy:
            curves = {name: curve for name, curve in curves.items() if any(y for _, y in curve[0])}
        if not curves:
            return {}, "It was 0 in every step."
        more = _scores(series, look, facts) if self.held_out else []
        if self.band:
            name, low, high = self.band
            colour = next(iter(curves.values()))[1]
            more += _band(name, series.curve(low, by=look.by), series.curve(high, by=look.by), colour)
        return lines(curves, self.y, look, self.low, more), _per_point(series)

    def compared(self, runs: Mapping[str, Series], look: Look) -> Drawn:
        """Its first line in each of these runs."""
        column, _, scale = next(iter(self.lines.values()))
        curves = _coloured({name: series.curve(column, scale, look.by) for name, series in runs.items()})
        if not any(y for points, _ in curves.values() for _, y in points):
            return {}, "It was 0, or not measured, in all of these runs."
        return lines(curves, self.y, look), ""


CARDS = {name: Card(**card) for name, card in read_toml(HERE.with_name("cards.toml")).items()}
STAGE_COLOURS = {name: COLOURS[colour] for name, (_, colour, _) in CARDS["stage_times"].lines.items()}


def metric_curves() -> dict[str, list[Card]]:
    """A chart for every number of a row, by the first part of its label: what is looked at most comes first."""
    found: dict[str, list[Card]] = {group: [] for group in _FIRST}
    for name, metric in ROW_METRICS.items():
        parts = name.removesuffix("_s").removeprefix("num_").split("_")
        words = " ".join(part.upper() if len(part) == 2 else part for part in parts)  # LR, KL
        share = name.endswith("share")
        curve = Card(
            title=words[0].upper() + words[1:],
            says=f"{metric.help[0].upper()}{metric.help[1:]}.",
            y="%" if share else metric.unit,
            lines={words: (name, "blue", 100 if share else 1)},
            only_busy=True,
        )
        found.setdefault(metric.label.split("/")[0], []).append(curve)
    return found


def parts_drawn(parts: Tally, series: Series, look: Look) -> Drawn:
    means = parts.means(series, look.by)
    if not means:
        return {}, "No answer has been scored yet." if series.last_step else NO_ROW
    return lines(_coloured(means), "mean", look), _per_point(series)


def _coloured(curves: Mapping[str, Points]) -> Curves:
    return {name: (points, THEME["color"][place % NUM_COLOURS]) for place, (name, points) in enumerate(curves.items())}


def _per_point(series: Series) -> str:
    return f"Each point stands for {series.width} steps." if series.width > 1 else ""


def lines(curves: Curves, y: str, look: Look, low: float | None = None, more: Sequence[Options] = ()) -> Options:
    """Curves, each with its colour, and `more`; the axis begins at `low`, or near the least value.

    If they are smoothed, the curves as they were measured lie pale behind.
    """
    y_axis = _left(y) | ({"scale": True} if low is None else {"min": low})
    x_axis = _below(look.by) | {"scale": True, "axisLabel": {":formatter": "briefly"}}
    x_axis["axisPointer"] = {"label": {":formatter": f"p => '{look.by} ' + fewDigits(p.value)"}}
    x_axis |= {"minInterval": 1} if look.by != "hours" else {}
    series = []
    for place, (name, (points, colour)) in enumerate(curves.items()):
        if look.smoothing:
            pale = _line("", points, colour, opacity=0.3, width=1)
            series.append(pale | {"silent": True, "tooltip": {"show": False}, "z": 1})
        dashed = {"type": "dashed"} if place >= NUM_COLOURS else {}  # colours come round again
        series.append(_line(name, smoothed(points, look.smoothing), colour, **dashed))
    return _chart([*series, *more], x_axis, y_axis, "fewDigits", scrolls=not more)


def smoothed(points: Points, weight: float) -> Points:
    """The exponential moving average, in which the past has this weight; gaps stay."""
    found, mean, mass = [], 0.0, 0.0
    for x, y in points:
        if y is not None:
            mean, mass = weight * mean + (1 - weight) * y, weight * mass + (1 - weight)
        found.append((x, y if y is None or not weight else mean / mass))
    return found


def _band(name: str, low: Points, high: Points, colour: str) -> list[Options]:
    """A shaded band from `low` to `high`, behind the lines."""
    spread = [
        (place, None if top is None or bottom is None else top - bottom)
        for (place, bottom), (_, top) in zip(low, high, strict=True)
    ]
    unseen: Options = {"stack": "band", "stackStrategy": "all", "symbol": "none", "silent": True, "z": 1}
    unseen |= {"lineStyle": {"opacity": 0}, "tooltip": {"show": False}}
    shade = {"areaStyle": {"color": colour, "opacity": 0.25}, "itemStyle": {"color": colour, "opacity": 0.35}}
    return [_line("", low, colour) | unseen, _line(name, spread, colour) | unseen | shade]


def _scores(series: Series, look: Look, facts: RunFacts | None) -> list[Options]:
    """The scores on held-out prompts, as single points, which no line joins."""
    before = None if facts is None else facts.score_before
    after = facts.score_after if facts is not None and facts.state is RunState.FINISHED else None
    last, marks = series.places(look.by)[-1].item(), []
    for name, points, colour in (
        ("held-out, before", [(0, before)], GREY),
        ("held-out score", series.curve("score", by=look.by), ORANGE),
        ("held-out, after", [(last, after)], GREEN),
    ):
        if known := [list(point) for point in points if point[1] is not None]:
            marks.append({"name": name, "type": "scatter", "data": known, "itemStyle": {"color": colour}})
    return marks


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
    look = {"type": "custom", ":renderItem": "drawBar", "encode": {"x": [1, 2], "y": 0}}
    lanes, series = list(shown.busy), dict[str, Options]()
    for lane, stage, start_s, end_s in shown.bars:
        colour = STAGE_COLOURS.get(stage, GREY)
        of_stage = series.setdefault(stage, {"name": stage, "itemStyle": {"color": colour}, "data": []} | look)
        value = [lanes.index(lane), round(start_s, 4), round(end_s, 4)]
        of_stage["data"].append({"value": value, "name": lane})
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
        "yAxis": {"type": "category", "data": lanes, "inverse": True},
        "dataZoom": [{"type": "inside", "filterMode": "weakFilter"} | by_key],
        "series": list(series.values()),
    }


def lag_bars(shares: Tally, last_step: int) -> Options:
    """The share of each lag in the tokens of a few steps, stacked to a whole."""
    width = steps_together(last_step, MOST_LAG_BARS)
    held = np.zeros((MOST_LAGS + 1, 1 + max(((step - 1) // width for step, _ in shares.sums), default=0)))
    for (step, lag), tokens in shares.sums.items():
        held[min(lag, MOST_LAGS), (step - 1) // width] += tokens
    buckets, names, bars = np.flatnonzero(held.any(axis=0)), [], {}
    for begin in width * buckets:
        end = min(begin + width, max(last_step, 1))
        names.append(str(end) if width == 1 else f"{begin + 1}-{end}")
    for lag in np.flatnonzero(held.any(axis=1)):
        shown = held[lag, buckets] / held.sum(axis=0)[buckets]
        bars[f"lag {lag}{' or more' if lag == MOST_LAGS else ''}"] = LAG_COLOURS[lag], shown
    return _bars(bars, names, x="step", y="% of trained tokens", stacked=True)


def reward_bars(first: Numbers, newest: Numbers) -> Options:
    """How the rewards of each side are distributed; few values have a bar each."""
    sides, bars = {"first": (GREY, first), "newest": (BLUE, newest)}, {}
    values = np.unique(np.concatenate([first, newest]))
    names, edges = [f"{value:g}" for value in values], np.append(values, np.inf)
    if len(values) > MOST_REWARD_BARS:  # each has the middle of its bin as its name
        edges = np.linspace(values[0], values[-1], MOST_REWARD_BARS + 1)
        names = [f"{middle:.3g}" for middle in (edges[1:] + edges[:-1]) / 2]
    for side, (colour, rewards) in sides.items():
        counts, _ = np.histogram(rewards, edges)
        bars[f"{side} {len(rewards):,} answers"] = colour, counts / max(len(rewards), 1)
    return _bars(bars, names, x="reward", y="% of answers")


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


def _line(name: str, points: Points, colour: str, **style: object) -> Options:
    data = [list(point) for point in points]
    num_known = sum(y is not None for _, y in points)
    few = num_known < 3 or num_known < len(points) / 2  # such as scores: single points, joined
    look = {"lineStyle": {"color": colour} | style, "itemStyle": {"color": colour}}
    return {"name": name, "type": "line", "data": data, "showSymbol": few, "connectNulls": few} | look


def _bars(bars: Mapping[str, Shares], names: list[str], *, x: str, y: str, stacked: bool = False) -> Options:
    """Shares as bars in per cent, beside each other or stacked to a whole."""
    look = {"stack": "all", "barCategoryGap": "8%"} if stacked else {}
    series: list[Options] = []
    for name, (colour, shares) in bars.items():
        data = [round(100 * share, 2) for share in shares.tolist()]
        series.append({"name": name, "type": "bar", "itemStyle": {"color": colour}, "data": data} | look)
    y_axis = _left(y) | {"min": 0, "max": 100 if stacked else None}
    return _chart(series, _below(x) | {"type": "category", "data": names}, y_axis, "v => v + ' %'")


def _chart(series: list[Options], x_axis: Options, y_axis: Options, value: str, scrolls: bool = True) -> Options:
    """If the legend does not scroll, it may take two lines on a phone."""
    named = [one["name"] for one in series if one["name"]]
    kind = "scroll" if scrolls and len(named) > 2 else "plain"
    return {
        "tooltip": {"trigger": "axis", ":valueFormatter": value},
        "legend": {"type": kind, "show": len(named) > 1, "data": named},
        "grid": {"top": 32 if len(named) < 2 else 60 if scrolls or len(named) < 4 else 76},
        "xAxis": x_axis,
        "yAxis": y_axis,
        "series": series,
    }


def _below(name: str) -> Options:
    place = {"nameLocation": "middle", "nameGap": 28}
    return {"type": "value", "name": name, "splitLine": {"show": False}} | place


def _left(name: str) -> Options:
    look = {"nameTextStyle": {"align": "left"}, "axisLabel": {":formatter": "briefly"}}
    return {"type": "value", "name": name} | look

"""Charts as ECharts options, made of what was read: curves over a run's steps, bars, lanes, flows.

Colours and axes are in theme.json, what all charts of a kind share in charts.toml. Colours are told
apart by people with any kind of colour vision (the palette of Okabe and Ito), and one thing has one
colour everywhere. Text and lines take theirs from the style sheet, for light and dark.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.config_file import read_toml
from headrace.dashboard.books import Points, Rewards, Series, Tally, Timeline, steps_together
from headrace.ledger.ledger import Books
from headrace.measured import ROW_METRICS
from headrace.runs.columns import Numbers
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.show import accounts

Options = dict[str, Any]
Curves = Mapping[str, tuple[Points, str]]  # by name, each with its colour
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
_FIRST = ("reward", "learner", "length", "mismatch", "lag")  # what is looked at most


class Look(NamedTuple):
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

    def drawn(self, series: Series, look: Look, facts: RunFacts) -> Drawn:
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


KINDS: dict[str, Options] = read_toml(HERE.with_name("charts.toml"))
CARDS = {name: Card(**card) for name, card in read_toml(HERE.with_name("cards.toml")).items()}
STAGE_COLOURS = {name: COLOURS[colour] for name, (_, colour, _) in CARDS["stage_times"].lines.items()}


def metric_curves() -> dict[str, list[Card]]:
    """A chart for every number of a row, by the first part of its label."""
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
    y_axis = {"name": y} | ({"scale": True} if low is None else {"min": low})
    x_axis: Options = {"name": look.by, "minInterval": 0 if look.by == "hours" else 1}
    x_axis["axisPointer"] = {"label": {":formatter": f"p => '{look.by} ' + fewDigits(p.value)"}}
    series: list[Options] = []
    for place, (name, (points, colour)) in enumerate(curves.items()):
        if look.smoothing:
            pale = _line("", points, colour, opacity=0.3, width=1)
            series.append(pale | {"silent": True, "tooltip": {"show": False}, "z": 1})
        dashed = {"type": "dashed"} if place >= NUM_COLOURS else {}  # colours come round again
        series.append(_line(name, smoothed(points, look.smoothing), colour, **dashed))
    series += more
    return _chart("curves", series, x_axis, y_axis) | _legend(series, scrolls=not more)


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
    below, above = (_line(told, points, colour) | KINDS["band"] for told, points in (("", low), (name, spread)))
    above |= {"areaStyle": {"color": colour, "opacity": 0.25}, "itemStyle": {"color": colour, "opacity": 0.35}}
    return [below, above]


def _scores(series: Series, look: Look, facts: RunFacts) -> list[Options]:
    """The scores on held-out prompts, as single points, which no line joins."""
    after = facts.score_after if facts.state is RunState.FINISHED else None
    last, marks = series.places(look.by)[-1].item(), []
    for name, points, colour in (
        ("held-out, before", [(0, facts.score_before)], GREY),
        ("held-out score", series.curve("score", by=look.by), ORANGE),
        ("held-out, after", [(last, after)], GREEN),
    ):
        if known := [point for point in points if point[1] is not None]:
            marks.append({"name": name, "type": "scatter", "data": known, "itemStyle": {"color": colour}})
    return marks


def sankey(held: Books) -> Drawn:
    shown = [account for account in accounts(held) if account.amount.tokens > 0]
    if not shown:
        return {}, "No token has been sampled yet."
    total = sum(account.amount.tokens for account in shown)
    source = f"generated {total:,}"
    nodes, links = [{"name": source, "itemStyle": {"color": BLUE}, "label": {"position": [0, -18]}}], []
    for account in shown:
        name = f"{account.name} {account.amount.tokens / total:.1%}"
        nodes.append({"name": name, "itemStyle": {"color": FATE_COLOURS[account.state]}})
        links.append({"source": source, "target": name, "value": account.amount.tokens})
    return {"tooltip": {"trigger": "item"}, "series": [KINDS["flow"] | {"data": nodes, "links": links}]}, ""


def timeline(shown: Timeline) -> Drawn:
    if not shown.bars:
        return {}, "No stage has been measured yet."
    lanes, bars = list(shown.busy), []
    for lane, stage, start_s, end_s in shown.bars:
        value = [lanes.index(lane), round(start_s, 4), round(end_s, 4)]
        colour = STAGE_COLOURS.get(stage, GREY)
        bars.append({"value": value, "name": lane, "itemStyle": {"color": colour}})
    clock = {"min": round(shown.start_s, 3), "max": round(shown.end_s, 3)}
    busy = ", ".join(f"{lane} {share:.0%}" for lane, share in shown.busy.items())
    says = f"Busy share of these {shown.end_s - shown.start_s:.1f} s: {busy}."
    return _chart("timeline", [{"data": bars}], x_axis=clock, y_axis={"data": lanes}), says


def lag_bars(shares: Tally, last_step: int, allowed: float) -> Drawn:
    """The share of each lag in the tokens of a few steps, stacked to a whole."""
    if not shares.sums:
        return {}, "Nothing has been trained on yet."
    width = steps_together(last_step, MOST_LAG_BARS)
    held = np.zeros((MOST_LAGS + 1, 1 + max((step - 1) // width for step, _ in shares.sums)))
    for (step, lag), tokens in shares.sums.items():
        held[min(lag, MOST_LAGS), (step - 1) // width] += tokens
    buckets, names, bars = np.flatnonzero(held.any(axis=0)), [], []
    for begin in width * buckets:
        end = min(begin + width, max(last_step, 1))
        names.append(str(end) if width == 1 else f"{begin + 1}-{end}")
    for lag in np.flatnonzero(held.any(axis=1)):
        shown = held[lag, buckets] / held.sum(axis=0)[buckets]
        bars.append(_bar(f"lag {lag}{' or more' if lag == MOST_LAGS else ''}", LAG_COLOURS[lag], shown))
    says = f"loop.max_lag = {allowed}: older tokens are dropped as stale."
    return _chart("lags", bars, {"data": names}, {}) | _legend(bars), says


def reward_bars(found: Rewards) -> Drawn:
    """How the rewards of each side are distributed; few values have a bar each."""
    sides, bars = {"first": (GREY, found.first), "newest": (BLUE, found.newest)}, []
    values = np.unique(np.concatenate([found.first, found.newest]))
    if not len(values):
        return {}, "No answer has been scored yet."
    names, edges = [f"{value:g}" for value in values], np.append(values, np.inf)
    if len(values) > MOST_REWARD_BARS:  # each has the middle of its bin as its name
        edges = np.linspace(values[0], values[-1], MOST_REWARD_BARS + 1)
        names = [f"{middle:.3g}" for middle in (edges[1:] + edges[:-1]) / 2]
    for side, (colour, rewards) in sides.items():
        counts, _ = np.histogram(rewards, edges)
        bars.append(_bar(f"{side} {len(rewards):,} answers", colour, counts / max(len(rewards), 1)))
    parts = "; ".join(f"{part} {first:.3g} → {now:.3g}" for part, (first, now) in found.parts.items())
    says = f"Mean of each reward part, first → newest: {parts}." if parts else ""
    return _chart("rewards", bars, {"data": names}, {}) | _legend(bars), says


def placement_bars(step_s: Mapping[Any, float]) -> Options:
    """Seconds of a step for each placement, lying down so that long names fit."""
    best = min(step_s, key=step_s.__getitem__)
    data = [
        {"value": round(seconds, 3), "itemStyle": {"color": GREEN if name == best else GREY}}
        for name, seconds in step_s.items()
    ]
    return _chart("placements", [{"data": data}], x_axis={}, y_axis={"data": list(map(str, step_s))})


def _line(name: str, points: Points, colour: str, **style: object) -> Options:
    num_known = sum(y is not None for _, y in points)
    few = num_known < 3 or num_known < len(points) / 2  # such as scores: single points, joined
    look = {"lineStyle": {"color": colour} | style, "itemStyle": {"color": colour}}
    joined = {"showSymbol": few, "connectNulls": few}
    return {"name": name, "type": "line", "data": points} | joined | look


def _bar(name: str, colour: str, shares: Numbers) -> Options:
    """Bars of one colour, in per cent."""
    data = [round(100 * share, 2) for share in shares.tolist()]
    return {"name": name, "itemStyle": {"color": colour}, "data": data}


def _legend(series: list[Options], scrolls: bool = True) -> Options:
    """If it does not scroll, it may take two lines on a phone."""
    named = [one["name"] for one in series if one["name"]]
    kind = "scroll" if scrolls and len(named) > 2 else "plain"
    top = 32 if len(named) < 2 else 60 if scrolls or len(named) < 4 else 76
    return {"legend": {"type": kind, "show": len(named) > 1, "data": named}, "grid": {"top": top}}


def _chart(kind: str, series: list[Options], x_axis: Options, y_axis: Options) -> Options:
    """One of `KINDS`, with what is not the same in all of them."""
    fixed = KINDS[kind]
    drawn = {"xAxis": fixed["xAxis"] | x_axis, "yAxis": fixed["yAxis"] | y_axis}
    return fixed | drawn | {"series": [fixed.get("series", {}) | one for one in series]}

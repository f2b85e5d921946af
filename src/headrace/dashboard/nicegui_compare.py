"""Runs compared: their curves drawn over each other, their numbers and their settings side by side."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import run as threads
from nicegui import ui

from headrace.config_file import changed, explain
from headrace.dashboard import charts
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.curves import GOODPUT, Curve, Look, colour_of, metric_curves
from headrace.dashboard.site import LiveRun, Site, address
from headrace.errors import ConfigError, RunError
from headrace.ledger.files import run_config
from headrace.runs.facts import RunState
from headrace.runs.report import duration, percent
from headrace.runs.show import scores

MAIN = "the main ones"
_MAIN_TITLES = ("Reward mean", "Wall", "Lag mean")


async def compare(site: Site) -> None:
    query = ui.context.client.request.query_params
    found = await threads.io_bound(site.facts)
    names = [facts.path.name for facts in found if facts.state is not RunState.UNREADABLE]
    with_names = [name for name in dict.fromkeys(query.getlist("run")) if name]
    chosen = [site.run(name) for name in with_names or names[:2]]
    group = query.get("curves") or MAIN
    with page.frame("Compare runs"):
        _choices(names, [live.name for live in chosen], group)
        if len(chosen) < 2:
            held = f"{site.root} holds {len(names)} that can be read"
            page.message(f"Comparing takes two runs or more: choose them above; {held}.")
            return
        panels = [page.table_panel("In numbers", "", lambda: _numbers(chosen, site.dollars_per_hour))]
        drawn: list[page.Panel] = []
        look = page.look_controls(drawn)
        with ui.element("div").classes("pair"):
            drawn += [_over_each_other(chosen, curve, look) for curve in _curves(group)]
        says = "Settings that are not the same in all of them."
        panels.append(page.table_panel("What was set differently", says, lambda: _settings(chosen)))
        await page.follow([*panels, *drawn])


def _choices(names: list[str], chosen: list[str], group: str) -> None:
    def go(runs: list[str], curves: str) -> None:
        ui.navigate.to(address("compare", run=runs or None, curves=None if curves == MAIN else curves))

    says = "Choose as many runs as you like. Each has its colour in every chart."
    with page.card("", says), ui.element("div").classes("line"):
        options = list(dict.fromkeys((*names, *chosen)))
        runs = ui.select(options, value=chosen, label="runs", multiple=True, with_input=True)
        runs.classes("field grow").props("outlined dense options-dense use-chips")
        curves = [MAIN, *metric_curves()]
        page.choice(curves, group, "curves", lambda wanted: go(runs.value, wanted))
        ui.button("Compare", on_click=lambda: go(runs.value, group)).props("outline no-caps")


def _curves(group: str) -> list[Curve]:
    groups = metric_curves()
    every = [curve for curves in groups.values() for curve in curves]
    main = [curve for curve in every if curve.title in _MAIN_TITLES]
    return groups.get(group, [*main, GOODPUT])


def _over_each_other(chosen: list[LiveRun], curve: Curve, look: Callable[[], Look]) -> page.Panel:
    def read() -> tuple[charts.Options, str]:
        curves = {
            live.name: (curve.first(live.series(), look()), colour_of(place)) for place, live in enumerate(chosen)
        }
        if not any(y for points, _ in curves.values() for _, y in points):
            return {}, "It was 0, or not measured, in all of these runs."
        return charts.lines(curves, y=curve.y, by=look().by, smoothing=look().smoothing), ""

    return page.chart_panel(curve.title, curve.says, read)


def _numbers(chosen: list[LiveRun], dollars_per_hour: float | None) -> page.Listing:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    sides = []
    for live in chosen:
        seen, verdict = live.overview(dollars_per_hour), live.triage()
        facts, series = seen.facts, seen.series
        side = {
            "state": str(facts.state),
            "steps": f"{series.last_step:,} / {facts.wanted_steps:,}",
            "reward, last steps": number(series.now("reward_mean")),
            "held-out score, before → latest": scores(facts),
            "goodput, tokens/s": number(series.goodput()),
            "seconds per step": number(series.now("wall_s", over="mean")),
            "bottleneck": "…" if isinstance(verdict, str) else str(verdict.bottleneck),
            "largest lag": str(seen.lag_max),
            "share trained on": percent(seen.useful_share, 1),
            "time": duration(seen.elapsed_s),
        }
        sides.append(side)
    rows = [(name, *(side[name] for side in sides)) for name in sides[0]]
    numeric = range(1, len(chosen) + 1)
    return page.Listing(columns=("", *(live.name for live in chosen)), rows=rows, numeric=numeric)


def _settings(chosen: list[LiveRun]) -> page.Listing:
    sides = []
    for live in chosen:
        try:
            sides.append(dict(text.split("=", 1) for text in changed(run_config(live.path))))
        except (ConfigError, RunError) as error:
            raise RunError(f"The settings of {live.name} cannot be read: {error}") from error
    keys = {key for side in sides for key in side} - {"run.dir"}
    default = {setting.key: f"{setting.default} (default)" for setting in explain()}
    rows = [(key, *(side.get(key, default[key]) for side in sides)) for key in sorted(keys)]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    columns = ("setting", *(live.name for live in chosen))
    return page.Listing(columns=columns, rows=rows, instead="All settings are the same.")

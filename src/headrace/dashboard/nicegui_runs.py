"""All runs, and two of them beside each other."""

from __future__ import annotations

from nicegui import ui

from headrace.config_file import changed, explain
from headrace.dashboard import charts
from headrace.dashboard.charts import RUN_COLOURS, Options
from headrace.dashboard.nicegui_elements import Listing, chart_panel, choice, table_panel
from headrace.dashboard.nicegui_frame import Panel, card, follow, frame, message
from headrace.dashboard.site import LiveRun, Site, address
from headrace.errors import ConfigError, RunError
from headrace.ledger.files import run_config
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.report import Section, Table, duration, percent
from headrace.runs.tables import RUN_COLUMNS, run_row

CURVES = (  # title, what the axis says, column
    ("Reward", "mean reward", "reward_mean"),
    ("Goodput", "trained tokens per second", "goodput"),
    ("Step time", "seconds per step", "wall_s"),
    ("Lag", "mean lag of trained tokens", "lag_mean"),
)


async def runs(site: Site) -> None:
    with frame("Runs", str(site.root)):
        says = (
            "The run that was written to last comes first. Choose one to see what it does; a run that is under way is "
            "followed live."
        )
        await follow([table_panel("", says, lambda: runs_listing(site.facts()))])


async def compare(site: Site, a: str = "", b: str = "") -> None:
    names = [facts.path.name for facts in site.facts() if facts.state is not RunState.UNREADABLE]
    with frame("Compare two runs"):
        if len(names) < 2:
            message(f"Comparing takes two runs, and {site.root} holds {len(names)} that can be read.")
            return
        a, b = a or names[0], b or names[1]
        chosen = [site.run(a), site.run(b)]
        says = "The two runs are drawn over each other, step by step: the first in blue, the second in orange."
        with card("", says), ui.element("div").classes("line"):
            for place, name in enumerate((a, b)):
                _choose(names, name, (a, b), place)
        panels = [table_panel("In numbers", "", lambda: numbers_listing(chosen, site.dollars_per_hour))]
        with ui.element("div").classes("pair"):
            panels += [_both(chosen, *curve) for curve in CURVES]
        says = "Settings that are not the same in both."
        panels.append(table_panel("What was set differently", says, lambda: settings_listing(chosen)))
        await follow(panels)


def runs_listing(found: list[RunFacts]) -> Listing:
    problems = tuple((facts.path.name, facts.problem) for facts in found if facts.problem)
    rows = tuple(run_row(facts) for facts in found)
    return Listing(
        table=Table(columns=RUN_COLUMNS, rows=rows, numeric=frozenset(range(2, 7))),
        links=tuple(address("run", facts.path.name, "overview") for facts in found),
        wide=frozenset({3, 4, 5}),
        below=Section(title="Cannot be read", facts=problems) if problems else None,
        instead="There is no run here yet. `headrace train` makes one.",
    )


def numbers_listing(chosen: list[LiveRun], dollars_per_hour: float | None) -> Listing:
    both = [live.overview(dollars_per_hour) for live in chosen]
    verdicts = [live.triage() for live in chosen]
    lines = {
        "state": [str(seen.facts.state) for seen in both],
        "steps": [f"{seen.series.last_step:,} / {seen.facts.wanted_steps:,}" for seen in both],
        "reward, last steps": [_number(seen.series.now("reward_mean")) for seen in both],
        "held-out score, latest": [_number(seen.facts.score_after) for seen in both],
        "goodput, tokens/s": [_number(seen.series.goodput()) for seen in both],
        "seconds per step": [_number(seen.series.now("wall_s", over="mean")) for seen in both],
        "bottleneck": ["…" if isinstance(verdict, str) else str(verdict.bottleneck) for verdict in verdicts],
        "largest lag": [str(seen.lag_max) for seen in both],
        "share trained on": [percent(seen.useful_share, 1) for seen in both],
        "time": [duration(seen.elapsed_s) for seen in both],
    }
    rows = tuple((name, *texts) for name, texts in lines.items())
    names = ("", *(live.name for live in chosen))
    return Listing(table=Table(columns=names, rows=rows, numeric=frozenset({1, 2})))


def settings_listing(chosen: list[LiveRun]) -> Listing:
    both = []
    for live in chosen:
        try:
            both.append(dict(text.split("=", 1) for text in changed(run_config(live.path))))
        except (ConfigError, RunError) as error:
            raise RunError(f"The settings of {live.name} cannot be read: {error}") from error
    keys = sorted({key for key in {*both[0], *both[1]} if both[0].get(key) != both[1].get(key)} - {"run.dir"})
    default = {setting.key: setting.default for setting in explain()}
    rows = [(key, *(side.get(key, f"{default[key]} (default)") for side in both)) for key in keys]
    columns = ("setting", *(live.name for live in chosen))
    return Listing(table=Table(columns=columns, rows=tuple(rows)), instead="All settings are the same.")


def _both(chosen: list[LiveRun], title: str, y: str, column: str) -> Panel:
    def read() -> tuple[Options, str]:
        curves = {
            f"{place}: {live.name}": (live.series().curve(column, over="mean"), colour)
            for place, live, colour in zip((1, 2), chosen, RUN_COLOURS, strict=True)
        }
        return charts.lines(curves, y=y), ""

    return chart_panel(title, "", read)


def _choose(names: list[str], name: str, both: tuple[str, str], place: int) -> None:
    def go(chosen: str) -> None:
        picked = [chosen if p == place else other for p, other in enumerate(both)]
        ui.navigate.to(address("compare", a=picked[0], b=picked[1]))

    choice(names, name, ("first run", "second run")[place], go)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

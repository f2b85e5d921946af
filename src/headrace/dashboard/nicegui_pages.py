"""The page's server and its addresses; all runs, and two of them beside each other."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nicegui import app, ui
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse

from headrace.config_file import changed, explain
from headrace.dashboard import charts, nicegui_plan, nicegui_run
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.nicegui_elements import Listing, Panel
from headrace.dashboard.site import LiveRun, Site, address
from headrace.errors import ConfigError, HeadraceError, RunError
from headrace.insight.metrics import CONTENT_TYPE, metrics_text
from headrace.ledger.files import run_config
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.report import Section, duration, percent
from headrace.runs.show import RUN_COLUMNS, run_row

BUILD_S = 20.0  # a page may take so long to build; a slow disk is no reason to show none
ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><path stroke='#0072B2' stroke-width='2' "
    "d='M1 5q3.5-3 7 0t7 0M1 11q3.5-3 7 0t7 0' fill='none'/></svg>"
)
CURVES = (  # title, what the axis says, column
    ("Reward", "mean reward", "reward_mean"),
    ("Goodput", "trained tokens per second", "goodput"),
    ("Step time", "seconds per step", "wall_s"),
    ("Lag", "mean lag of trained tokens", "lag_mean"),
)

Builder = Callable[..., Awaitable[None]]


def serve(site: Site, *, host: str, port: int, local: bool) -> None:
    register(site)
    if local:  # a page of another site must not reach this one under a name of its own
        ours = ["localhost", "127.0.0.1", "::1", "[::1]", host]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=ours)
    where = f"[{host}]" if ":" in host else host
    print(f"Headrace shows {site.root} at http://{where}:{port}  (Ctrl+C ends it)", flush=True)
    if not local:
        print(f"Anyone who can reach {host} can read these runs: there is no password.", flush=True)
    ui.run(
        host=host,
        port=port,
        title="Headrace",
        favicon=ICON,
        dark=None,
        show=False,
        reload=False,
        tailwind=False,
        show_welcome_message=False,
        message_history_length=50,
        binding_refresh_interval=None,
    )


def register(site: Site) -> None:
    pages: dict[str, Builder] = {
        "/": partial(runs, site),
        "/compare": partial(compare, site),
        "/plan": partial(nicegui_plan.plan, site),
        "/run/{name}": partial(nicegui_run.run_view, site, "overview"),
        **{f"/run/{{name}}/{view}": partial(nicegui_run.run_view, site, view) for view in page.VIEWS[:-1]},
        "/run/{name}/trajectories": partial(nicegui_run.trajectories, site),
        "/run/{name}/trajectory": partial(nicegui_run.trajectory, site),
    }
    for path, build in pages.items():
        ui.page(path, response_timeout=BUILD_S)(_clearly(build))
    app.on_page_exception(_unexpected)

    def metrics(run: str = "") -> PlainTextResponse:
        """For Prometheus; of the run that was written last, where it is not told which."""
        try:
            return PlainTextResponse(metrics_text(site.measured(run).path), media_type=CONTENT_TYPE)
        except HeadraceError as error:
            return PlainTextResponse(f"{error}\n", status_code=404)

    app.get("/metrics")(metrics)


def _clearly(build: Builder) -> Builder:
    """The page, or a message where what was asked for is not there."""

    async def built(**given: Any) -> None:
        try:
            await build(**given)
        except HeadraceError as error:
            with page.frame("Nothing to show"):
                page.message(str(error))

    built.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
    return built


def _unexpected(error: Exception) -> None:
    """A mistake of ours, or a ledger that is broken in a way that nobody thought of."""
    with page.frame("Something went wrong"):
        page.message(f"This page could not be made: {type(error).__name__}: {error}")


async def runs(site: Site) -> None:
    """The list of runs, or the run itself where there is but one to show."""
    if site.is_one_run:
        ui.navigate.to(address("run", site.root.name, "overview"))
        return
    says = (
        "The run that was written to last comes first. Choose one to see what it does; a run that is under way "
        "is followed live."
    )
    with page.frame("Runs", str(site.root)):
        await page.follow([page.table_panel("", says, lambda: _runs(site.facts()))])


def _runs(found: list[RunFacts]) -> Listing:
    problems = tuple((facts.path.name, facts.problem) for facts in found if facts.problem)
    return Listing(
        columns=RUN_COLUMNS,
        rows=[run_row(facts) for facts in found],
        numeric=range(2, 7),
        links=[address("run", facts.path.name, "overview") for facts in found],
        wide={3, 4, 5},
        below=Section(title="Cannot be read", facts=problems) if problems else None,
        instead="There is no run here yet. `headrace train` makes one.",
    )


async def compare(site: Site, a: str = "", b: str = "") -> None:
    names = [facts.path.name for facts in site.facts() if facts.state is not RunState.UNREADABLE]
    with page.frame("Compare two runs"):
        if len(names) < 2:
            page.message(f"Comparing takes two runs, and {site.root} holds {len(names)} that can be read.")
            return
        a, b = a or names[0], b or names[1]
        chosen = [site.run(a), site.run(b)]
        says = "The two runs are drawn over each other, step by step: the first in blue, the second in orange."
        with page.card("", says), ui.element("div").classes("line"):
            page.choice(names, a, "first run", lambda name: ui.navigate.to(address("compare", a=name, b=b)))
            page.choice(names, b, "second run", lambda name: ui.navigate.to(address("compare", a=a, b=name)))
        panels = [page.table_panel("In numbers", "", lambda: _numbers(chosen, site.dollars_per_hour))]
        with ui.element("div").classes("pair"):
            panels += [_both(chosen, *curve) for curve in CURVES]
        says = "Settings that are not the same in both."
        panels.append(page.table_panel("What was set differently", says, lambda: _settings(chosen)))
        await page.follow(panels)


def _numbers(chosen: list[LiveRun], dollars_per_hour: float | None) -> Listing:
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
            "held-out score, latest": number(facts.score_after),
            "goodput, tokens/s": number(series.goodput()),
            "seconds per step": number(series.now("wall_s", over="mean")),
            "bottleneck": "…" if isinstance(verdict, str) else str(verdict.bottleneck),
            "largest lag": str(seen.lag_max),
            "share trained on": percent(seen.useful_share, 1),
            "time": duration(seen.elapsed_s),
        }
        sides.append(side)
    rows = [(name, *(side[name] for side in sides)) for name in sides[0]]
    return Listing(columns=("", *(live.name for live in chosen)), rows=rows, numeric={1, 2})


def _settings(chosen: list[LiveRun]) -> Listing:
    both = []
    for live in chosen:
        try:
            both.append(dict(text.split("=", 1) for text in changed(run_config(live.path))))
        except (ConfigError, RunError) as error:
            raise RunError(f"The settings of {live.name} cannot be read: {error}") from error
    keys = {key for key, _ in both[0].items() ^ both[1].items()} - {"run.dir"}
    default = {setting.key: f"{setting.default} (default)" for setting in explain()}
    rows = [(key, *(side.get(key, default[key]) for side in both)) for key in sorted(keys)]
    columns = ("setting", *(live.name for live in chosen))
    return Listing(columns=columns, rows=rows, instead="All settings are the same.")


def _both(chosen: list[LiveRun], title: str, y: str, column: str) -> Panel:
    def read() -> tuple[charts.Options, str]:
        curves = {
            f"{place}: {live.name}": (live.series().curve(column, over="mean"), colour)
            for place, live, colour in zip((1, 2), chosen, charts.RUN_COLOURS, strict=True)
        }
        return charts.lines(curves, y=y), ""

    return page.chart_panel(title, "", read)

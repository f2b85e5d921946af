"""The page's server, its addresses, and what is about no single run: all runs, two compared, the plan."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from nicegui import app, ui
from nicegui import run as threads
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse

from headrace.config_file import changed, explain
from headrace.dashboard import charts, nicegui_run
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.plan import FIELDS, question
from headrace.dashboard.site import LiveRun, Site, address
from headrace.errors import ConfigError, HeadraceError, RunError
from headrace.insight.equation import PLACEMENT_WORDS, STAGE_WORDS, SYMBOLS, Placement
from headrace.insight.frameworks import others_that_fit
from headrace.insight.hardware import built_in
from headrace.insight.metrics import CONTENT_TYPE, metrics_text
from headrace.insight.planner import plan as work_out
from headrace.insight.reports import plan_report, triage_report
from headrace.insight.triage import TypedTriage, triage_typed
from headrace.ledger.files import run_config
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.report import Report, Section, duration, percent
from headrace.runs.show import RUN_COLUMNS, run_row
from headrace.types import STAGES, StageTimes

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
EXAMPLE = StageTimes(rollout=30.0, reward=0.0, reference=3.0, train=8.0, publish=1.0)

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
        "/plan": partial(plan, site),
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


def _runs(found: list[RunFacts]) -> page.Listing:
    problems = tuple((facts.path.name, facts.problem) for facts in found if facts.problem)
    return page.Listing(
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
    return page.Listing(columns=("", *(live.name for live in chosen)), rows=rows, numeric={1, 2})


def _settings(chosen: list[LiveRun]) -> page.Listing:
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
    return page.Listing(columns=columns, rows=rows, instead="All settings are the same.")


def _both(chosen: list[LiveRun], title: str, y: str, column: str) -> page.Panel:
    def read() -> tuple[charts.Options, str]:
        curves = {
            f"{place}: {live.name}": (live.series().curve(column, over="mean"), colour)
            for place, live, colour in zip((1, 2), chosen, charts.RUN_COLOURS, strict=True)
        }
        return charts.lines(curves, y=y), ""

    return page.chart_panel(title, "", read)


async def plan(site: Site, run: str = "") -> None:
    times, trouble = EXAMPLE, ""
    if run:
        try:
            series = await threads.io_bound(site.run(run).series)
            times = series.stages_now() if series.last_step else EXAMPLE
            trouble = "" if series.last_step else f"{run} has no step yet; these are an example's times."
        except HeadraceError as error:
            trouble = str(error)
    with page.frame("Plan", "What would a change bring, and what would a run need?"):
        names = [facts.path.name for facts in await threads.io_bound(site.facts)]
        sliders = _sliders(times, names, "" if trouble else run, trouble)
        work_out_form = _form()
        await sliders.refresh()
        ui.timer(0.1, work_out_form, once=True)  # layouts are simulated: the page does not wait


def _sliders(times: StageTimes, names: list[str], run: str, trouble: str) -> page.Panel:
    """Five times, those of `run` if it is named; a placement, and what they come to."""

    async def changed(_: object) -> None:
        await results.changed()

    def read() -> TypedTriage:
        now = {stage: float(slider.value) for stage, slider in sliders.items()}
        return triage_typed(StageTimes(**now), Placement(placement.value))

    def show(found: TypedTriage) -> None:
        for part in triage_report(found).sections[:2]:  # the chart has the placements
            page.section(part)
        step_s = {str(where): seconds for where, seconds in found.step_s.items()}
        show_chart((charts.placement_bars(step_s, best=min(step_s, key=step_s.__getitem__)), ""))

    with ui.element("div").classes("pair"):
        says = "A step has five stages. Take the seconds that a run measured, or guess, and move the sliders."
        with page.card("What holds a step back?", says):
            if trouble:
                page.message(trouble)
            if names:
                taken = page.choice(names, run, "take the times of a run", _take)
                taken.classes("above")
            values = asdict(times)
            top = _round_up(2 * max(values.values()) or 1.0)
            sliders = {stage: _slider(stage, values[stage], top, changed) for stage in STAGES}
            placements = {one: f"{one}: {words}" for one, words in PLACEMENT_WORDS.items()}
            first = Placement.COLOCATED if run else Placement.OVERLAPPED
            placement = page.choice(placements, first, "what may run at the same time", changed)
            ui.label(
                "The same times in each placement. Streamed is drawn at its longest, as if all answers "
                "ended together: with max_lag = 0 the last of them must be written before it can be "
                "trained on."
            ).classes("says")
            show_chart = page.chart(180)
        with page.card("What to change first"):
            results = page.panel(read, show)
    return results


def _take(run: str) -> None:
    ui.navigate.to(address("plan", run=run))


def _slider(stage: str, value: float, top: float, changed: Callable[[Any], Awaitable[None]]) -> Any:
    with ui.element("div").classes("slider"):
        with ui.element("div"):
            ui.label(f"{stage} {SYMBOLS[stage]}")
            ui.label(STAGE_WORDS[stage]).classes("says")
        slider = ui.slider(min=0, max=top, step=top / 200, value=value, on_change=changed)
        label = ui.label().classes("value")
        label.bind_text_from(slider, "value", lambda seconds: f"{seconds:.3g} s")
    return slider.props(f"aria-label='{stage}'")


def _form() -> Callable[[], Awaitable[None]]:
    """A workload, GPUs, and the layout that suits them; what is returned works the layout out."""

    async def changed(_: object = None) -> None:
        box.classes("waiting")
        if await results.changed():
            box.classes(remove="waiting")

    def read() -> Report:
        typed = {name: text.value or "" for name, text in texts.items()}
        kind, kl, lora = device.value, reference.value, adapter.value
        asked = question(typed, device=kind, reference=kl, adapter=lora)
        found, size = work_out(asked), asked.model.num_params
        others = others_that_fit(found[0].bottleneck, num_params=size, may_lag=asked.max_lag > 0)
        return plan_report(asked, found, others)

    says = (
        "Describe it, and see how to lay it out, how fast it would be and what it would cost. This is "
        "arithmetic with the speeds of datasheets: the shape of an answer, before anything is paid for."
    )
    with page.card("What would a run need?", says):
        texts = {}
        with ui.element("div").classes("form"):
            device = page.choice(list(built_in()), "H100", "kind of GPU", changed)
            device.props("hint='to run it on'")
            for name, field in FIELDS.items():
                typed = ui.input(field.label, value=field.value, validation=field.problem, on_change=changed)
                texts[name] = typed.props(f"outlined dense debounce=200 hint='{field.says}'")
        with ui.element("div").classes("line"):
            reference = ui.checkbox("KL penalty (needs a reference policy)", on_change=changed)
            adapter = ui.checkbox("train a low-rank adapter only", on_change=changed)
    meanwhile = "Being worked out: layouts are simulated. That takes some seconds."
    with ui.element("div") as box:
        results = page.panel(read, page.report, meanwhile)
    return changed


def _round_up(value: float) -> float:
    """To one leading digit: 0.0123 becomes 0.02."""
    size = 10.0 ** math.floor(math.log10(value))
    return float(math.ceil(value / size) * size)

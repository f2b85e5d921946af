"""The page's server, its addresses, what is said of others than these, and the plan."""

import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial

from nicegui import Client, app, ui
from nicegui import run as threads
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.dashboard import charts, nicegui_runs
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.site import FIELDS, Site, address, question
from headrace.errors import HeadraceError
from headrace.insight.hardware import read_hardware
from headrace.insight.planner import plan as work_out
from headrace.insight.reading import CONTENT_TYPE, metrics_text
from headrace.insight.reports import plan_report, triage_report
from headrace.insight.triage import PLACEMENT_WORDS, STAGE_WORDS, SYMBOLS, Placement, TypedTriage
from headrace.measured import STAGES, StageTimes
from headrace.runs.facts import UnknownNameError
from headrace.runs.report import Report, printable

BUILD_S = 20.0  # a page may take so long to build; a slow disk is no reason to show none
MOST_NAMED = 20  # runs, where what was asked for is not there
EXAMPLE = StageTimes(rollout=30.0, reward=0.0, reference=3.0, train=8.0, publish=1.0)

Builder = Callable[..., Awaitable[None]]


def serve(site: Site, *, host: str, port: int, local: bool) -> None:
    register(site)
    threading.Thread(target=site.facts, daemon=True).start()  # hundreds of runs: be done before somebody looks
    if local:  # a page of another site must not reach this one under a name of its own
        ours = ["localhost", "127.0.0.1", "::1", "[::1]", host]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=ours)
    where = f"[{host}]" if ":" in host else host
    print(f"Headrace shows {site.root} at http://{where}:{port}  (Ctrl+C ends it)", flush=True)
    if not local:
        print(f"Anyone who can reach {host} can read these runs: there is no password.", flush=True)
    quiet = {"show": False, "reload": False, "tailwind": False, "show_welcome_message": False}
    bounds = {"message_history_length": 50, "binding_refresh_interval": None}
    ui.run(host=host, port=port, title="Headrace", favicon=page.ICON, dark=None, **quiet, **bounds)


def register(site: Site) -> None:
    pages: dict[str, Builder] = {
        "/": nicegui_runs.runs,
        "/compare": nicegui_runs.compare,
        "/plan": plan,
        "/run/{name}": partial(nicegui_runs.run_view, "overview"),
        **{f"/run/{{name}}/{view}": partial(nicegui_runs.run_view, view) for view in page.VIEWS[:-1]},
        "/run/{name}/trajectories": nicegui_runs.trajectories,
        "/run/{name}/trajectory": nicegui_runs.trajectory,
        "/run/{name}/group": nicegui_runs.group,
    }
    for path, build in pages.items():
        ui.page(path, response_timeout=BUILD_S)(partial(_built, build, site))
    app.on_page_exception(_unexpected)

    async def no_such_page(request: Request, _: Exception) -> Response:
        asked = f"{request.url.path}{'?' if request.url.query else ''}{request.url.query}"
        with Client(ui.page(""), request=request) as client:
            await _not_there(site, f"There is no page {asked}.")
        return client.build_response(request, 404)

    def metrics(run: str = "") -> PlainTextResponse:
        """For Prometheus; of the run that was written last, where it is not told which."""
        try:
            return PlainTextResponse(metrics_text(site.measured(run).path), media_type=CONTENT_TYPE)
        except HeadraceError as error:
            return PlainTextResponse(f"{error}\n", status_code=404)

    app.exception_handler(404)(no_such_page)
    app.get("/metrics")(metrics)


async def _built(build: Builder, site: Site) -> None:
    """The page, or a message where what was asked for is not there."""
    try:
        await build(site, **ui.context.client.request.path_params)
    except UnknownNameError as error:
        await _not_there(site, str(error))
    except HeadraceError as error:
        with page.frame("Nothing to show"):
            page.message(str(error))


async def _not_there(site: Site, why: str) -> None:
    ui.context.client.status_code = 404
    found = await threads.io_bound(site.facts)
    with page.frame("Not found"):
        page.message(why)
        with page.card("What there is"), ui.element("ul"):
            names = [facts.path.name for facts in found[:MOST_NAMED]]
            places = {f"all {len(found):,} runs": "/", "compare": "/compare", "plan": "/plan"}
            places |= {f"run {name}": address("run", name, "overview") for name in names}
            for text, target in places.items():
                with ui.element("li"):
                    ui.link(printable(text), target)


def _unexpected(error: Exception) -> None:
    """A mistake of ours, or a ledger that is broken in a way that nobody thought of."""
    with page.frame("Something went wrong"):
        page.message(f"This page could not be made: {type(error).__name__}: {error}")


async def plan(site: Site) -> None:
    run, times, trouble = page.query().get("run"), EXAMPLE, ""
    if run:
        try:
            series = await threads.io_bound(site.run(run).series)
            if series.last_step:
                times = StageTimes(**{stage: series.now(f"stage_s.{stage}") or 0.0 for stage in STAGES})
            trouble = "" if series.last_step else f"{run} has no step yet; these are an example's times."
        except HeadraceError as error:
            trouble = str(error)
    with page.frame("Plan", "What would a change bring, and what would a run need?"):
        names = [facts.path.name for facts in await threads.io_bound(site.facts)]
        sliders = _sliders(times, names, None if trouble else run, trouble)
        work_out_form = _form()
        await sliders.refresh()
        ui.timer(0.1, work_out_form, once=True)  # layouts are simulated: the page does not wait


def _sliders(times: StageTimes, names: list[str], run: str | None, trouble: str) -> page.Panel:
    """Five times, those of `run` if it is named; a placement, and what they come to."""

    def read() -> TypedTriage:
        now = {stage: float(slider.value) for stage, slider in sliders.items()}
        return TypedTriage(StageTimes(**now), Placement(placement.value))

    def show(found: TypedTriage) -> None:
        for part in triage_report(found).sections[:2]:  # the chart has the placements
            page.section(part)
        show_chart((charts.placement_bars(found.step_s), ""))

    with ui.element("div").classes("pair"):
        with page.card(charts.CARDS["stages"]):
            if trouble:
                page.message(trouble)
            if names:
                taken = page.choice(names, run, "take the times of a run").classes("above")
                taken.on_value_change(lambda event: ui.navigate.to(address("plan", run=event.value)))
            values = asdict(times)
            twice = 2 * max(values.values()) or 1.0
            digit = 10.0 ** math.floor(math.log10(twice))
            top, sliders = float(math.ceil(twice / digit) * digit), {}  # one leading digit: 0.0123 becomes 0.02
            for stage in STAGES:
                with ui.element("div").classes("slider"):
                    with ui.element("div"):
                        ui.label(f"{stage} {SYMBOLS[stage]}")
                        ui.label(STAGE_WORDS[stage]).classes("says")
                    slider = ui.slider(min=0, max=top, step=top / 200, value=values[stage])
                    says = ui.label().classes("value")
                    says.bind_text_from(slider, "value", lambda seconds: f"{seconds:.3g} s")
                sliders[stage] = slider.props(f"aria-label='{stage}'")
            placements = {one: f"{one}: {words}" for one, words in PLACEMENT_WORDS.items()}
            first = Placement.COLOCATED if run else Placement.OVERLAPPED
            placement = page.choice(placements, first, "what may run at the same time")
            ui.label(charts.CARDS["placements"].says).classes("says")
            show_chart = page.chart(180)
        with page.card("What to change first"):
            results = page.panel(read, show)
    for chosen in (*sliders.values(), placement):
        chosen.on_value_change(results.changed)
    return results


def _form() -> Callable[[], Awaitable[None]]:
    """A workload, GPUs, and the layout that suits them; what is returned works the layout out."""

    async def changed() -> None:
        box.classes("waiting")
        if await results.changed():
            box.classes(remove="waiting")

    def read() -> Report:
        typed = {name: text.value or "" for name, text in texts.items()}
        asked = question(typed, device=device.value, reference=reference.value, adapter=adapter.value)
        return plan_report(asked, work_out(asked))

    with page.card(charts.CARDS["plan"]):
        texts = {}
        with ui.element("div").classes("form"):
            device = page.choice(list(read_hardware()), "H100", "kind of GPU", changed).props("hint='to run it on'")
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

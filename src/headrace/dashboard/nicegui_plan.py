"""The plan: what holds a step of five stage times back, and what a run of the future would need."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard import charts
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.nicegui_elements import Panel, card
from headrace.dashboard.plan import FIELDS, question
from headrace.dashboard.site import Site, address
from headrace.errors import HeadraceError
from headrace.insight.equation import PLACEMENT_WORDS, STAGE_WORDS, SYMBOLS, Placement
from headrace.insight.frameworks import others_that_fit
from headrace.insight.hardware import built_in
from headrace.insight.planner import plan as work_out
from headrace.insight.reports import plan_report, triage_report
from headrace.insight.triage import TypedTriage, triage_typed
from headrace.runs.report import Report
from headrace.types import STAGES, StageTimes

EXAMPLE = StageTimes(rollout=30.0, reward=0.0, reference=3.0, train=8.0, publish=1.0)


async def plan(site: Site, run: str = "") -> None:
    """Stage times, a run's if one is named, and a form."""
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


def _sliders(times: StageTimes, names: list[str], run: str, trouble: str) -> Panel:
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
        with card("What holds a step back?", says):
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
        with card("What to change first"):
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
    with card("What would a run need?", says):
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

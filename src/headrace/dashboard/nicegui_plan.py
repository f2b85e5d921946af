"""The plan: what holds a step of five stage times back, and what a run that does not exist yet would need."""

from __future__ import annotations

import math

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard import charts
from headrace.dashboard.nicegui_elements import Panel, card, chart, choice, frame, message, panel, report, section
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
    measured = run if not trouble else ""
    with frame("Plan", "What would a change bring, and what would a run need?"):
        names = [facts.path.name for facts in await threads.io_bound(site.facts)]
        says = "A step has five stages. Take the seconds that a run measured, or guess, and move the sliders."
        with ui.element("div").classes("pair"):
            with card("What holds a step back?", says):
                if trouble:
                    message(trouble)
                if names:
                    taken = choice(names, measured, "take the times of a run", _take)
                    taken.classes("above")
                sliders = _Sliders(times, Placement.COLOCATED if measured else Placement.OVERLAPPED)
            with card("What to change first"):
                sliders.panel = panel(sliders.read, sliders.show)
        form = _Form()
        await sliders.panel.refresh()
        ui.timer(0.1, form.changed, once=True)  # layouts are simulated: the page does not wait for that


def _take(run: str) -> None:
    ui.navigate.to(address("plan", run=run))


class _Sliders:
    """Five times, a placement, and what they come to."""

    panel: Panel

    def __init__(self, times: StageTimes, placement: Placement) -> None:
        values = {stage: float(getattr(times, stage)) for stage in STAGES}
        top = _round_up(2 * max(values.values()) or 1.0)
        self._sliders = {stage: self._slider(stage, value, top) for stage, value in values.items()}
        placements = {one: f"{one}: {words}" for one, words in PLACEMENT_WORDS.items()}
        self._placement = choice(placements, placement, "what may run at the same time", self._changed)
        ui.label(
            "The same times in each placement. Streamed is drawn at its longest, as if all answers ended "
            "together: with max_lag = 0 the last of them must be written before it can be trained on."
        ).classes("says")
        self._show_chart = chart(180)

    def _slider(self, stage: str, value: float, top: float) -> ui.slider:
        with ui.element("div").classes("slider"):
            with ui.element("div"):
                ui.label(f"{stage} {SYMBOLS[stage]}")
                ui.label(STAGE_WORDS[stage]).classes("says")
            slider = ui.slider(min=0, max=top, step=top / 200, value=value, on_change=self._changed)
            label = ui.label().classes("value")
            label.bind_text_from(slider, "value", lambda seconds: f"{seconds:.3g} s")
        return slider.props(f"aria-label='{stage}'")

    async def _changed(self, _: object = None) -> None:
        await self.panel.changed()

    def read(self) -> TypedTriage:
        times = {stage: float(slider.value) for stage, slider in self._sliders.items()}
        return triage_typed(StageTimes(**times), Placement(self._placement.value))

    def show(self, found: TypedTriage) -> None:
        for part in triage_report(found).sections[:2]:  # the chart has the placements
            section(part)
        step_s = {str(placement): seconds for placement, seconds in found.step_s.items()}
        self._show_chart(charts.placement_bars(step_s, best=min(step_s, key=lambda name: step_s[name])))


class _Form:
    """A workload, GPUs, and the layout that suits them."""

    def __init__(self) -> None:
        says = (
            "Describe it, and see how to lay it out, how fast it would be and what it would cost. This is "
            "arithmetic with the speeds of datasheets: the shape of an answer, before anything is paid for."
        )
        with card("What would a run need?", says):
            with ui.element("div").classes("form"):
                self._device = choice(list(built_in()), "H100", "kind of GPU", self.changed)
                self._device.props("hint='to run it on'")
                self._texts = {name: self._input(name) for name in FIELDS}
            with ui.element("div").classes("line"):
                self._reference = ui.checkbox("KL penalty (needs a reference policy)", on_change=self.changed)
                self._adapter = ui.checkbox("train a low-rank adapter only", on_change=self.changed)
        meanwhile = "Being worked out: layouts are simulated. That takes some seconds."
        with ui.element("div") as self._results:
            self._panel = panel(self._read, report, meanwhile)

    def _input(self, name: str) -> ui.input:
        field = FIELDS[name]
        typed = ui.input(field.label, value=field.value, validation=field.problem, on_change=self.changed)
        return typed.props(f"outlined dense debounce=200 hint='{field.says}'")

    async def changed(self, _: object = None) -> None:
        self._results.classes("waiting")
        if await self._panel.changed():
            self._results.classes(remove="waiting")

    def _read(self) -> Report:
        asked = question(
            {name: text.value or "" for name, text in self._texts.items()},
            device=self._device.value,
            reference=self._reference.value,
            adapter=self._adapter.value,
        )
        found, size = work_out(asked), asked.model.num_params
        others = others_that_fit(found[0].bottleneck, num_params=size, may_lag=asked.max_lag > 0)
        return plan_report(asked, found, others)


def _round_up(value: float) -> float:
    """To one leading digit: 0.0123 becomes 0.02."""
    size = 10.0 ** math.floor(math.log10(value))
    return float(math.ceil(value / size) * size)

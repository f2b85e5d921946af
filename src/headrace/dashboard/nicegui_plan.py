"""The plan: what holds a step of five stage times back, and what a run that does not exist yet would need."""

from __future__ import annotations

import math
from typing import Any

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard import charts
from headrace.dashboard.nicegui_elements import chart, choice, panel, report, section
from headrace.dashboard.nicegui_frame import Panel, card, frame, message
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
    measured = bool(run) and not trouble
    with frame("Plan", "What would a change bring, and what would a run need?"):
        names = [facts.path.name for facts in await threads.io_bound(site.facts)]
        with ui.element("div").classes("pair"):
            with card(
                "What holds a step back?",
                "A step has five stages. Take the seconds that a run measured, or guess, and move the sliders.",
            ):
                if trouble:
                    message(trouble)
                if names:
                    taken = choice(
                        names,
                        run if measured else None,
                        "take the times of a run",
                        lambda chosen: ui.navigate.to(address("plan", run=chosen)),
                    )
                    taken.classes("above")
                sliders = _Sliders(times, Placement.COLOCATED if measured else Placement.OVERLAPPED)
            with card("What to change first"):
                sliders.results()
        form = _Form()
        await sliders.panel.refresh()
        ui.timer(0.1, form.changed, once=True)  # layouts are simulated: the page does not wait for that


class _Sliders:
    """Five times, a placement, and what they come to."""

    panel: Panel

    def __init__(self, times: StageTimes, placement: Placement) -> None:
        self._times = {stage: float(getattr(times, stage)) for stage in STAGES}
        self._shown: dict[str, Any] = {}
        top = _round_up(2 * max(self._times.values()) or 1.0)
        for stage in STAGES:
            self._slider(stage, top)
        placements = {one: f"{one}: {words}" for one, words in PLACEMENT_WORDS.items()}
        self._placement = choice(placements, placement, "what may run at the same time", self._changed)
        ui.label(
            "The same times in each placement. Streamed is drawn at its longest, as if all answers ended together: "
            "with max_lag = 0 the last of them must be written before it can be trained on."
        ).classes("says")
        self._show_chart = chart(180)

    def results(self) -> None:
        self.panel = panel(self._read, self._show)

    def _slider(self, stage: str, top: float) -> None:
        with ui.element("div").classes("slider"):
            with ui.element("div"):
                ui.label(f"{stage} {SYMBOLS[stage]}")
                ui.label(STAGE_WORDS[stage]).classes("says")
            ui.slider(
                min=0,
                max=top,
                step=top / 200,
                value=min(self._times[stage], top),
                on_change=lambda event: self._moved(stage, event.value),
            ).props(f"aria-label='{stage}'")
            self._shown[stage] = ui.label(f"{self._times[stage]:.3g} s").classes("value")

    async def _moved(self, stage: str, value: float) -> None:
        self._times[stage] = float(value)
        self._shown[stage].set_text(f"{value:.3g} s")
        await self._changed()

    async def _changed(self, _: object = None) -> None:
        await self.panel.changed()

    def _read(self) -> TypedTriage:
        return triage_typed(StageTimes(**self._times), Placement(self._placement.value))

    def _show(self, found: TypedTriage) -> None:
        for part in triage_report(found).sections[:2]:  # the chart has the placements
            section(part)
        best = min(found.step_s, key=lambda where: found.step_s[where])
        self._show_chart(charts.placement_bars({str(w): s for w, s in found.step_s.items()}, best))


class _Form:
    """A workload, GPUs, and the layout that suits them."""

    def __init__(self) -> None:
        with card(
            "What would a run need?",
            "Describe it, and see how to lay it out, how fast it would be and what it would cost. This is arithmetic "
            "with the speeds of datasheets: the shape of an answer, before anything is paid for.",
        ):
            with ui.element("div").classes("form"):
                self._device = choice(list(built_in()), "H100", "kind of GPU", self.changed)
                self._device.props("hint='to run it on'")
                self._texts = {
                    name: ui.input(field.label, value=field.value, validation=field.problem, on_change=self.changed)
                    for name, field in FIELDS.items()
                }
                for name, field in FIELDS.items():
                    self._texts[name].props(f"outlined dense debounce=200 hint='{field.says}'")
            with ui.element("div").classes("line"):
                self._reference = ui.checkbox("KL penalty (needs a reference policy)", on_change=self.changed)
                self._adapter = ui.checkbox("train a low-rank adapter only", on_change=self.changed)
        with ui.element("div") as self._results:
            self._panel = panel(self._read, report, "Being worked out: layouts are simulated. That takes some seconds.")

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
        found = work_out(asked)
        others = others_that_fit(found[0].bottleneck, num_params=asked.model.num_params, may_lag=asked.max_lag > 0)
        return plan_report(asked, found, others)


def _round_up(value: float) -> float:
    """To one leading digit: 0.0123 becomes 0.02."""
    size = 10.0 ** math.floor(math.log10(value))
    return float(math.ceil(value / size) * size)

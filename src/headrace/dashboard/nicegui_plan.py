"""The plan: move five sliders, and see what a step takes, which stage is the wall and what to change first."""

from __future__ import annotations

import math
from typing import Any

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard import charts
from headrace.dashboard.markup import address
from headrace.dashboard.nicegui_frame import card, frame, message
from headrace.dashboard.plan import EXAMPLE, predict
from headrace.dashboard.site import Site
from headrace.errors import HeadraceError
from headrace.insight.equation import PLACEMENT_WORDS, SYMBOLS, Placement
from headrace.types import STAGES, StageTimes

STAGE_WORDS = {
    "rollout": "generating the answers",
    "reward": "scoring them",
    "reference": "log-probs of the reference policy",
    "train": "gradient and update",
    "publish": "handing over the new weights",
}


async def plan(site: Site, run: str = "") -> None:
    """The sliders, from a run's times if one is named."""
    times, problem = EXAMPLE, ""
    if run:
        try:
            series = await threads.io_bound(site.run(run).series)
            times = series.recent.stage_s if series.recent else EXAMPLE
            problem = "" if series.recent else f"{run} has no step yet; these are an example's times."
        except HeadraceError as error:
            problem = str(error)
    with frame("Plan", f"with the stage times of {run}" if run and not problem else "what sets the pace?"):
        if problem:
            message(problem)
        names = [facts.path.name for facts in await threads.io_bound(site.facts)]
        if names:
            ui.select(
                names,
                label="begin with the times of a run",
                value=run if run in names else None,
                on_change=lambda event: ui.navigate.to(address("plan", run=event.value)),
            ).classes("field").props("outlined dense options-dense")
        _Sliders(times)


class _Sliders:
    """Five times, a placement, and what they come to."""

    def __init__(self, times: StageTimes) -> None:
        self._values = {stage: float(getattr(times, stage)) for stage in STAGES}
        self._labels: dict[str, Any] = {}
        top = _round_up(2 * max(self._values.values()) or 1.0)
        with card("Seconds of each stage in a step", "Begin with those of a run, or with a guess, and move them."):
            for stage in STAGES:
                self._slider(stage, top)
            self._placement = ui.select(
                {placement: f"{placement}: {words}" for placement, words in PLACEMENT_WORDS.items()},
                value=Placement.COLOCATED,
                label="placement now",
                on_change=self._update,
            ).props("outlined dense options-dense")
        with card("What to do first"):
            self._says = [ui.label("").style("margin-bottom: 6px; line-height: 1.5") for _ in range(4)]
        with card(
            "A step in each placement",
            "The same stage times, overlapped more and more. With max_lag = 0 a step can never be as short as its "
            "slowest stage: the last answer must be written before it can be trained on. Streaming is assumed to hide "
            "half of the shorter side.",
        ):
            self._chart = ui.echart({}, renderer="svg").style("height: 220px; width: 100%")
        self._update()

    def _slider(self, stage: str, top: float) -> None:
        with ui.element("div").classes("slider"):
            ui.label(f"{stage} {SYMBOLS[stage]}").props(f"title='{STAGE_WORDS[stage]}'")
            ui.slider(
                min=0,
                max=top,
                step=top / 200,
                value=min(self._values[stage], top),
                on_change=lambda event: self._moved(stage, event.value),
            ).props(f"aria-label='{stage}'")
            self._labels[stage] = ui.label("").classes("value")

    def _moved(self, stage: str, value: float) -> None:
        self._values[stage] = float(value)
        self._update()

    def _update(self) -> None:
        for stage, label in self._labels.items():
            label.set_text(f"{self._values[stage]:.3g} s")
        if len(self._labels) < len(STAGES) or not hasattr(self, "_chart"):
            return
        placement = Placement(self._placement.value)
        found = predict(StageTimes(**self._values), placement)
        now_s = found.step_s[placement]
        texts = [
            f"Now a step takes {now_s:.3g} s. The wall is {found.wall} ({SYMBOLS[found.wall]}): "
            f"{found.wall_share:.0%} of it."
        ]
        texts += [
            f"{number}. {move.says} {now_s:.3g} → {move.step_s:.3g} s ({now_s / max(move.step_s, 1e-9):.2f}x)."
            for number, move in enumerate(found.moves[:3], 1)
        ]
        if len(texts) == 1:
            texts.append("No single change makes a step much shorter.")
        for label, text in zip(self._says, texts + [""] * 4, strict=False):
            label.set_text(text)
            label.set_visibility(bool(text))
        best = min(found.step_s, key=lambda where: found.step_s[where])
        self._chart.options.clear()
        self._chart.options.update(charts.placement_bars({str(w): s for w, s in found.step_s.items()}, best))
        self._chart.update()


def _round_up(value: float) -> float:
    """To one leading digit: 0.0123 becomes 0.02."""
    size = 10.0 ** math.floor(math.log10(value))
    return float(math.ceil(value / size) * size)

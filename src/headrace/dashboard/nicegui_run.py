"""One run: a view for each question about it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nicegui import ui

from headrace.config_file import changed, explain
from headrace.dashboard import books, charts, curves
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.charts import Options
from headrace.dashboard.curves import Curve, Look
from headrace.dashboard.site import Site, address
from headrace.insight.reports import triage_report
from headrace.insight.triage import Triage
from headrace.ledger.files import run_config
from headrace.runs import show
from headrace.runs.report import Section

Drawn = tuple[Options, str]
TIMELINE_STEPS = (3, 10, 30)


class RunViews:
    """What is on the views of one run: each is a method that makes its panels."""

    def __init__(self, site: Site, name: str, steps: int) -> None:
        self._name, self._live, self._price = name, site.run(name), site.dollars_per_hour
        self._look: Callable[[], Look] = Look
        self._drawn: list[page.Panel] = []
        self._steps = min(max(steps, 1), TIMELINE_STEPS[-1])

    def _look_controls(self) -> None:
        """How all curves of this view are drawn."""
        self._look = page.look_controls(self._drawn)

    def _chart(self, title: str, says: str, read: Callable[[], Drawn], height_px: int = 280) -> page.Panel:
        self._drawn.append(page.chart_panel(title, says, read, height_px))
        return self._drawn[-1]

    def _curve(self, curve: Curve, height_px: int = 280) -> page.Panel:
        def read() -> Drawn:
            return curve.drawn(self._live.series(), self._look(), self._live.facts())

        return self._chart(curve.title, curve.says, read, height_px)

    def _pair(self, *curves: Curve) -> list[page.Panel]:
        with ui.element("div").classes("pair"):
            return [self._curve(curve) for curve in curves]

    def overview(self) -> list[page.Panel]:
        panels = [page.panel(self._numbers, page.numbers)]
        self._look_controls()
        panels.append(self._curve(curves.REWARD))
        with page.card("How it went"):
            panels.append(page.panel(self._live.history, page.section))
        says = (
            "What holds a step back most, and what each change would bring. A prediction, not a promise: "
            "change one thing, and look again."
        )
        with page.card("What to change first", says):
            panels.append(page.panel(self._live.triage, _verdict))
            ui.link("Try other stage times on the plan page", address("plan", run=self._name))
        return panels + self._pair(curves.GOODPUT, curves.STAGE_TIMES)

    def _numbers(self) -> list[tuple[str, str, str]]:
        live = self._live
        return live.overview(self._price).numbers(live.wanted_lag(), live.triage())

    def curves(self) -> list[page.Panel]:
        self._look_controls()
        panels = []
        for group, found in curves.metric_curves().items():
            with ui.element("h2").classes("group"):
                ui.label(group.capitalize())
            with ui.element("div").classes("trio"):
                panels += [self._curve(curve, height_px=200) for curve in found]
                if group == "reward":
                    says = "The mean of each part that the reward function gave."
                    panels.append(self._chart("Reward parts", says, self._parts, 200))
        return panels

    def _parts(self) -> Drawn:
        return curves.parts_drawn(self._live.reward_parts(), self._live.series(), self._look())

    def settings(self) -> list[page.Panel]:
        says = "Settings that differ from their defaults come first."
        with page.card("Settings of this run", says):
            everything = ui.switch("show all settings")
            grid = page.Grid(search="search settings")
            shown = page.Panel(lambda: _settings(self._live.path, everything.value), grid.show)
        everything.on_value_change(shown.refresh)
        return [shown]

    def timeline(self) -> list[page.Panel]:
        here = partial(address, "run", self._name, "timeline")
        page.views((f"last {n} steps", here(steps=n), n == self._steps) for n in TIMELINE_STEPS)
        says = (
            "A lane for each stage. Bars above each other ran at the same time; white space in a lane is a "
            "stage that waited. Stages that never overlap take turns, and a step takes the sum of them. Shift "
            "and the wheel zoom."
        )
        return [page.chart_panel("What was busy when", says, self._timeline, height_px=380)]

    def _timeline(self) -> Drawn:
        shown = books.read_timeline(self._live.path, self._steps)
        if not shown.bars:
            return {}, "No stage has been measured yet."
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in shown.busy.items())
        return charts.timeline(shown), f"Busy share of these {shown.end_s - shown.start_s:.1f} s: {busy}."

    def tokens(self) -> list[page.Panel]:
        says = (
            "Every sampled token is in exactly one place. Green was trained on. Orange was paid for and thrown "
            "away, by reason. The rest is still under way."
        )
        flow = page.chart_panel("Where the generated tokens went", says, self._flow, height_px=360)
        says = "If the dropped answers are longer than the trained ones, the policy learns more from short answers."
        return [flow, page.table_panel("The accounts", says, self._accounts)]

    def _flow(self) -> Drawn:
        held = books.read_accounts(self._live.path)
        if not held.generated.tokens:
            return {}, "No token has been sampled yet."
        return charts.sankey(show.accounts(held)), ""

    def _accounts(self) -> page.Listing:
        held, here = books.read_accounts(self._live.path), ("run", self._name, "trajectories")
        found = show.accounts(held)
        links = [address(*here, state=one.state, reason=one.reason) for one in found]
        return page.Listing(
            columns=(*show.ACCOUNT_COLUMNS, "because"),
            rows=[(*one.row(held.generated), one.explanation) for one in found],
            numeric=range(1, 5),
            links=[*links[:-1], ""],  # what is in flight has no record yet
            wide={4, 5},
        )

    def lag(self) -> list[page.Panel]:
        says = (
            "Lag counts the updates between sampling a token and training on it. 0 is fresh. Some lag lets "
            "stages overlap; too much makes the policy learn from what it no longer would say."
        )
        chart = page.chart_panel("Lag of the trained tokens", says, self._lags)
        self._look_controls()
        return [chart, self._curve(curves.RATIO), self._curve(curves.WEIGHTS)]

    def _lags(self) -> Drawn:
        shares, allowed = self._live.lag_shares(), self._live.wanted_lag()
        if not shares.sums:
            return {}, "Nothing has been trained on yet."
        text = "" if allowed is None else f"loop.max_lag = {allowed}: older tokens are dropped as stale."
        return charts.lag_bars(shares, self._live.series().last_step), text

    def publish(self) -> list[page.Panel]:
        self._look_controls()
        return [self._curve(curves.LATENCY), self._curve(curves.BYTES)]

    def rewards(self) -> list[page.Panel]:
        says = "How often each reward was given. Training moves the bars to the right."
        chart = page.chart_panel("Rewards at the start and now", says, self._rewards)
        self._look_controls()
        return [chart, *self._pair(curves.SPREAD, curves.LENGTHS)]

    def _rewards(self) -> Drawn:
        shape = books.read_rewards(self._live.path)
        if not shape.labels:
            return {}, "No answer has been scored yet."
        parts = "; ".join(f"{part} {first:.3g} → {now:.3g}" for part, (first, now) in shape.parts.items())
        text = f"Mean of each reward part, first → newest: {parts}." if parts else ""
        return charts.reward_bars(shape), text


async def run_view(site: Site, view: str, name: str, steps: int = TIMELINE_STEPS[0]) -> None:
    shown = RunViews(site, name, steps)
    with page.frame(name):
        page.run_views(name, view)
        await page.follow(getattr(shown, view)())


def _verdict(found: Triage | str) -> None:
    if isinstance(found, str):
        page.section(Section(sentences=(found,)))
        return
    for part in triage_report(found).sections:
        page.section(part)


def _settings(run_dir: Path, everything: bool) -> page.Listing:
    """What was set, and with `everything` what was not, with what each one means."""
    given = dict(text.split("=", 1) for text in changed(run_config(run_dir)))
    known = sorted(explain(), key=lambda setting: setting.key not in given)
    shown = [setting for setting in known if everything or setting.key in given]
    rows = [(one.key, given.get(one.key, one.default), one.default, one.doc) for one in shown]
    columns = ("setting", "value", "default", "meaning")
    instead = "Every setting is at its default."
    return page.Listing(columns=columns, rows=rows, wide={2}, stacked=True, instead=instead)

"""Runs: a list of all, one with a view for each question about it, and several compared."""

from collections.abc import Callable
from functools import partial

from nicegui import run as threads
from nicegui import ui

from headrace.config_file import changed, explain
from headrace.dashboard import books, charts
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.answers import number
from headrace.dashboard.charts import CARDS, Card, Drawn, Look, metric_curves
from headrace.dashboard.site import LiveRun, Site, address
from headrace.errors import HeadraceError, RunError
from headrace.insight.reports import triage_report
from headrace.insight.triage import Triage
from headrace.ledger.files import run_config
from headrace.runs import show
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.report import Section, duration, percent

TIMELINE_STEPS = (3, 10, 30)
MAIN = "the main ones"
_MAIN_TITLES = ("Reward mean", "Wall", "Lag mean")


async def runs(site: Site) -> None:
    """The list of runs, or the run itself where there is but one to show."""
    if site.is_one_run:
        ui.navigate.to(address("run", site.root.name, "overview"))
        return
    with page.frame("Runs", str(site.root)):
        page.table_panel(CARDS["runs"], lambda: _runs(site.facts()), search="search by name or state")
        await page.follow()


def _runs(found: list[RunFacts]) -> page.Listing:
    problems = tuple((facts.path.name, facts.problem) for facts in found if facts.problem)
    rows = []
    for facts in found:
        name, state, steps, *rest = show.run_row(facts)
        rows.append((name, state, steps, show.drawn_rewards(facts.rewards), *rest))
    return page.Listing(
        columns=(*show.RUN_COLUMNS[:3], "reward", *show.RUN_COLUMNS[3:]),
        rows=rows,
        numeric={2, 4, 5, 6, 7},
        links=[address("run", facts.path.name, "overview") for facts in found],
        wide={2, 4, 5, 6},
        kinds={1: "state", 3: "curve"},
        sort_by={
            3: [facts.rewards[-1] if facts.rewards else None for facts in found],
            4: [facts.score_after if facts.score_after is not None else facts.score_before for facts in found],
            7: [-facts.written.timestamp() for facts in found],
        },
        below=Section(title="Cannot be read", facts=problems) if problems else None,
        instead="There is no run here yet. `headrace train` makes one.",
    )


async def run_view(view: str, site: Site, name: str) -> None:
    shown = RunViews(site, name)
    with page.frame(name):
        page.run_views(name, view)
        getattr(shown, view)()
        await page.follow()


class RunViews:
    """What is on the views of one run: each is a method that makes its panels."""

    def __init__(self, site: Site, name: str) -> None:
        self._name, self._live = name, site.run(name)
        self._look: Callable[[], Look] = Look

    def _curves(self, *curves: Card, height_px: int = 280) -> None:
        for curve in curves:
            page.chart_panel(curve, partial(self._drawn, curve), height_px)

    def _drawn(self, curve: Card) -> Drawn:
        return curve.drawn(self._live.series(), self._look(), self._live.facts())

    def overview(self) -> None:
        page.panel(lambda: self._live.overview().numbers(self._live.triage()), page.numbers)
        self._look = page.look_controls()
        self._curves(CARDS["reward"])
        with page.card("How it went"):
            page.panel(self._live.history, page.section)
        with page.card(CARDS["triage"]):
            page.panel(self._live.triage, _verdict)
            ui.link("Try other stage times on the plan page", address("plan", run=self._name))
        with ui.element("div").classes("pair"):
            self._curves(CARDS["goodput"], CARDS["stage_times"])

    def curves(self) -> None:
        self._look = page.look_controls()
        for group, found in metric_curves().items():
            with ui.element("h2").classes("group"):
                ui.label(group.capitalize())
            with ui.element("div").classes("trio"):
                self._curves(*found, height_px=200)
                if group == "reward":
                    page.chart_panel(CARDS["reward_parts"], self._parts, 200)

    def _parts(self) -> Drawn:
        return charts.parts_drawn(self._live.tally(books.PARTS), self._live.series(), self._look())

    def settings(self) -> None:
        with page.card(CARDS["settings"]):
            everything = ui.switch("show all settings")
            grid = page.Grid(search="search settings")
            shown = page.Panel(lambda: self._settings(everything.value), grid.show)
        everything.on_value_change(shown.refresh)

    def _settings(self, everything: bool) -> page.Listing:
        """What was set, and with `everything` what was not, with what each one means."""
        given = _set(self._live)
        known = sorted(explain(), key=lambda setting: setting.key not in given)
        shown = [setting for setting in known if everything or setting.key in given]
        rows = [(one.key, given.get(one.key, one.default), one.default, one.doc) for one in shown]
        columns = ("setting", "value", "default", "meaning")
        instead = "Every setting is at its default."
        return page.Listing(columns=columns, rows=rows, wide={2}, stacked=True, instead=instead)

    def timeline(self) -> None:
        asked = number(ui.context.client.request.query_params, "steps") or TIMELINE_STEPS[0]
        steps, here = min(max(asked, 1), TIMELINE_STEPS[-1]), partial(address, "run", self._name, "timeline")
        page.views((f"last {n} steps", here(steps=n), n == steps) for n in TIMELINE_STEPS)
        page.chart_panel(CARDS["timeline"], lambda: self._timeline(steps), height_px=380)

    def _timeline(self, steps: int) -> Drawn:
        shown = books.read_timeline(self._live.path, steps)
        if not shown.bars:
            return {}, "No stage has been measured yet."
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in shown.busy.items())
        return charts.timeline(shown), f"Busy share of these {shown.end_s - shown.start_s:.1f} s: {busy}."

    def tokens(self) -> None:
        page.chart_panel(CARDS["tokens"], self._flow, height_px=360)
        page.table_panel(CARDS["accounts"], self._accounts)

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

    def lag(self) -> None:
        page.chart_panel(CARDS["lag"], self._lags)
        self._look = page.look_controls()
        self._curves(CARDS["ratio"], CARDS["weights"])

    def _lags(self) -> Drawn:
        shares, allowed = self._live.tally(books.LAGS), self._live.wanted_lag()
        if not shares.sums:
            return {}, "Nothing has been trained on yet."
        text = "" if allowed is None else f"loop.max_lag = {allowed}: older tokens are dropped as stale."
        return charts.lag_bars(shares, self._live.series().last_step), text

    def publish(self) -> None:
        self._look = page.look_controls()
        self._curves(CARDS["latency"], CARDS["bytes"])

    def rewards(self) -> None:
        page.chart_panel(CARDS["rewards"], self._rewards)
        self._look = page.look_controls()
        with ui.element("div").classes("pair"):
            self._curves(CARDS["spread"], CARDS["lengths"])

    def _rewards(self) -> Drawn:
        found = books.read_rewards(self._live.path)
        if not found.first.size + found.newest.size:
            return {}, "No answer has been scored yet."
        parts = "; ".join(f"{part} {first:.3g} → {now:.3g}" for part, (first, now) in found.parts.items())
        text = f"Mean of each reward part, first → newest: {parts}." if parts else ""
        return charts.reward_bars(found), text


def _set(live: LiveRun) -> dict[str, str]:
    """The settings of a run that are not at their defaults."""
    try:
        return dict(text.split("=", 1) for text in changed(run_config(live.path)))
    except HeadraceError as error:
        raise RunError(f"The settings of {live.name} cannot be read: {error}") from error


def _verdict(found: Triage | str) -> None:
    parts = [Section(sentences=(found,))] if isinstance(found, str) else triage_report(found).sections
    for part in parts:
        page.section(part)


async def compare(site: Site) -> None:
    query = ui.context.client.request.query_params
    found = await threads.io_bound(site.facts)
    names = [facts.path.name for facts in found if facts.state is not RunState.UNREADABLE]
    asked = [name for name in dict.fromkeys(query.getlist("run")) if name]
    chosen = [site.run(name) for name in asked or names[:2]]
    group = query.get("curves") or MAIN
    with page.frame("Compare runs"):
        _choices(names, [live.name for live in chosen], group)
        if len(chosen) < 2:
            held = f"{site.root} holds {len(names)} that can be read"
            page.message(f"Comparing takes two runs or more: choose them above; {held}.")
            return
        page.table_panel("In numbers", lambda: _numbers(chosen))
        look = page.look_controls()

        def drawn(curve: Card) -> Drawn:
            return curve.compared({live.name: live.series() for live in chosen}, look())

        groups = metric_curves()
        main = [curve for curves in groups.values() for curve in curves if curve.title in _MAIN_TITLES]
        with ui.element("div").classes("pair"):
            for curve in groups.get(group, [*main, CARDS["goodput"]]):
                page.chart_panel(curve, partial(drawn, curve))
        page.table_panel(CARDS["differences"], lambda: _differences(chosen))
        await page.follow()


def _choices(names: list[str], chosen: list[str], group: str) -> None:
    def go(runs: list[str], curves: str) -> None:
        ui.navigate.to(address("compare", run=runs or None, curves=None if curves == MAIN else curves))

    with page.card(CARDS["compare"]), ui.element("div").classes("line"):
        options = list(dict.fromkeys((*names, *chosen)))
        runs = ui.select(options, value=chosen, label="runs", multiple=True, with_input=True)
        runs.classes("field grow").props("outlined dense options-dense use-chips")
        page.choice([MAIN, *metric_curves()], group, "curves", lambda event: go(runs.value, event.value))
        ui.button("Compare", on_click=lambda: go(runs.value, group)).props("outline no-caps")


def _numbers(chosen: list[LiveRun]) -> page.Listing:
    def written(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    sides = []
    for live in chosen:
        seen, verdict = live.overview(), live.triage()
        facts, series = seen.facts, seen.series
        side = {
            "state": str(facts.state),
            "steps": f"{series.last_step:,} / {facts.wanted_steps:,}",
            "reward, last steps": written(series.now("reward_mean")),
            "held-out score, before → latest": show.scores(facts),
            "goodput, tokens/s": written(series.goodput()),
            "seconds per step": written(series.now("wall_s")),
            "bottleneck": "…" if isinstance(verdict, str) else str(verdict.bottleneck),
            "largest lag": str(seen.lag_max),
            "share trained on": percent(seen.useful_share, 1),
            "time": duration(seen.elapsed_s),
        }
        sides.append(side)
    rows = [(name, *(side[name] for side in sides)) for name in sides[0]]
    numeric = range(1, len(chosen) + 1)
    return page.Listing(columns=("", *(live.name for live in chosen)), rows=rows, numeric=numeric)


def _differences(chosen: list[LiveRun]) -> page.Listing:
    sides = [_set(live) for live in chosen]
    default = {setting.key: f"{setting.default} (default)" for setting in explain()}
    keys = sorted({key for side in sides for key in side} - {"run.dir"})
    rows = [(key, *(side.get(key, default[key]) for side in sides)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    columns = ("setting", *(live.name for live in chosen))
    return page.Listing(columns=columns, rows=rows, instead="All settings are the same.")

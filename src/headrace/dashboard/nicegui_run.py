"""One run: its numbers, and a view for each question about it."""

from __future__ import annotations

from nicegui import ui

from headrace.dashboard import charts, curves
from headrace.dashboard.books import read_accounts, read_rewards, read_timeline
from headrace.dashboard.charts import Options
from headrace.dashboard.nicegui_elements import Listing, chart_panel, numbers, panel, section, table_panel
from headrace.dashboard.nicegui_frame import Panel, card, follow, frame, run_views, views
from headrace.dashboard.overview import Number, overview_numbers
from headrace.dashboard.site import LiveRun, Site, address
from headrace.insight.reports import triage_report
from headrace.insight.triage import Triage
from headrace.ledger.ledger import Books
from headrace.runs.report import Section, Table
from headrace.runs.tables import ACCOUNT_COLUMNS, accounts

TIMELINE_STEPS = (3, 10, 30)


def _curve(live: LiveRun, curve: curves.Curve) -> Panel:
    return chart_panel(curve.title, curve.says, lambda: curve.drawn(live.series()))


def _pair(live: LiveRun, *shown: curves.Curve) -> list[Panel]:
    """Beside each other where there is room."""
    with ui.element("div").classes("pair"):
        return [_curve(live, one) for one in shown]


async def overview(site: Site, name: str) -> None:
    live = site.run(name)

    def told() -> list[Number]:
        return overview_numbers(live.overview(site.dollars_per_hour), live.wanted_lag(), live.triage())

    with frame(name):
        run_views(name, "overview")
        panels = [panel(told, numbers), _curve(live, curves.REWARD)]
        with card(
            "What to change first",
            "What holds a step back most, and what each change would bring. A prediction, not a promise: change one "
            "thing, and look again.",
        ):
            panels.append(panel(live.triage, _verdict))
            ui.link("Try other stage times on the plan page", address("plan", run=name))
        panels += _pair(live, curves.GOODPUT, curves.STAGE_TIMES)
        await follow(panels)


def _verdict(found: Triage | str) -> None:
    parts = (Section(sentences=(found,)),) if isinstance(found, str) else triage_report(found).sections
    for part in parts:
        section(part)


async def timeline(site: Site, name: str, steps: int = TIMELINE_STEPS[0]) -> None:
    live = site.run(name)
    steps = min(max(steps, 1), TIMELINE_STEPS[-1])

    def read() -> tuple[Options, str]:
        shown = read_timeline(live.path, steps)
        if not shown.bars:
            return {}, "No stage has been measured yet."
        busy = ", ".join(f"{lane} {share:.0%}" for lane, share in shown.busy.items())
        return charts.timeline(shown), f"Busy share of these {shown.end_s - shown.start_s:.1f} s: {busy}."

    with frame(name):
        run_views(name, "timeline")
        views([(f"last {n} steps", address("run", name, "timeline", steps=n), n == steps) for n in TIMELINE_STEPS])
        says = (
            "A lane for each stage. Bars above each other ran at the same time; white space in a lane is a stage that "
            "waited. Stages that never overlap take turns, and a step takes the sum of them. Shift and the wheel zoom."
        )
        await follow([chart_panel("What was busy when", says, read, height_px=380)])


async def tokens(site: Site, name: str) -> None:
    live = site.run(name)

    def read() -> tuple[Options, str]:
        books = read_accounts(live.path)
        some = books.generated.tokens > 0
        return (charts.sankey(accounts(books)), "") if some else ({}, "No token has been sampled yet.")

    with frame(name):
        run_views(name, "tokens")
        says = (
            "Every sampled token is in exactly one place. Green was trained on. Orange was paid for and thrown away, "
            "by reason. The rest is still under way."
        )
        chart = chart_panel("Where the generated tokens went", says, read, height_px=360)
        says = "If the dropped answers are longer than the trained ones, the policy learns more from short answers."
        listed = table_panel("The accounts", says, lambda: _accounts(name, read_accounts(live.path)))
        await follow([chart, listed])


def _accounts(name: str, books: Books) -> Listing:
    """A line for each account, with a link to its trajectories."""
    found = accounts(books)
    links = [address("run", name, "trajectories", state=one.state, reason=one.reason) for one in found]
    links[-1] = ""  # what is in flight has no record yet
    rows = [(*one.row(books.generated), one.explanation) for one in found]
    table = Table(columns=(*ACCOUNT_COLUMNS, "because"), rows=tuple(rows), numeric=frozenset(range(1, 5)))
    return Listing(table=table, links=tuple(links), wide=frozenset({4, 5}))


async def lag(site: Site, name: str) -> None:
    live = site.run(name)

    def read() -> tuple[Options, str]:
        shares = live.lag_shares()
        if not shares.tokens:
            return {}, "Nothing has been trained on yet."
        allowed = live.wanted_lag()
        text = "" if allowed is None else f"loop.max_lag = {allowed}: older tokens are dropped as stale."
        return charts.lag_bars(shares, live.series().last_step), text

    with frame(name):
        run_views(name, "lag")
        says = (
            "Lag counts the updates between sampling a token and training on it. 0 is fresh. Some lag lets stages "
            "overlap; too much makes the policy learn from what it no longer would say."
        )
        chart = chart_panel("Lag of the trained tokens", says, read)
        await follow([chart, _curve(live, curves.RATIO), _curve(live, curves.WEIGHTS)])


async def publish(site: Site, name: str) -> None:
    live = site.run(name)
    with frame(name):
        run_views(name, "publish")
        await follow([_curve(live, curves.LATENCY), _curve(live, curves.BYTES)])


async def rewards(site: Site, name: str) -> None:
    live = site.run(name)

    def read() -> tuple[Options, str]:
        shape = read_rewards(live.path)
        parts = "; ".join(f"{part} {first:.3g} → {newest:.3g}" for part, (first, newest) in shape.parts.items())
        text = f"Mean of each reward part, first → newest: {parts}." if parts else ""
        return (charts.reward_bars(shape), text) if shape.labels else ({}, "No answer has been scored yet.")

    with frame(name):
        run_views(name, "rewards")
        says = "How often each reward was given. Training moves the bars to the right."
        chart = chart_panel("Rewards at the start and now", says, read)
        await follow([chart, *_pair(live, curves.SPREAD, curves.LENGTHS)])

"""One run: its numbers, and a view for each question about it."""

from __future__ import annotations

from functools import partial

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


def _curve_panel(live: LiveRun, title: str, says: str, chart: curves.Chart) -> Panel:
    return chart_panel(title, says, lambda: curves.drawn(live.series(), chart))


async def overview(site: Site, name: str) -> None:
    """The run in a few numbers, what holds it back, and three curves."""
    live = site.run(name)
    curve = partial(_curve_panel, live)

    def told() -> list[Number]:
        return overview_numbers(live.overview(site.dollars_per_hour), live.wanted_lag(), live.triage())

    with frame(name):
        run_views(name, "overview")
        panels = [
            panel(told, numbers),
            curve(
                "Reward",
                "The mean reward of all answers that were scored during a step. Training works if it rises. Diamonds "
                "are scores on held-out prompts, which are never trained on.",
                curves.reward_chart,
            ),
        ]
        with card(
            "What to change first",
            "What holds a step back most, and what each change would bring. A prediction, not a promise: change one "
            "thing, and look again.",
        ):
            panels.append(panel(live.triage, _verdict))
            ui.link("Try other stage times on the plan page", address("plan", run=name))
        with ui.element("div").classes("pair"):
            panels += [
                curve(
                    "Goodput",
                    "Tokens that were trained on, per second: the speed that counts. Generated tokens that were "
                    "dropped are not in it.",
                    curves.goodput_chart,
                ),
                curve(
                    "Stage times",
                    "Seconds of a step in which each stage was busy. Stages may be busy at the same time, so they need "
                    "not add up to the step.",
                    curves.stage_chart,
                ),
            ]
        await follow(panels)


def _verdict(found: Triage | str) -> None:
    """What holds the run back, or why that cannot be told yet."""
    parts = (Section(sentences=(found,)),) if isinstance(found, str) else triage_report(found).sections
    for part in parts:
        section(part)


async def timeline(site: Site, name: str, steps: int = TIMELINE_STEPS[0]) -> None:
    """Which stage was busy when."""
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
        panel = chart_panel(
            "What was busy when",
            "A lane for each stage. Bars above each other ran at the same time; white space in a lane is a stage that "
            "waited. Stages that never overlap take turns, and a step takes the sum of them. Shift and the wheel zoom.",
            read,
            height_px=380,
        )
        await follow([panel])


async def tokens(site: Site, name: str) -> None:
    """What became of every token."""
    live = site.run(name)

    def read() -> tuple[Options, str]:
        books = read_accounts(live.path)
        some = books.generated.tokens > 0
        return (charts.sankey(accounts(books)), "") if some else ({}, "No token has been sampled yet.")

    with frame(name):
        run_views(name, "tokens")
        chart = chart_panel(
            "Where the generated tokens went",
            "Every sampled token is in exactly one place. Green was trained on. Orange was paid for and thrown away, "
            "by reason. The rest is still under way.",
            read,
            height_px=360,
        )
        listed = table_panel(
            "The accounts",
            "If the dropped answers are longer than the trained ones, the policy learns more from short answers.",
            lambda: _accounts(name, read_accounts(live.path)),
        )
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
    """How old the trained tokens were, and what that did to the importance ratios."""
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
        panels = [
            chart_panel(
                "Lag of the trained tokens",
                "Lag counts the updates between sampling a token and training on it. 0 is fresh. Some lag lets stages "
                "overlap; too much makes the policy learn from what it no longer would say.",
                read,
            ),
            _curve_panel(
                live,
                "Importance ratio",
                "How much more likely the learner finds a token than the policy that sampled it: 1 means that nothing "
                "changed. The band holds 98 of 100 tokens; a wide band means that the learner corrects a lot.",
                curves.ratio_chart,
            ),
            _curve_panel(
                live,
                "Effective samples",
                "What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few "
                "heavy ones dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
                curves.weight_chart,
            ),
        ]
        await follow(panels)


async def publish(site: Site, name: str) -> None:
    """What it takes to hand new weights to the engine."""
    live = site.run(name)
    with frame(name):
        run_views(name, "publish")
        panels = [
            _curve_panel(
                live,
                "Publish latency",
                "Milliseconds of a step in which new weights were handed to the engine.",
                curves.publish_chart,
            ),
            _curve_panel(
                live,
                "Bytes sent",
                "Megabytes that moved in a step. 0 means that engine and learner share one copy of the weights.",
                curves.bytes_chart,
            ),
        ]
        await follow(panels)


async def rewards(site: Site, name: str) -> None:
    """How rewards and lengths are spread."""
    live = site.run(name)

    def read() -> tuple[Options, str]:
        shape = read_rewards(live.path)
        parts = "; ".join(f"{part} {first:.3g} → {newest:.3g}" for part, (first, newest) in shape.parts.items())
        text = f"Mean of each reward part, first → newest: {parts}." if parts else ""
        return (charts.reward_bars(shape), text) if shape.labels else ({}, "No answer has been scored yet.")

    with frame(name):
        run_views(name, "rewards")
        panels = [
            chart_panel(
                "Rewards at the start and now",
                "How often each reward was given. Training moves the bars to the right.",
                read,
            )
        ]
        with ui.element("div").classes("pair"):
            panels += [
                _curve_panel(
                    live,
                    "Mean and spread",
                    "The band is one standard deviation each way. Without spread inside a group there is nothing to "
                    "learn from it.",
                    curves.spread_chart,
                ),
                _curve_panel(
                    live,
                    "Length of answers",
                    "Sampled tokens of an answer: the mean, and the longest of the step, for which others may wait.",
                    curves.length_chart,
                ),
            ]
        await follow(panels)

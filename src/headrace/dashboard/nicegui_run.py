"""One run: its numbers, and a view for each question about it."""

from __future__ import annotations

from nicegui import ui

from headrace.dashboard import charts, curves
from headrace.dashboard.books import read_flows, read_rewards, read_timeline
from headrace.dashboard.charts import BLUE, STAGE_COLOURS, Options
from headrace.dashboard.markup import address
from headrace.dashboard.nicegui_frame import (
    chart_panel,
    follow,
    frame,
    html_panel,
    numbers_panel,
    run_views,
    views,
)
from headrace.dashboard.overview import flow_table, overview_numbers
from headrace.dashboard.site import Site

TIMELINE_STEPS = (3, 10, 30)


async def overview(site: Site, name: str) -> None:
    """The run in a few numbers and three curves."""
    live = site.run(name)
    with frame(name):
        run_views(name, "overview")
        panels = [numbers_panel(lambda: overview_numbers(live.overview(site.dollars_per_hour), live.wanted_lag()))]
        panels.append(
            chart_panel(
                "Reward",
                "The mean reward of all answers that were scored during a step. Training works if it rises. Diamonds "
                "are scores on held-out prompts, which are never trained on.",
                lambda: curves.reward_chart(live.series()),
            )
        )
        with ui.element("div").classes("pair"):
            panels.append(
                chart_panel(
                    "Goodput",
                    "Tokens that were trained on, per second: the speed that counts. Generated tokens that were "
                    "dropped are not in it.",
                    lambda: curves.goodput_chart(live.series()),
                )
            )
            panels.append(
                chart_panel(
                    "Stage times",
                    "Seconds of a step in which each stage was busy. The highest line is the wall: only shortening "
                    "that stage makes steps shorter.",
                    lambda: curves.stage_chart(live.series()),
                )
            )
        await follow(panels)


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
        flows = read_flows(live.path)
        total = sum(flow.tokens for flow in flows)
        return (charts.sankey(flows), "") if total else ({}, "No token has been sampled yet.")

    with frame(name):
        run_views(name, "tokens")
        chart = chart_panel(
            "Where the generated tokens went",
            "Every sampled token is in exactly one place. Green was trained on. Orange was paid for and thrown away, "
            "by reason. The rest is still under way.",
            read,
            height_px=360,
        )
        listed = html_panel(
            "The accounts",
            "If the dropped answers are longer than the trained ones, the policy learns more from short answers.",
            lambda: flow_table(name, read_flows(live.path)),
        )
        await follow([chart, listed])


async def lag(site: Site, name: str) -> None:
    """How old the trained tokens were, and what that did to the importance ratios."""
    live = site.run(name)

    def read_lag() -> tuple[Options, str]:
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
                read_lag,
            )
        ]
        panels.append(
            chart_panel(
                "Importance ratio",
                "How much more likely the learner finds a token than the policy that sampled it: 1 means that nothing "
                "changed. The band holds 98 of 100 tokens; a wide band means that the learner corrects a lot.",
                lambda: curves.ratio_chart(live.series()),
            )
        )
        panels.append(
            chart_panel(
                "Effective samples",
                "What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few "
                "heavy ones dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
                lambda: curves.weight_chart(live.series()),
            )
        )
        await follow(panels)


async def publish(site: Site, name: str) -> None:
    """What it takes to hand new weights to the engine."""
    live = site.run(name)
    with frame(name):
        run_views(name, "publish")
        panels = [
            chart_panel(
                "Publish latency",
                "Milliseconds of a step in which new weights were handed to the engine.",
                lambda: curves.one_curve(
                    live.series(), "stage_s.publish", "ms per step", STAGE_COLOURS["publish"], 1e3
                ),
            ),
            chart_panel(
                "Bytes sent",
                "Megabytes that moved in a step. 0 means that engine and learner share one copy of the weights.",
                lambda: curves.one_curve(live.series(), "publish_bytes", "MB per step", BLUE, 1e-6),
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
            panels.append(
                chart_panel(
                    "Mean and spread",
                    "The band is one standard deviation each way. Without spread inside a group there is nothing to "
                    "learn from it.",
                    lambda: curves.spread_chart(live.series()),
                )
            )
            panels.append(
                chart_panel(
                    "Length of answers",
                    "Sampled tokens of an answer: the mean, and the longest of the step, for which others may wait.",
                    lambda: curves.length_chart(live.series()),
                )
            )
        await follow(panels)

"""One run: its numbers, and a view for each question about it."""

from __future__ import annotations

from nicegui import ui

from headrace.dashboard import charts
from headrace.dashboard.books import Flow, read_flows, read_rewards, read_timeline
from headrace.dashboard.charts import BLUE, GREEN, ORANGE, RED, STAGE_COLOURS, Options
from headrace.dashboard.markup import Cell, address, dollars, duration, short, table
from headrace.dashboard.nicegui_frame import (
    Number,
    chart_panel,
    follow,
    frame,
    html_panel,
    numbers_panel,
    run_views,
    views,
)
from headrace.dashboard.series import RECENT_STEPS, Series
from headrace.dashboard.site import Overview, Site
from headrace.ledger.runs import RunState
from headrace.types import STAGES

TIMELINE_STEPS = (3, 10, 30)
_NO_ROWS = "There is no row yet: the first step is under way."
_STATE_WORDS = {
    RunState.FINISHED: "finished",
    RunState.RUNNING: "running now",
    RunState.STOPPED: "stopped before its end",
    RunState.UNREADABLE: "cannot be read",
}


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
                lambda: reward_chart(live.series()),
            )
        )
        with ui.element("div").classes("pair"):
            panels.append(
                chart_panel(
                    "Goodput",
                    "Tokens that were trained on, per second: the speed that counts. Generated tokens that were "
                    "dropped are not in it.",
                    lambda: goodput_chart(live.series()),
                )
            )
            panels.append(
                chart_panel(
                    "Stage times",
                    "Seconds of a step in which each stage was busy. The highest line is the wall: only shortening "
                    "that stage makes steps shorter.",
                    lambda: stage_chart(live.series()),
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
            "waited. Stages that never overlap take turns, and a step takes the sum of them.",
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
                lambda: ratio_chart(live.series()),
            )
        )
        panels.append(
            chart_panel(
                "Effective samples",
                "What share of the tokens carries weight after correction: 100 % for fresh tokens, less when a few "
                "heavy ones dominate. The second curve is the share of tokens whose ratio is outside 0.9 to 1.1.",
                lambda: weight_chart(live.series()),
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
                lambda: one_curve(live.series(), "stage_s.publish", "ms per step", STAGE_COLOURS["publish"], 1e3),
            ),
            chart_panel(
                "Bytes sent",
                "Megabytes that moved in a step. 0 means that engine and learner share one copy of the weights.",
                lambda: one_curve(live.series(), "publish_bytes", "MB per step", BLUE, 1e-6),
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
                    lambda: spread_chart(live.series()),
                )
            )
            panels.append(
                chart_panel(
                    "Length of answers",
                    "Sampled tokens of an answer: the mean, and the longest of the step, for which others may wait.",
                    lambda: length_chart(live.series()),
                )
            )
        await follow(panels)


def overview_numbers(seen: Overview, max_lag: int | None) -> list[Number]:
    """The numbers of the overview, with what they mean."""
    facts = seen.facts
    scores = [f"{score:.3f}" for score in (facts.score_before, facts.score_after) if score is not None]
    held_out = f"; held-out score {' → '.join(scores)}" if scores else ""
    recent = f"over the last {min(seen.steps, RECENT_STEPS)} steps"
    numbers = [
        ("Reward", _or_dash(seen.now_reward, "{:.3f}"), f"mean of all scored answers {recent}{held_out}"),
        (
            "Goodput",
            _or_dash(seen.now_goodput_tokens_per_s, "{}"),
            f"tokens trained on per second, {recent}; {_or_dash(seen.goodput_tokens_per_s, '{}')} over the whole run",
        ),
    ]
    if seen.now_stage_s is not None and seen.now_step_s:
        wall = seen.now_stage_s.wall
        share = min(1.0, getattr(seen.now_stage_s, wall) / seen.now_step_s)
        numbers.append(
            ("Wall", wall, f"the stage that sets the pace: busy {share:.0%} of a step of {seen.now_step_s:.2f} s")
        )
    allowed = "" if max_lag is None else f"; {max_lag} allowed"
    numbers += [
        (
            "Lag",
            _or_dash(seen.now_lag_mean, "{:.2f}"),
            f"updates between sampling and training; at most {seen.lag_max} seen{allowed}",
        ),
        (
            "Useful",
            _or_dash(seen.useful_share, "{:.0%}"),
            "of the finished tokens were trained on; the rest was dropped",
        ),
        (
            "Steps",
            f"{seen.steps:,}",
            f"of {facts.wanted_steps:,}; {_STATE_WORDS[facts.state]}, after {duration(seen.elapsed_s)}",
        ),
    ]
    if seen.dollars is not None:
        per_million = "-" if seen.dollars_per_million is None else dollars(seen.dollars_per_million)
        numbers.append(("Cost so far", dollars(seen.dollars), f"{per_million} per million trained tokens"))
    if seen.num_damaged:
        numbers.append(("Damaged", str(seen.num_damaged), "rows of the ledger cannot be read and are left out"))
    return numbers


def flow_table(name: str, flows: list[Flow]) -> str:
    """The accounts, each with a link to its trajectories."""
    total = sum(flow.tokens for flow in flows) or 1
    titles = [
        Cell(text="account"),
        Cell(text="tokens", number=True),
        Cell(text="share", number=True),
        Cell(text="answers", number=True),
        Cell(text="mean length", number=True, wide=True),
        Cell(text="because", wide=True),
    ]
    rows = []
    for flow in flows:
        reason = flow.name.removeprefix("dropped: ") if flow.kind == "dropped" else None
        link = "" if flow.kind == "in_flight" else address("run", name, "trajectories", state=flow.kind, reason=reason)
        length = flow.tokens / flow.trajectories if flow.trajectories else None
        rows.append(
            [
                Cell(text=flow.name, link=link),
                Cell(text=f"{flow.tokens:,}", number=True),
                Cell(text=f"{flow.tokens / total:.1%}", number=True),
                Cell(text=f"{flow.trajectories:,}", number=True),
                Cell(text="-" if length is None else f"{length:.1f}", number=True, wide=True),
                Cell(text=flow.says, wide=True),
            ]
        )
    return table(titles, rows)


def reward_chart(series: Series) -> tuple[Options, str]:
    """Mean reward, and held-out scores on top."""
    if not series.buckets:
        return {}, _NO_ROWS
    options = charts.lines({"mean reward": (series.curve("reward_mean"), BLUE)}, x="step", y="reward")
    return charts.with_points(options, "held-out score", series.curve("score"), ORANGE), _averaged(series)


def goodput_chart(series: Series) -> tuple[Options, str]:
    """Trained tokens per second."""
    if not series.buckets:
        return {}, _NO_ROWS
    points = [(bucket.last_step, bucket.goodput_tokens_per_s) for bucket in series.buckets]
    return charts.lines({"goodput": (points, GREEN)}, x="step", y="trained tokens per second", low=0), _averaged(series)


def stage_chart(series: Series) -> tuple[Options, str]:
    """Seconds of every stage that was ever busy, and of the step."""
    if not series.buckets:
        return {}, _NO_ROWS
    curves = {stage: (series.curve(f"stage_s.{stage}"), STAGE_COLOURS[stage]) for stage in STAGES}
    busy = {stage: curve for stage, curve in curves.items() if any(y for _, y in curve[0])}
    return charts.lines(busy, x="step", y="seconds per step", low=0), _averaged(series)


def ratio_chart(series: Series) -> tuple[Options, str]:
    """Mean ratio in its band."""
    if not series.buckets:
        return {}, _NO_ROWS
    middle, low, high = (series.curve(name) for name in ("ratio_mean", "ratio_p01", "ratio_p99"))
    names = ("mean ratio", "98 of 100 tokens")
    return charts.band(middle, low, high, names=names, x="step", y="ratio", colour=BLUE), _averaged(series)


def weight_chart(series: Series) -> tuple[Options, str]:
    """Effective samples, and ratios far from one."""
    if not series.buckets:
        return {}, _NO_ROWS
    curves = {
        "effective samples": (series.curve("effective_samples", 100), GREEN),
        "ratio outside 0.9 to 1.1": (series.curve("ratio_outside", 100), RED),
    }
    return charts.lines(curves, x="step", y="% of tokens", low=0), _averaged(series)


def one_curve(series: Series, name: str, y: str, colour: str, scale: float) -> tuple[Options, str]:
    """A single curve from zero."""
    if not series.buckets:
        return {}, _NO_ROWS
    return charts.lines({y: (series.curve(name, scale), colour)}, x="step", y=y, low=0), _averaged(series)


def spread_chart(series: Series) -> tuple[Options, str]:
    """Mean reward with a standard deviation each way."""
    if not series.buckets:
        return {}, _NO_ROWS
    middle, spread = series.curve("reward_mean"), series.curve("reward_std")
    sides = [
        [(x, None if y is None or s is None else y + sign * s) for (x, y), (_, s) in zip(middle, spread, strict=True)]
        for sign in (-1, 1)
    ]
    names = ("mean reward", "± 1 standard deviation")
    return charts.band(middle, *sides, names=names, x="step", y="reward", colour=BLUE), _averaged(series)


def length_chart(series: Series) -> tuple[Options, str]:
    """Mean and largest length."""
    if not series.buckets:
        return {}, _NO_ROWS
    curves = {"mean": (series.curve("length_mean"), BLUE), "longest": (series.curve("length_max"), ORANGE)}
    return charts.lines(curves, x="step", y="tokens", low=0), _averaged(series)


def _averaged(series: Series) -> str:
    return f"Each point is the mean of {series.width} steps." if series.width > 1 else ""


def _or_dash(value: float | None, form: str) -> str:
    """The number in this form; `{}` alone means few digits."""
    if value is None:
        return "-"
    return form.format(short(value)) if "{}" in form else form.format(value)

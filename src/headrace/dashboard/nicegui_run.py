"""One run: a view for each question about it, its trajectories, and one of them token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from nicegui import ui

from headrace.dashboard import books, charts
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.charts import Curve, Options
from headrace.dashboard.site import Site, address
from headrace.insight.reports import triage_report
from headrace.insight.triage import Triage
from headrace.ledger.ledger import Books
from headrace.runs import show
from headrace.runs.report import Section, printable
from headrace.runs.show import Token, TokenTexts, TrajectoryDetails

TIMELINE_STEPS = (3, 10, 30)
ANY = "any"
TOKENS_SHOWN = 400  # at once
MOST_PROMPT_TOKENS = 4000  # of a prompt's text


class RunViews:
    """What is on the views of one run: each is a method that makes its panels."""

    def __init__(self, site: Site, name: str, steps: int) -> None:
        self._name, self._live, self._price = name, site.run(name), site.dollars_per_hour
        self._steps = min(max(steps, 1), TIMELINE_STEPS[-1])

    def _curve(self, curve: Curve) -> page.Panel:
        return page.chart_panel(curve.title, curve.says, lambda: curve.drawn(self._live.series()))

    def _pair(self, *curves: Curve) -> list[page.Panel]:
        with ui.element("div").classes("pair"):
            return [self._curve(curve) for curve in curves]

    def overview(self) -> list[page.Panel]:
        panels = [page.panel(self._numbers, page.numbers), self._curve(charts.REWARD)]
        says = (
            "What holds a step back most, and what each change would bring. A prediction, not a promise: "
            "change one thing, and look again."
        )
        with page.card("What to change first", says):
            panels.append(page.panel(self._live.triage, _verdict))
            ui.link("Try other stage times on the plan page", address("plan", run=self._name))
        return panels + self._pair(charts.GOODPUT, charts.STAGE_TIMES)

    def _numbers(self) -> list[tuple[str, str, str]]:
        live = self._live
        return live.overview(self._price).numbers(live.wanted_lag(), live.triage())

    def timeline(self) -> list[page.Panel]:
        here = partial(address, "run", self._name, "timeline")
        page.views((f"last {n} steps", here(steps=n), n == self._steps) for n in TIMELINE_STEPS)
        says = (
            "A lane for each stage. Bars above each other ran at the same time; white space in a lane is a "
            "stage that waited. Stages that never overlap take turns, and a step takes the sum of them. Shift "
            "and the wheel zoom."
        )
        return [page.chart_panel("What was busy when", says, self._timeline, height_px=380)]

    def _timeline(self) -> tuple[Options, str]:
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

    def _flow(self) -> tuple[Options, str]:
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
        return [chart, self._curve(charts.RATIO), self._curve(charts.WEIGHTS)]

    def _lags(self) -> tuple[Options, str]:
        shares, allowed = self._live.lag_shares(), self._live.wanted_lag()
        if not shares.tokens:
            return {}, "Nothing has been trained on yet."
        text = "" if allowed is None else f"loop.max_lag = {allowed}: older tokens are dropped as stale."
        return charts.lag_bars(shares, self._live.series().last_step), text

    def publish(self) -> list[page.Panel]:
        return [self._curve(charts.LATENCY), self._curve(charts.BYTES)]

    def rewards(self) -> list[page.Panel]:
        says = "How often each reward was given. Training moves the bars to the right."
        chart = page.chart_panel("Rewards at the start and now", says, self._rewards)
        return [chart, *self._pair(charts.SPREAD, charts.LENGTHS)]

    def _rewards(self) -> tuple[Options, str]:
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


async def trajectories(
    site: Site,
    name: str,
    state: str | None = None,
    reason: str | None = None,
    step: int | None = None,
    older: int | None = None,
    newer: int | None = None,
) -> None:
    path = site.run(name).path
    wanted = books.Wanted(state=state, reason=reason, step=step, older_than=older, newer_than=newer)

    def there(**changes: Any) -> str:
        kept = {"state": state, "reason": reason, "step": step}
        return address("run", name, "trajectories", **kept | changes)

    def draw(read: tuple[Books, books.Page]) -> None:
        held, found = read
        says = "Every answer that was finished or dropped. Choose one to read it."
        with page.card("Answers, the newest first", says):
            _filters(wanted, list(held.dropped), there)
        listing = page.Listing(
            columns=books.PAGE_COLUMNS,
            rows=found.rows,
            numeric={1, 2, 4, 5},
            links=[address("run", name, "trajectory", id=row[0]) for row in found.rows],
            wide={4, 5, 6},
            instead="No answer is like this." if wanted != books.Wanted() else "No answer is finished yet.",
        )
        with page.card():
            page.Grid().show(listing)
            with ui.element("div").classes("line"):
                if found.places and found.has_newer:
                    ui.link("← newer", there(newer=found.places[0]))
                if found.places and found.has_older:
                    ui.link("older →", there(older=found.places[-1]))

    with page.frame(name):
        page.run_views(name, "trajectories")
        shown = page.panel(lambda: (books.read_accounts(path), books.read_page(path, wanted)), draw)
        await shown.refresh()  # not followed: a list that moves is hard to click


def _filters(wanted: books.Wanted, reasons: list[str], there: Any) -> None:
    def go(state: str | None = wanted.state, reason: str | None = wanted.reason, **step: int | None) -> None:
        state, reason = (None if chosen == ANY else chosen for chosen in (state, reason))
        ui.navigate.to(there(state=state, reason=reason if state == "dropped" else None, **step))

    def in_step() -> None:
        go(step=None if number.value is None else int(number.value))

    with ui.element("div").classes("line"):
        states = [ANY, "trained", "dropped", "buffered"]
        page.choice(states, wanted.state or ANY, "state", lambda chosen: go(state=chosen))
        if reasons:
            because = [ANY, *reasons]
            page.choice(because, wanted.reason or ANY, "dropped because", lambda chosen: go("dropped", chosen))
        number = ui.number("trained in step", value=wanted.step, min=1, precision=0).classes("field")
        number.props("outlined dense clearable")
        number.on("keydown.enter", in_step)
        number.on("clear", lambda: go(step=None))
        ui.button("Show", on_click=in_step).props("outline no-caps")


async def trajectory(site: Site, name: str, id: str, start: int = 0) -> None:
    path = site.run(name).path

    with page.frame(f"Answer {id}", f"of run {name}"):
        page.run_views(name, "trajectories")
        draw = partial(_answer, name, start)
        await page.panel(lambda: books.read_answer(path, id), draw).refresh()


def _answer(name: str, start: int, read: tuple[TrajectoryDetails, TokenTexts | None]) -> None:
    found, texts = read
    with page.card("What became of it"):
        page.facts(show.trajectory_facts(found).items())
    if found.whole is None:
        with page.card("Tokens"):
            page.message(show.why_no_tokens(found))
        return
    given = show.prompt_ids(found.whole)[-MOST_PROMPT_TOKENS:]
    prompt = texts.text(given) if texts else " ".join(map(str, given))
    with page.card("Prompt", "What the policy was given."):
        ui.label(printable(prompt)).classes("written")
    with page.card("Answer", "What it wrote."):
        ui.label(printable(found.whole.text)).classes("written")
    num_tokens = len(found.whole.token_ids)
    start = min(max(start, 0), max(num_tokens - 1, 0)) // TOKENS_SHOWN * TOKENS_SHOWN
    shown = list(show.tokens(found.whole, texts, start, TOKENS_SHOWN))
    says = (
        "Dotted tokens were given to the policy: they are masked out of training. The stronger the colour, the "
        "less likely the policy found the token that it chose. A small v7 marks where policy version 7 goes on."
    )
    with page.card("Token by token", says):
        if num_tokens > TOKENS_SHOWN:
            here, pieces = partial(address, "run", name, "trajectory", id=found.id), []
            for first in range(0, num_tokens, TOKENS_SHOWN):
                last = min(first + TOKENS_SHOWN, num_tokens) - 1
                pieces.append((f"{first}-{last}", here(start=first), first == start))
            page.views(pieces)
        if texts is None:
            page.message("The run's tokenizer cannot be read, so tokens are shown as their ids.")
        _in_reading_order(shown)
    with page.card("The same as a table"):
        cells = [_cells(token) for token in shown]
        page.Grid().show(page.Listing.of(cells, numeric={0, 2, 3, 4, 5}, wide={2, 6}))


def _in_reading_order(shown: Sequence[Token]) -> None:
    """The surer the policy was, the paler; what it did not write is grey."""
    version = None
    with ui.element("div").classes("tokens"):
        for token in shown:
            if token.version is not None and token.version != version:
                version = token.version
                ui.label(f"v{version}").classes("version")
            text = printable(token.text).replace("\n", "⏎\n").replace("\t", "⇥\t") or "∅"
            label = ui.label(text).classes("token")
            if token.probability is None:
                label.classes("given").props["title"] = f"token {token.position}: given"
            else:
                label.style(f"--surprise: {0.75 * (1.0 - token.probability):.3f}")
                odds = f"log-prob {token.logprob:.3f}, version {token.version}"
                label.props["title"] = f"token {token.position}, id {token.id}: {odds}"


def _cells(token: Token) -> dict[str, str]:
    return {
        "place": str(token.position),
        "token": repr(token.text),
        "id": str(token.id),
        "log-prob": "" if token.logprob is None else f"{token.logprob:.3f}",
        "probability": "" if token.probability is None else f"{token.probability:.1%}",
        "version": "" if token.version is None else str(token.version),
        "mask": "given" if token.logprob is None else "sampled",
    }

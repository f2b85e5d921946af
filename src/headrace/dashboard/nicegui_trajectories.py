"""The trajectories of a run, page by page, and one of them token by token."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard.answers import TOKENS_SHOWN, Answer, read_answer
from headrace.dashboard.books import Page, Wanted, read_accounts, read_page
from headrace.dashboard.nicegui_elements import Grid, Listing, facts
from headrace.dashboard.nicegui_frame import card, frame, message, run_views, views
from headrace.dashboard.site import Site, address
from headrace.errors import HeadraceError
from headrace.runs.report import Table, printable
from headrace.runs.tables import Token

ANY = "any"


async def trajectories(
    site: Site,
    name: str,
    state: str | None = None,
    reason: str | None = None,
    step: int | None = None,
    older: int | None = None,
    newer: int | None = None,
) -> None:
    """A page of the list."""
    live = site.run(name)
    wanted = Wanted(state=state, reason=reason, step=step, older_than=older, newer_than=newer)
    with frame(name):
        run_views(name, "trajectories")
        try:
            books = await threads.io_bound(read_accounts, live.path)
            page = await threads.io_bound(read_page, live.path, wanted)
        except HeadraceError as error:
            message(str(error))
            return
        with card("Answers, the newest first", "Every answer that was finished or dropped. Choose one to read it."):
            _filters(name, wanted, list(books.dropped))
        with card():  # not followed: a list that moves is hard to click
            Grid(page_listing(name, wanted, page))
            _neighbours(name, wanted, page)


async def trajectory(site: Site, name: str, id: str, start: int = 0) -> None:
    """One answer."""
    live = site.run(name)
    with frame(f"Answer {id}", f"of run {name}"):
        run_views(name, "trajectories")
        try:
            answer = await threads.io_bound(read_answer, live.path, id, start)
        except HeadraceError as error:
            message(str(error))
            return
        with card("What became of it"):
            facts(answer.facts.items())
        if answer.prompt is None:
            with card("Tokens"):
                message(answer.why_no_tokens)
            return
        with card("Prompt", "What the policy was given."):
            _text(answer.prompt)
        with card("Answer", "What it wrote."):
            _text(answer.text)
        _tokens(name, id, answer)


def page_listing(name: str, wanted: Wanted, page: Page) -> Listing:
    """The lines of a page."""
    rows = [
        (
            line.id,
            "-" if line.reward is None else f"{line.reward:g}",
            f"{line.num_tokens:,}",
            f"dropped: {line.drop_reason}" if line.state == "dropped" else line.state,
            "" if line.trained_step is None else str(line.trained_step),
            "" if line.lag is None else str(line.lag),
            line.finish or "-",
        )
        for line in page.lines
    ]
    columns = ("answer", "reward", "tokens", "fate", "step", "lag", "ended by")
    return Listing(
        table=Table(columns=columns, rows=tuple(rows), numeric=frozenset({1, 2, 4, 5})),
        links=tuple(address("run", name, "trajectory", id=line.id) for line in page.lines),
        wide=frozenset({4, 5, 6}),
        instead="No answer is like this." if wanted != Wanted() else "No answer is finished yet.",
    )


def _neighbours(name: str, wanted: Wanted, page: Page) -> None:
    """Links to the pages beside this one."""
    kept = {"state": wanted.state, "reason": wanted.reason, "step": wanted.step}
    with ui.element("div").classes("line"):
        if page.lines and page.has_newer:
            ui.link("← newer", address("run", name, "trajectories", **kept, newer=page.lines[0].rowid))
        if page.lines and page.has_older:
            ui.link("older →", address("run", name, "trajectories", **kept, older=page.lines[-1].rowid))


def _filters(name: str, wanted: Wanted, reasons: list[str]) -> None:
    def go(**changes: object) -> None:
        given: dict[str, object] = {"state": wanted.state, "reason": wanted.reason, "step": wanted.step} | changes
        if given["state"] != "dropped":
            given["reason"] = None
        ui.navigate.to(address("run", name, "trajectories", **given))

    def chosen(value: str) -> str | None:
        return None if value == ANY else value

    with ui.element("div").classes("line"):
        states = [ANY, "trained", "dropped", "buffered"]
        ui.select(
            states,
            value=wanted.state if wanted.state in states else ANY,
            label="state",
            on_change=lambda event: go(state=chosen(event.value)),
        ).classes("field").props("outlined dense options-dense")
        if reasons:
            ui.select(
                [ANY, *reasons],
                value=wanted.reason if wanted.reason in reasons else ANY,
                label="dropped because",
                on_change=lambda event: go(state="dropped", reason=chosen(event.value)),
            ).classes("field").props("outlined dense options-dense")
        number = ui.number("trained in step", value=wanted.step, min=1, precision=0).classes("field")
        number.props("outlined dense clearable")
        number.on("keydown.enter", lambda: go(step=None if number.value is None else int(number.value)))
        number.on("clear", lambda: go(step=None))
        ui.button("Show", on_click=lambda: go(step=None if number.value is None else int(number.value))).props(
            "outline no-caps"
        )


def _tokens(name: str, id: str, answer: Answer) -> None:
    with card(
        "Token by token",
        "Dotted tokens were given to the policy: they are masked out of training. The stronger the colour, the less "
        "likely the policy found the token that it chose. A small v7 marks where policy version 7 goes on.",
    ):
        if answer.num_tokens > TOKENS_SHOWN:
            starts = range(0, answer.num_tokens, TOKENS_SHOWN)
            views(
                [
                    (
                        f"{first}-{min(first + TOKENS_SHOWN, answer.num_tokens) - 1}",
                        address("run", name, "trajectory", id=id, start=first),
                        first == answer.start,
                    )
                    for first in starts
                ]
            )
        if answer.as_ids:
            message("The run's tokenizer cannot be read, so tokens are shown as their ids.")
        _in_reading_order(answer.tokens)
    with card("The same as a table"):
        Grid(token_listing(answer.tokens))


def _in_reading_order(tokens: Sequence[Token]) -> None:
    """The surer the policy was, the paler; what it did not write is grey."""
    version = None
    with ui.element("div").classes("tokens"):
        for token in tokens:
            if token.version is not None and token.version != version:
                version = token.version
                ui.label(f"v{version}").classes("version")
            text = printable(token.text).replace("\n", "⏎\n").replace("\t", "⇥\t") or "∅"
            shown = ui.label(text).classes("token")
            if token.probability is None:
                shown.classes("given").props["title"] = f"token {token.position}: given"
            else:
                shown.style(f"--surprise: {0.75 * (1.0 - token.probability):.3f}")
                odds = f"log-prob {token.logprob:.3f}, version {token.version}"
                shown.props["title"] = f"token {token.position}, id {token.id}: {odds}"


def token_listing(tokens: Sequence[Token]) -> Listing:
    """The same, one token to a line."""
    rows = [
        (
            str(token.position),
            repr(token.text),
            str(token.id),
            "" if token.logprob is None else f"{token.logprob:.3f}",
            "" if token.probability is None else f"{token.probability:.1%}",
            "" if token.version is None else str(token.version),
            "given" if token.logprob is None else "sampled",
        )
        for token in tokens
    ]
    columns = ("place", "token", "id", "log-prob", "probability", "version", "mask")
    table = Table(columns=columns, rows=tuple(rows), numeric=frozenset({0, 2, 3, 4, 5}))
    return Listing(table=table, wide=frozenset({2, 6}))


def _text(text: str) -> None:
    """As it was written, spaces and lines too."""
    ui.label(printable(text)).classes("written")

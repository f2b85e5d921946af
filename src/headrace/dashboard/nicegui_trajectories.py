"""The trajectories of a run, page by page, and one of them token by token."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import ui

from headrace.dashboard.books import PAGE_COLUMNS, Page, Wanted, read_accounts, read_answer, read_page
from headrace.dashboard.nicegui_elements import Grid, Listing, choice, facts, panel
from headrace.dashboard.nicegui_frame import card, frame, message, run_views, views
from headrace.dashboard.site import Site, address
from headrace.ledger.ledger import Books
from headrace.runs.report import Table, printable
from headrace.runs.show import TokenTexts, TrajectoryDetails
from headrace.runs.tables import Token, prompt_ids, tokens, trajectory_facts, why_no_tokens

ANY = "any"
TOKENS_SHOWN = 400  # at once
MOST_PROMPT_TOKENS = 4000  # of a prompt's text


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
    wanted = Wanted(state=state, reason=reason, step=step, older_than=older, newer_than=newer)

    def draw(found: tuple[Books, Page]) -> None:
        books, page = found
        with card("Answers, the newest first", "Every answer that was finished or dropped. Choose one to read it."):
            _filters(name, wanted, list(books.dropped))
        with card():
            Grid(page_listing(name, wanted, page))
            _neighbours(name, wanted, page)

    with frame(name):
        run_views(name, "trajectories")
        shown = panel(lambda: (read_accounts(path), read_page(path, wanted)), draw)
        await shown.refresh()  # not followed: a list that moves is hard to click


async def trajectory(site: Site, name: str, id: str, start: int = 0) -> None:
    path = site.run(name).path

    def draw(found: tuple[TrajectoryDetails, TokenTexts | None]) -> None:
        _answer(name, *found, start)

    with frame(f"Answer {id}", f"of run {name}"):
        run_views(name, "trajectories")
        await panel(lambda: read_answer(path, id), draw).refresh()


def _answer(name: str, found: TrajectoryDetails, texts: TokenTexts | None, start: int) -> None:
    with card("What became of it"):
        facts(trajectory_facts(found).items())
    if found.whole is None:
        with card("Tokens"):
            message(why_no_tokens(found))
        return
    given = prompt_ids(found.whole)[-MOST_PROMPT_TOKENS:]
    prompt = texts.text(given) if texts else " ".join(map(str, given))
    for title, says, text in (
        ("Prompt", "What the policy was given.", prompt),
        ("Answer", "What it wrote.", found.whole.text),
    ):
        with card(title, says):
            ui.label(printable(text)).classes("written")
    num_tokens = len(found.whole.token_ids)
    start = min(max(start, 0), max(num_tokens - 1, 0)) // TOKENS_SHOWN * TOKENS_SHOWN
    shown = list(tokens(found.whole, texts, start, TOKENS_SHOWN))
    with card(
        "Token by token",
        "Dotted tokens were given to the policy: they are masked out of training. The stronger the colour, the less "
        "likely the policy found the token that it chose. A small v7 marks where policy version 7 goes on.",
    ):
        if num_tokens > TOKENS_SHOWN:
            links = []
            for first in range(0, num_tokens, TOKENS_SHOWN):
                there = address("run", name, "trajectory", id=found.id, start=first)
                links.append((f"{first}-{min(first + TOKENS_SHOWN, num_tokens) - 1}", there, first == start))
            views(links)
        if texts is None:
            message("The run's tokenizer cannot be read, so tokens are shown as their ids.")
        _in_reading_order(shown)
    with card("The same as a table"):
        Grid(token_listing(shown))


def page_listing(name: str, wanted: Wanted, page: Page) -> Listing:
    return Listing(
        table=Table(columns=PAGE_COLUMNS, rows=tuple(page.rows), numeric=frozenset({1, 2, 4, 5})),
        links=tuple(address("run", name, "trajectory", id=row[0]) for row in page.rows),
        wide=frozenset({4, 5, 6}),
        instead="No answer is like this." if wanted != Wanted() else "No answer is finished yet.",
    )


def _neighbours(name: str, wanted: Wanted, page: Page) -> None:
    kept = {"state": wanted.state, "reason": wanted.reason, "step": wanted.step}
    with ui.element("div").classes("line"):
        if page.places and page.has_newer:
            ui.link("← newer", address("run", name, "trajectories", **kept, newer=page.places[0]))
        if page.places and page.has_older:
            ui.link("older →", address("run", name, "trajectories", **kept, older=page.places[-1]))


def _filters(name: str, wanted: Wanted, reasons: list[str]) -> None:
    def go(**changes: object) -> None:
        given: dict[str, object] = {"state": wanted.state, "reason": wanted.reason, "step": wanted.step} | changes
        if given["state"] != "dropped":
            given["reason"] = None
        ui.navigate.to(address("run", name, "trajectories", **given))

    states = [ANY, "trained", "dropped", "buffered"]
    with ui.element("div").classes("line"):
        choice(states, wanted.state or ANY, "state", lambda chosen: go(state=None if chosen == ANY else chosen))
        if reasons:

            def because(chosen: str) -> None:
                go(state="dropped", reason=None if chosen == ANY else chosen)

            choice([ANY, *reasons], wanted.reason or ANY, "dropped because", because)
        number = ui.number("trained in step", value=wanted.step, min=1, precision=0).classes("field")
        number.props("outlined dense clearable")

        def in_step() -> None:
            go(step=None if number.value is None else int(number.value))

        number.on("keydown.enter", in_step)
        number.on("clear", lambda: go(step=None))
        ui.button("Show", on_click=in_step).props("outline no-caps")


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


def token_listing(shown: Sequence[Token]) -> Listing:
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
        for token in shown
    ]
    columns = ("place", "token", "id", "log-prob", "probability", "version", "mask")
    table = Table(columns=columns, rows=tuple(rows), numeric=frozenset({0, 2, 3, 4, 5}))
    return Listing(table=table, wide=frozenset({2, 6}))

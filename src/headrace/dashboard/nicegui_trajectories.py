"""The trajectories of a run, page by page, and one of them token by token."""

from __future__ import annotations

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard.answers import TOKENS_SHOWN, Answer, read_answer
from headrace.dashboard.books import Page, Wanted, read_flows, read_page
from headrace.dashboard.markup import Link, address, facts, line_of, table, text_block, token_table, tokens
from headrace.dashboard.nicegui_frame import card, frame, html_panel, message, plain_html, run_views, views
from headrace.dashboard.site import Site
from headrace.errors import HeadraceError

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
            flows = await threads.io_bound(read_flows, live.path)
        except HeadraceError as error:
            message(str(error))
            return
        reasons = [flow.name.removeprefix("dropped: ") for flow in flows if flow.kind == "dropped"]
        with card("Answers, the newest first", "Every answer that was finished or dropped. Choose one to read it."):
            _filters(name, wanted, reasons)
        panel = html_panel("", "", lambda: page_table(name, wanted, read_page(live.path, wanted)))
        await panel.refresh()  # not followed: a list that moves is hard to click


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
            plain_html(facts(answer.facts))
        if answer.prompt is None:
            with card("Tokens"):
                message(answer.why_no_tokens)
            return
        with card("Prompt", "What the policy was given."):
            plain_html(text_block(answer.prompt))
        with card("Answer", "What it wrote."):
            plain_html(text_block(answer.text))
        _tokens(name, id, answer)


def page_table(name: str, wanted: Wanted, page: Page) -> str:
    """The lines of a page, and links to the pages beside it."""
    if not page.lines:
        return "No answer is like this." if wanted != Wanted() else "No answer is finished yet."
    titles = ("answer", "reward", "tokens", "fate", "step", "lag", "ended by")
    rows = [
        (
            Link(line.id, address("run", name, "trajectory", id=line.id)),
            "-" if line.reward is None else f"{line.reward:g}",
            f"{line.num_tokens:,}",
            f"dropped: {line.drop_reason}" if line.state == "dropped" else line.state,
            "" if line.trained_step is None else str(line.trained_step),
            "" if line.lag is None else str(line.lag),
            line.finish or "-",
        )
        for line in page.lines
    ]
    kept = {"state": wanted.state, "reason": wanted.reason, "step": wanted.step}
    links = []
    if page.has_newer:
        links.append(Link("← newer", address("run", name, "trajectories", **kept, newer=page.lines[0].rowid)))
    if page.has_older:
        links.append(Link("older →", address("run", name, "trajectories", **kept, older=page.lines[-1].rowid)))
    listed = table(titles, rows, numbers=("reward", "tokens", "step", "lag"), wide=titles[4:])
    return listed + line_of(links)


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
        plain_html(tokens(answer.tokens))
    with card("The same as a table"):
        plain_html(token_table(answer.tokens))

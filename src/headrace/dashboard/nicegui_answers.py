"""A run's answers: the list, one of them token by token, and all answers to one prompt side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from nicegui import run as threads
from nicegui import ui

from headrace.dashboard import answers
from headrace.dashboard import nicegui_elements as page
from headrace.dashboard.answers import EVERY, PAGE_COLUMNS, Answer, Page, Wanted, number
from headrace.dashboard.books import read_accounts
from headrace.dashboard.charts import CARDS
from headrace.dashboard.site import Site, address
from headrace.ledger.ledger import Books
from headrace.runs import show
from headrace.runs.facts import UnknownNameError
from headrace.runs.report import printable
from headrace.runs.show import Token

ANY = "any"
TOKENS_SHOWN = 400  # at once


def _query() -> Any:
    return ui.context.client.request.query_params


async def trajectories(site: Site, name: str) -> None:
    path, wanted = site.run(name).path, Wanted.of(_query())
    older, newer = number(_query(), "older"), number(_query(), "newer")

    def there(**changes: Any) -> str:
        return address("run", name, "trajectories", **asdict(wanted) | changes)

    def draw(read: tuple[Books, Page]) -> None:
        held, found = read
        with page.card(CARDS["answers"]):
            _filters(wanted, list(held.dropped), there)
        listing = page.Listing(
            columns=PAGE_COLUMNS,
            rows=found.rows,
            numeric={1, 2, 4, 5},
            links=[address("run", name, "trajectory", id=row[0], **asdict(wanted)) for row in found.rows],
            wide={2, 4, 5, 6},
            instead="No answer is like this." if wanted != EVERY else "No answer is finished yet.",
        )
        with page.card():
            page.Grid().show(listing)
            if found.places:
                newer = there(newer=found.places[0]) if found.has_newer else None
                older = there(older=found.places[-1]) if found.has_older else None
                _links({"← newer": newer, "older →": older})

    with page.frame(name):
        page.run_views(name, "trajectories")
        shown = page.panel(
            lambda: (read_accounts(path), answers.read_page(path, wanted, older=older, newer=newer)), draw
        )
        await shown.refresh()  # not followed: a list that moves is hard to click


def _filters(wanted: Wanted, reasons: list[str], there: Any) -> None:
    def go(state: str | None = wanted.state, reason: str | None = wanted.reason) -> None:
        state, reason = (None if chosen == ANY else chosen for chosen in (state, reason))
        typed = {name: field.value for name, field in numbers.items()}
        typed["step"] = None if typed["step"] is None else int(typed["step"])
        ui.navigate.to(there(state=state, reason=reason if state == "dropped" else None, **typed))

    with ui.element("div").classes("line"):
        states = [ANY, "trained", "dropped", "buffered"]
        page.choice(states, wanted.state or ANY, "state", lambda event: go(event.value))
        if reasons:
            because = [ANY, *reasons]
            page.choice(because, wanted.reason or ANY, "dropped because", lambda event: go("dropped", event.value))
        labels = {"step": "trained in step", "least": "reward from", "most": "reward to"}
        numbers = {}
        for name, label in labels.items():
            field = ui.number(label, value=getattr(wanted, name)).classes("field")
            numbers[name] = field.props("outlined dense clearable").on("keydown.enter", lambda: go())
        ui.button("Show", on_click=lambda: go()).props("outline no-caps")


async def trajectory(site: Site, name: str) -> None:
    path, wanted, start = site.run(name).path, Wanted.of(_query()), number(_query(), "start") or 0
    id = _query().get("id")
    if not id:
        raise UnknownNameError("The address names no answer: it ends with trajectory?id=... of one.")
    read = await threads.io_bound(answers.read_answer, path, id, wanted)
    with page.frame(f"Answer {id}", f"of run {name}"):
        page.run_views(name, "trajectories")
        here = partial(address, "run", name, "trajectory", **asdict(wanted))
        links = {"← newer answer": read.newer, "older answer →": read.older}
        links = {text: id and here(id=id) for text, id in links.items()}
        if read.found.serial is not None:
            links["all answers to this prompt"] = address("run", name, "group", serial=read.found.serial)
        _links(links)
        _answer(read, start, partial(here, id=id))


def _answer(read: Answer, start: int, here: Any) -> None:
    found, texts = read.found, read.texts
    with page.card("What became of it"):
        page.facts(show.trajectory_facts(found).items())
    _prompt(read.prompt, read.fields)
    if found.whole is None:
        with page.card("Answer"):
            page.message(show.why_no_tokens(found))
        return
    for title, text in show.said(found.whole).items():
        with page.card(CARDS.get(title, title.capitalize())):
            ui.label(printable(text)).classes("written")
    for title, text in show.verdict_texts(found.whole).items():
        with page.card(title.capitalize()):
            ui.label(printable(text)).classes("written")
    num_tokens = len(found.whole.token_ids)
    start = min(max(start, 0), max(num_tokens - 1, 0)) // TOKENS_SHOWN * TOKENS_SHOWN
    shown = list(show.tokens(found.whole, texts, start, TOKENS_SHOWN))
    with page.card(CARDS["answer_tokens"]):
        if num_tokens > TOKENS_SHOWN:
            pieces = []
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


def _prompt(text: str | None, fields: Mapping[str, str]) -> None:
    with page.card(CARDS["prompt"]):
        ui.label(printable(text) if text else "(not kept)").classes("written")
        page.facts(fields.items())


def _links(found: Mapping[str, str | None]) -> None:
    with ui.element("div").classes("line"):
        for text, target in found.items():
            if target:
                ui.link(text, target)


async def group(site: Site, name: str) -> None:
    path, serial = site.run(name).path, number(_query(), "serial")
    if serial is None:
        raise UnknownNameError("The address names no group: it ends with group?serial=... of one.")
    read = await threads.io_bound(answers.read_group, path, serial)
    with page.frame(f"All answers to {read.prompt_id}", f"group {serial} of run {name}"):
        page.run_views(name, "trajectories")
        sides = {"← newer group": read.newer, "older group →": read.older}.items()
        _links({text: address("run", name, "group", serial=other) for text, other in sides if other is not None})
        _prompt(read.prompt, read.fields)
        with ui.element("div").classes("answers"):
            for id, facts, text in read.answers:
                with page.card():
                    ui.link(printable(id), address("run", name, "trajectory", id=id)).classes("part")
                    page.facts(facts.items())
                    ui.label(printable(text) if text is not None else "(text not kept)").classes("written")


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

"""What pages are made of: frame, cards, tables, reports, charts, and panels that follow the ledger.

Texts are given to NiceGUI's own elements, which escape them: a policy may write anything.
"""

import asyncio
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nicegui import app, run, ui

from headrace.dashboard.books import AXES
from headrace.dashboard.charts import HERE, THEME, Card, Drawn, Look
from headrace.dashboard.site import address
from headrace.errors import HeadraceError
from headrace.runs.report import Report, Section, Table, printable

# Of a run.
VIEWS = ("overview", "curves", "settings", "timeline", "tokens", "lag", "publish", "rewards", "trajectories")
EVERY_S = 2.0  # a look into the ledger
SETTLED_S = 0.25  # without another change: nobody types or drags any more
_FILES = ("style.css", "page.js", "header.html", "icon.svg", "cells.toml")
STYLE, SCRIPT, HEADER, ICON, _TEMPLATES = (HERE.with_name(name).read_text(encoding="utf-8") for name in _FILES)
_CELLS = tomllib.loads(_TEMPLATES)
MANY_ROWS = 120  # of which only those are drawn that can be seen


@contextmanager
def frame(title: str, small: str = "", *, run: str = "", view: str = "trajectories") -> Iterator[None]:
    """A page; if it is about a `run`, with links to its views, of which this one is `view`."""
    chosen = ui.context.client.request.cookies.get("headrace_theme")  # light or dark, if either
    ui.dark_mode({"dark": True, "light": False}.get(chosen))
    ui.colors(primary="#1f78b4")
    ui.page_title(f"{title} · Headrace")
    ui.add_head_html(f"<style>{STYLE}</style><script>{SCRIPT}</script>")
    ui.html(HEADER, sanitize=False, tag="header").classes("top")
    with ui.element("div").classes("page"):
        with ui.element("h1"):
            ui.label(printable(title))
            ui.label(small).classes("says")
        if run:
            views((one.capitalize(), address("run", run, one), one == view) for one in VIEWS)
        yield


def views(links: Iterable[tuple[str, str, bool]]) -> None:
    """Links to the views of one thing: name, address, and whether it is this one."""
    with ui.element("nav").classes("views"):
        for name, target, here in links:
            ui.link(name, target).classes("here" if here else "")


@contextmanager
def card(words: Card | str = "") -> Iterator[None]:
    words = Card(title=words) if isinstance(words, str) else words
    with ui.element("section").classes("card"):
        if words.title:
            _within("h2", words.title)
        ui.label(words.says).classes("says")
        yield


def query() -> Any:
    return ui.context.client.request.query_params


def message(text: str) -> Any:
    return ui.label(printable(text)).classes("message").props("role=status")


def choice(options: Any, value: Any, label: str, on_change: Callable[..., Any] | None = None) -> Any:
    chosen = ui.select(options, value=value if value in options else None, label=label, on_change=on_change)
    return chosen.classes("field").props("outlined dense options-dense")


class Panel:
    """Something on the page that is read again and again. If it cannot be read, it says why.

    `read` runs in a thread; `show` puts what it found on the page. Without it, `box` is hidden.
    """

    def __init__(self, read: Callable[[], Any], show: Callable[[Any], None], box: Any = None) -> None:
        self._read, self._show, self._box = read, show, box
        self._found: Any = None
        self._changes, self._one_at_a_time = 0, asyncio.Lock()
        self.message = message("")
        _panels().append(self)

    async def refresh(self) -> None:
        found, problem = None, ""
        try:
            found = await run.io_bound(self._read)
        except HeadraceError as error:
            problem = printable(str(error))
        if problem != self.message.text:
            self.message.set_text(problem)
            self.message.set_visibility(True)
        if self._box is not None:
            self._box.set_visibility(not problem)
        if found is not None and found != self._found:  # None: nobody looks at the page any more
            self._found = found
            self._show(found)

    async def changed(self) -> bool:
        """Look again, a moment after the last of several changes; whether this was the last."""
        self._changes += 1
        mine = self._changes
        await asyncio.sleep(SETTLED_S)
        async with self._one_at_a_time:
            if mine == self._changes:
                await self.refresh()
        return mine == self._changes


def _panels() -> Any:
    """All panels of the page that is being made, or looked at."""
    return app.storage.client.setdefault("panels", [])


async def follow() -> None:
    """Fill the panels of this page now, and keep them up to date while it is open."""
    panels = _panels()

    async def refresh() -> None:
        await asyncio.gather(*(panel.refresh() for panel in panels))
        said: set[str] = set()
        for panel in panels:  # what one says, others need not say again
            panel.message.set_visibility(panel.message.text not in said)
            said.add(panel.message.text)

    await refresh()
    ui.timer(EVERY_S, refresh, immediate=False)


def facts(pairs: Collection[tuple[str, str]]) -> None:
    """Names and what they are; beside each other also on a narrow screen, if they are short."""
    short = all(len(name + text) < 30 for name, text in pairs)
    with ui.element("dl").classes("short" if short else ""):
        for name, text in pairs:
            _within("dt", name)
            _within("dd", text)


def _within(tag: str, text: str) -> None:
    with ui.element(tag):
        ui.label(printable(text))


def numbers(shown: Iterable[tuple[str, str, str]]) -> None:
    with ui.element("div").classes("numbers"):
        for name, value, says in shown:
            with ui.element("section").classes("card"):
                ui.label(name).classes("name")
                ui.label(value).classes("value long" if len(value) > 9 else "value")
                ui.label(says).classes("says")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Table):
    """A table on the page: where a row's first cell leads, columns that are not for a phone."""

    links: Sequence[str] = ()
    wide: Collection[int] = ()
    kinds: Mapping[int, str] = field(default_factory=dict)  # columns whose cells are in _CELLS
    sort_by: Mapping[int, Sequence[float | None]] = field(default_factory=dict)  # numbers, where not the text
    stacked: bool = False  # on a phone: the cells of a row below each other
    below: Section | None = None
    instead: str = ""  # of a table without rows


class Grid:
    """A table whose rows may change; what a reader sorted it by and searched for stays."""

    def __init__(self, search: str = "") -> None:
        if search:
            text = ui.input(search).classes("search").props("outlined dense clearable debounce=200")
            text.on_value_change(lambda event: self._table.set_filter(event.value or ""))
        self._table: Any = ui.table(rows=[], columns=[])
        self._table.props("flat dense wrap-cells virtual-scroll-target=body")
        self._table.props("hide-selected-banner no-results-label='Nothing here is like that.'")
        self._table.add_slot("body-cell-0", _CELLS["link"])
        self._table.set_visibility(False)
        self._instead, self._below = ui.label(""), ui.element("div")

    def show(self, shown: Listing) -> None:
        columns = []
        for place, title in enumerate(shown.columns):
            numeric = place in shown.numeric
            kind = "number " * numeric + "wide " * (place in shown.wide) + "kind" * (place in shown.kinds)
            column = {"name": str(place), "field": str(place), "label": printable(title)}
            column |= {"classes": kind, "headerClasses": kind, "align": "right" if numeric else "left"}
            order = f"(a, b, x, y) => inOrder(a, b, x.by{place}, y.by{place})"
            columns.append(column | {"sortable": len(shown.rows) > 1, ":sort": order})
        self._table.columns = columns
        for place, kind in shown.kinds.items():
            self._table.add_slot(f"body-cell-{place}", _CELLS[kind])
        links = shown.links or [""] * len(shown.rows)
        self._table.rows = [
            {"id": number, "link": link, **{str(place): printable(cell) for place, cell in enumerate(row)}}
            | {f"by{place}": values[number] for place, values in shown.sort_by.items()}
            for number, (row, link) in enumerate(zip(shown.rows, links, strict=True))
        ]
        self._table.classes("stacked" if shown.stacked else "")
        self._table.props["virtual-scroll"] = len(shown.rows) > MANY_ROWS
        self._table.set_visibility(bool(shown.rows))
        self._instead.set_text("" if shown.rows else shown.instead)
        self._below.clear()
        if shown.below:
            with self._below:
                section(shown.below)


def section(shown: Section) -> None:
    """A part of a report. A sentence that begins with a dash is a point of a list."""
    ui.label(shown.title[:1].upper() + shown.title[1:]).classes("part")
    facts(shown.facts)
    for table in shown.tables:
        Grid().show(Listing(columns=table.columns, rows=table.rows, numeric=table.numeric))
    for text in shown.sentences:
        if not text.startswith("- "):
            ui.label(printable(text)).classes("sentence")
    if points := [text[2:] for text in shown.sentences if text.startswith("- ")]:
        with ui.element("ul"):
            for text in points:
                _within("li", text)


def report(shown: Report) -> None:
    ui.label(printable(shown.title)).classes("sentence")
    for part in shown.sections:
        with card():
            section(part)


def look_controls() -> Callable[[], Look]:
    """How the curves of this page are drawn; what is returned says what is chosen."""

    async def changed() -> None:
        await asyncio.gather(*(panel.changed() for panel in _panels()))

    with ui.element("section").classes("card line look"):
        by = choice(list(AXES), "step", "curves along", changed)
        with ui.element("div").classes("slider"):
            ui.label("smoothing")
            smoothing = ui.slider(min=0, max=0.98, step=0.02, value=0, on_change=changed).props("aria-label=smoothing")
            ui.label().classes("value").bind_text_from(smoothing, "value", lambda weight: f"{weight:.2f}")
    return lambda: Look(by=by.value, smoothing=float(smoothing.value))


def panel(read: Callable[[], Any], draw: Callable[[Any], None], meanwhile: str = "") -> Panel:
    """What `draw` makes of what `read` found, anew when that changes; before that, `meanwhile`."""
    with ui.element("div").classes("bare") as box:
        ui.label(meanwhile)

    def show(found: Any) -> None:
        box.clear()
        with box:
            draw(found)

    return Panel(read, show, box)


def table_panel(words: Card | str, read: Callable[[], Listing], search: str = "") -> None:
    with card(words):
        Panel(read, Grid(search).show)


def chart(height_px: int) -> Callable[[Drawn], None]:
    """An empty chart; what is returned gives it its options, and a sentence about them."""
    now = ui.label("").classes("says")
    element = ui.echart({}, renderer="svg", theme=THEME).style(f"height: {height_px}px; width: 100%")
    element.set_visibility(False)

    def show(found: Drawn) -> None:
        options, text = found
        now.set_text(text)
        element.set_visibility(bool(options))
        element.options.clear()
        element.options.update(options)
        element.update()

    return show


def chart_panel(words: Card, read: Callable[[], Drawn], height_px: int = 280) -> None:
    with card(words):
        with ui.element("div") as box:
            show = chart(height_px)
        Panel(read, show, box)

"""Tables, facts, numbers, reports and charts on a page.

Texts are given to NiceGUI's own elements, which escape them: a policy may write anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from headrace.dashboard.charts import THEME, Options
from headrace.dashboard.nicegui_frame import Panel, card
from headrace.runs.report import Report, Section, Table, printable

# Cells are texts such as "1,608", "36.6 k", "50.2%" or "5 min ago": their numbers decide, else their letters.
_SORT = """(a, b) => {
    const units = {k: 1e3, M: 1e6, G: 1e9, min: 60, h: 3600, days: 86400};
    const value = text => {
        const found = String(text).replace(/,/g, '').match(/^[$]?(-?[\\d.]+)\\s*([a-zA-Z]*)/);
        return found ? parseFloat(found[1]) * (units[found[2]] || 1) : NaN;
    };
    const x = value(a), y = value(b);
    return isNaN(x) || isNaN(y) ? String(a).localeCompare(String(b)) : x - y;
}"""
_LINKED = (
    "<q-td :props='props'><a v-if='props.row.link' :href='props.row.link'>{{ props.value }}</a>"
    "<template v-else>{{ props.value }}</template></q-td>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table on the page. `links` are where the first cell of each row leads; `wide` columns are not for a phone.

    Example:
        Listing(table=Table(columns=("run", "state"), rows=(("a", "finished"),)), links=("/run/a/overview",))
    """

    table: Table
    links: tuple[str, ...] = ()
    wide: frozenset[int] = frozenset()
    below: Section | None = None
    instead: str = ""  # of a table without rows


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and what they are; beside each other also on a narrow screen, if they are short."""
    pairs = list(pairs)
    short = all(len(name + text) < 30 for name, text in pairs)
    with ui.element("dl").classes("short" if short else ""):
        for name, text in pairs:
            with ui.element("dt"):
                ui.label(printable(name))
            with ui.element("dd"):
                ui.label(printable(text))


def numbers(shown: Iterable[tuple[str, str, str]]) -> None:
    """Boxes of a name, its number, and what the number means."""
    with ui.element("div").classes("numbers"):
        for name, value, says in shown:
            with ui.element("section").classes("card"):
                ui.label(name).classes("name")
                ui.label(value).classes("value long" if len(value) > 9 else "value")
                ui.label(says).classes("says")


class Grid:
    """A table whose rows may change; what a reader sorted it by stays."""

    def __init__(self, shown: Listing) -> None:
        self._columns: list[dict[str, Any]] = []
        self._table = ui.table(rows=[], columns=[]).props("flat dense wrap-cells hide-bottom")
        self._table.add_slot("body-cell-0", _LINKED)
        self._instead, self._below = ui.label(""), ui.element("div")
        self.show(shown)

    def show(self, shown: Listing) -> None:
        table, links = shown.table, shown.links or ("",) * len(shown.table.rows)
        columns = [
            {
                "name": str(place),
                "field": str(place),
                "label": printable(title),
                "align": "right" if place in table.numeric else "left",
                "classes": (kind := ("number " * (place in table.numeric) + "wide" * (place in shown.wide)).strip()),
                "headerClasses": kind,
                "sortable": len(table.rows) > 1,
                ":sort": _SORT,
            }
            for place, title in enumerate(table.columns)
        ]
        if columns != self._columns:
            self._columns, self._table.columns = columns, [dict(column) for column in columns]
        self._table.rows = [
            {"id": number, "link": link, **{str(place): printable(cell) for place, cell in enumerate(row)}}
            for number, (row, link) in enumerate(zip(table.rows, links, strict=True))
        ]
        self._table.set_visibility(bool(table.rows))
        self._instead.set_text(shown.instead)
        self._instead.set_visibility(not table.rows)
        self._below.clear()
        if shown.below:
            with self._below:
                section(shown.below)


def section(shown: Section) -> None:
    """A part of a report: title, facts, tables, sentences. What begins with a dash is a point of a list."""
    if shown.title:
        ui.label(_capital(shown.title)).classes("part")
    if shown.facts:
        facts(shown.facts)
    for table in shown.tables:
        if table.title:
            ui.label(table.title)
        Grid(Listing(table=table))
    points = [text.removeprefix("- ") for text in shown.sentences if text.startswith("- ")]
    for text in shown.sentences:
        if not text.startswith("- "):
            ui.label(printable(text)).classes("sentence")
    if points:
        with ui.element("ul"):
            for text in points:
                with ui.element("li"):
                    ui.label(printable(text))


def report(shown: Report) -> None:
    ui.label(printable(shown.title)).classes("sentence")
    for part in shown.sections:
        with card():
            section(part)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def choice(options: list[str] | dict[Any, str], value: Any, label: str, on_change: Callable[[Any], Any]) -> Any:
    """A list to choose from; `on_change` is told what was chosen."""
    known = value if value in options else None
    chosen = ui.select(options, value=known, label=label, on_change=lambda event: on_change(event.value))
    return chosen.classes("field").props("outlined dense options-dense")


def panel(read: Callable[[], Any], draw: Callable[[Any], None], meanwhile: str = "") -> Panel:
    """What `draw` makes of what `read` found, made anew when that changes; before that, the words `meanwhile`."""
    with ui.element("div").classes("bare") as box:
        ui.label(meanwhile)

    def show(found: Any) -> None:
        box.clear()
        with box:
            draw(found)

    return Panel(read, show, box)


def table_panel(title: str, says: str, read: Callable[[], Listing]) -> Panel:
    with card(title, says):
        grid = Grid(Listing(table=Table(columns=(), rows=())))
        return Panel(read, grid.show)


def chart(height_px: int) -> Callable[[Options], None]:
    """An empty chart; what is returned gives it its options."""
    element = ui.echart({}, renderer="svg", theme=THEME).style(f"height: {height_px}px; width: 100%")

    def show(options: Options) -> None:
        element.set_visibility(bool(options))
        element.options.clear()
        element.options.update(options)
        element.update()

    return show


def chart_panel(title: str, says: str, read: Callable[[], tuple[Options, str]], height_px: int = 280) -> Panel:
    """A chart; `read` gives its options and a sentence about what it shows just now."""
    with card(title, says):
        now = ui.label("").classes("says")
        show_chart = chart(height_px)

        def show(found: tuple[Options, str]) -> None:
            options, text = found
            now.set_text(text)
            now.set_visibility(bool(text))
            show_chart(options)

        return Panel(read, show)

"""The frame of every page, its cards, and panels that follow the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nicegui import run, ui

from headrace.dashboard.site import address
from headrace.errors import HeadraceError
from headrace.runs.report import printable

EVERY_S = 2.0  # a look into the ledger
SETTLED_S = 0.25  # without another change: nobody types or drags any more
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
THEME = "headrace_theme"  # a cookie: light or dark, if somebody chose
_SWITCH_THEME = f"""() => {{
    const dark = !document.body.classList.contains('body--dark');
    Quasar.Dark.set(dark);
    document.cookie = '{THEME}=' + (dark ? 'dark' : 'light') + '; path=/; max-age=31536000; SameSite=Strict';
}}"""


@contextmanager
def frame(title: str, small: str = "") -> Iterator[None]:
    chosen = ui.context.client.request.cookies.get(THEME)
    ui.dark_mode({"dark": True, "light": False}.get(chosen))
    ui.colors(primary="#1f78b4")
    ui.page_title(f"{title} · Headrace")
    ui.add_head_html(f"<style>{STYLE}</style>")
    with ui.element("header").classes("top"):
        ui.link("Headrace", "/").classes("brand")
        ui.link("Runs", "/")
        ui.link("Compare", "/compare")
        ui.link("Plan", "/plan")
        ui.element("div").classes("space")
        with ui.element("button").props("aria-label='light or dark' title='light or dark'") as button:
            ui.label("◐")
        button.on("click", js_handler=_SWITCH_THEME)
    with ui.element("div").classes("page"):
        with ui.element("h1"):
            ui.label(printable(title))
            if small:
                ui.label(small).classes("says")
        yield


def views(links: Sequence[tuple[str, str, bool]]) -> None:
    """Links to the views of one thing: name, address, and whether it is this one."""
    with ui.element("nav").classes("views"):
        for name, target, here in links:
            ui.link(name, target).classes("here" if here else "")


@contextmanager
def card(title: str = "", says: str = "") -> Iterator[None]:
    with ui.element("section").classes("card"):
        if title:
            with ui.element("h2"):
                ui.label(title)
        if says:
            ui.label(says).classes("says")
        yield


def message(text: str) -> Any:
    return ui.label(printable(text)).classes("message").props("role=status")


class Panel:
    """Something on the page that is read again and again. If it cannot be read, it says why and tries on."""

    def __init__(self, read: Callable[[], Any], show: Callable[[Any], None], box: Any = None) -> None:
        """`read` runs in a thread; `show` puts what it found on the page. Without anything, `box` is hidden."""
        self._read, self._show, self._box = read, show, box
        self._found: Any = None
        self._changes, self._one_at_a_time = 0, asyncio.Lock()
        self._message = message("")
        self._message.set_visibility(False)

    async def refresh(self) -> None:
        try:
            found = await run.io_bound(self._read)
        except HeadraceError as error:
            self._message.set_text(printable(str(error)))
            self._turn(False)
            return
        self._turn(True)
        if found != self._found:
            self._found = found
            self._show(found)

    def _turn(self, readable: bool) -> None:
        self._message.set_visibility(not readable)
        if self._box is not None:
            self._box.set_visibility(readable)

    async def changed(self) -> bool:
        """Look again, a moment after the last of several changes; whether this was the last."""
        self._changes += 1
        mine = self._changes
        await asyncio.sleep(SETTLED_S)
        async with self._one_at_a_time:
            if mine == self._changes:
                await self.refresh()
        return mine == self._changes


async def follow(panels: Sequence[Panel]) -> None:
    """Fill the panels now, and keep them up to date while the page is open."""

    async def refresh() -> None:
        await asyncio.gather(*(panel.refresh() for panel in panels))

    await refresh()
    ui.timer(EVERY_S, refresh, immediate=False)


def run_views(name: str, here: str) -> None:
    shown = ("overview", "timeline", "tokens", "lag", "publish", "rewards", "trajectories")
    views([(view.capitalize(), address("run", name, view), view == here) for view in shown])

"""The page's addresses, and its server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nicegui import app, ui
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse

from headrace.dashboard import nicegui_plan, nicegui_run, nicegui_runs, nicegui_trajectories
from headrace.dashboard.nicegui_frame import frame, message
from headrace.dashboard.site import Site, address
from headrace.errors import HeadraceError
from headrace.insight.metrics import CONTENT_TYPE, metrics_text

BUILD_S = 20.0  # a page may take so long to build; a slow disk is no reason to show none
ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><path d='M1 5q3.5-3 7 0t7 0M1 11q3.5-3 7 0t7 0' "
    "fill='none' stroke='#0072B2' stroke-width='2'/></svg>"
)

Builder = Callable[..., Awaitable[None]]


def serve(site: Site, *, host: str, port: int, local: bool) -> None:
    register(site)
    if local:  # a page of another site must not reach this one under a name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "::1", "[::1]", host])
    where = f"[{host}]" if ":" in host else host
    print(f"Headrace shows {site.root} at http://{where}:{port}  (Ctrl+C ends it)", flush=True)
    if not local:
        print(f"Anyone who can reach {host} can read these runs: there is no password.", flush=True)
    ui.run(
        host=host,
        port=port,
        title="Headrace",
        favicon=ICON,
        dark=None,
        show=False,
        reload=False,
        tailwind=False,
        show_welcome_message=False,
        message_history_length=50,
        binding_refresh_interval=None,
    )


def register(site: Site) -> None:
    pages: dict[str, Builder] = {
        "/": partial(_home, site),
        "/compare": partial(nicegui_runs.compare, site),
        "/plan": partial(nicegui_plan.plan, site),
        "/run/{name}": partial(nicegui_run.overview, site),
        "/run/{name}/trajectories": partial(nicegui_trajectories.trajectories, site),
        "/run/{name}/trajectory": partial(nicegui_trajectories.trajectory, site),
    }
    views = (nicegui_run.overview, nicegui_run.timeline, nicegui_run.tokens)
    for view in (*views, nicegui_run.lag, nicegui_run.publish, nicegui_run.rewards):
        pages[f"/run/{{name}}/{view.__name__}"] = partial(view, site)
    for path, build in pages.items():
        ui.page(path, response_timeout=BUILD_S)(_clearly(build))
    app.on_page_exception(_unexpected)

    def metrics(run: str = "") -> PlainTextResponse:
        """For Prometheus; of the run that was written last, where it is not told which."""
        try:
            return PlainTextResponse(metrics_text(site.measured(run).path), media_type=CONTENT_TYPE)
        except HeadraceError as error:
            return PlainTextResponse(f"{error}\n", status_code=404)

    app.get("/metrics")(metrics)


async def _home(site: Site) -> None:
    """The list of runs, or the run itself where there is but one to show."""
    if site.is_one_run:
        ui.navigate.to(address("run", site.root.name, "overview"))
        return
    await nicegui_runs.runs(site)


def _clearly(build: Builder) -> Builder:
    """The page, or a message where what was asked for is not there."""

    async def built(**given: Any) -> None:
        try:
            await build(**given)
        except HeadraceError as error:
            with frame("Nothing to show"):
                message(str(error))

    built.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
    return built


def _unexpected(error: Exception) -> None:
    """A mistake of ours, or a ledger that is broken in a way that nobody thought of."""
    with frame("Something went wrong"):
        message(f"This page could not be made: {type(error).__name__}: {error}")

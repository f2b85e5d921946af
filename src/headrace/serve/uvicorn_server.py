"""The endpoint on a socket, served by the event loop that the run lives in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from headrace.errors import ConfigError

HEADER_BYTES = 64 << 10
STOP_S = 1


class _Quiet(uvicorn.Server):
    """Signals are the run's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """Serves `app` from `start` to `close`."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
        settings: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "log_level": "error"}
        limits: dict[str, Any] = {"h11_max_incomplete_event_size": HEADER_BYTES, "timeout_graceful_shutdown": STOP_S}
        self._server = _Quiet(uvicorn.Config(app, http="h11", **settings, **limits))
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def wait(self) -> None:
        """Until it is closed."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()

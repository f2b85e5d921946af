"""The endpoint on a socket, served by the event loop that the run lives in."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from headrace.errors import ConfigError

HEADER_BYTES = 64 << 10
STOP_S = 1


@contextlib.asynccontextmanager
async def listening(app: Any, host: str, port: int) -> AsyncIterator[int]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    settings: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "log_level": "error"}
    limits: dict[str, Any] = {"h11_max_incomplete_event_size": HEADER_BYTES, "timeout_graceful_shutdown": STOP_S}
    server = uvicorn.Server(uvicorn.Config(app, http="h11", **settings, **limits))
    # signals are the run's own business
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
        listener.close()

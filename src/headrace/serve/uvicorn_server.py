"""The endpoint on a socket, served by the event loop that the run lives in."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.errors import ConfigError

HEAD_BYTES = 64 << 10
STOP_S = 1


class BoundedProtocol(HttpToolsProtocol):
    """HTTP whose heads have an end. The parser of httptools is faster than h11, but reads a head of any length."""

    in_head, head_bytes = True, 0

    def data_received(self, data: bytes) -> None:
        if self.in_head and self.head_bytes > HEAD_BYTES:
            self.send_400_response("the head of the request is too long")
            return
        self.head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self.in_head, self.head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.in_head = False
        super().on_headers_complete()


@contextlib.asynccontextmanager
async def listening(app: Any, host: str, port: int) -> AsyncIterator[int]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    quiet: dict[str, Any] = {"log_config": None, "log_level": "error", "timeout_graceful_shutdown": STOP_S}
    needless: dict[str, Any] = {"lifespan": "off", "ws": "none", "proxy_headers": False}
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, **quiet, **needless))
    # signals are the run's own business
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving
        listener.close()

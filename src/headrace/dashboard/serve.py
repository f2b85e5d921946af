"""`headrace dash`: checks what was asked for, and starts the page if its library is installed."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from headrace.dashboard.site import Site
from headrace.errors import ConfigError, RunError
from headrace.user_code import load_optional


def serve(root: Path, *, host: str, port: int, dollars_per_hour: float | None) -> None:
    """Show the runs in `root`, or the one run that it is, until interrupted."""
    if not root.is_dir():
        raise RunError(f"there is no directory {root}; name a run, or the directory that your runs are in")
    if dollars_per_hour is not None and dollars_per_hour < 0:
        raise ConfigError(f"--dollars-per-hour is {dollars_per_hour:g}; a price is not below zero")
    _check_free(host, port)
    page = load_optional("headrace.dashboard.nicegui_pages", "nicegui", "dash")
    page.serve(Site(root, dollars_per_hour), host=host, port=port, local=is_local(host))


def is_local(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_free(host: str, port: int) -> None:
    """Say now what the server would say in a traceback."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise RunError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another with --port"
        ) from error

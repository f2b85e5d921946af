"""Servers of other engines: a process of our own in an environment of its own, or the user's at an address."""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from headrace.config_file import without_keys
from headrace.errors import ConfigError, ModelError

START_S = 900.0
LOOK_S, END_S = 0.05, 3.0
DONE = b"data: [DONE]"  # after the last part of an answer
# Runs beside the server, and away from this process: once that lets go of the pipe, however it ends, nothing is left.
GUARD = 'exec 3<&0; (cat <&3; kill -s KILL -- "-$0"; rm -rf "$1") >/dev/null 2>&1 &'


class ServerLostError(Exception):
    """The server ended, broke off, or refused what it must not refuse."""


LOST = (OSError, http.client.HTTPException, ServerLostError, ValueError, LookupError, TypeError)  # or nonsense


@dataclass(frozen=True)
class Launch:
    """How a server is started, reached, and asked for its release."""

    words: Sequence[str] = ()  # after the user's command
    env: dict[str, str] = field(default_factory=dict)
    address: str | tuple[str, int] = ""  # of a unix socket, or host and port
    headers: dict[str, str] = field(default_factory=dict)
    release: str = "/version"  # where it tells its own
    labels: str = "0"  # the first release that tells the version of every token
    may_be_older: bool = False  # if the server is ours
    greeting: tuple[str, Any] | None = None  # posted once it is up, to one that tells versions


class Server:
    """One server process group, perhaps in place of another. Its directory has the model that it loads, and its log."""

    is_up, address, shown = False, "", ""
    tells_versions = True
    num_asked, heard_s = 0, 0.0  # answers asked for, and when it last told of them

    def __init__(
        self, command: str, write: Callable[[Path], None], launch: Callable[[Path], Launch], again: bool = False
    ) -> None:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.directory = Path(tempfile.mkdtemp("-engine", "headrace-", shared))
        self._log = self.directory / "log"
        own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}  # which are of ours
        try:
            write(self.directory)
            self._launch = launch(self.directory)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*(shlex.split(command) or [""]), *self._launch.words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=own | {"HF_HUB_OFFLINE": "1"} | self._launch.env,
                    start_new_session=True,
                )
        except (OSError, ValueError) as why:
            shutil.rmtree(self.directory)
            raise ConfigError(f"rollout.command = '{command}' cannot be started: {why}") from why
        theirs, self._alive = os.pipe()
        guard = ["sh", "-c", GUARD, str(self._process.pid), str(self.directory)]
        subprocess.run(guard, stdin=theirs, start_new_session=True, check=True)
        os.close(theirs)
        self._again, self._starting, self._open = again, threading.Lock(), WeakSet[socket.socket]()

    def wait_ready(self) -> None:
        """Raises if the server does not come up, or cannot be used."""
        end_s = time.monotonic() + START_S
        with self._starting:
            while not self.is_up:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    told = "the server of rollout.command did not come up; its last lines:"
                    raise (ServerLostError if self._again else ConfigError)(f"{told}\n{self.last_lines()}")
                time.sleep(LOOK_S)
                with suppress(*LOST):
                    self.greet()

    def greet(self) -> None:
        release, launch = self._ask("GET", self._launch.release, timeout_s=5.0)["version"], self._launch
        self.tells_versions = numbers(release) >= numbers(launch.labels)
        if not (self.tells_versions or launch.may_be_older):
            why = f"{release} does not tell what weights sampled a token; {launch.labels} does"
            raise ConfigError(f"the server of rollout.command has a release that is too old: {why}")
        if launch.greeting and self.tells_versions:
            self._ask("POST", *launch.greeting)
        self.is_up = True

    def last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        self.wait_ready()
        return self._ask("POST", path, body, timeout_s)

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        with self._send("POST", path, body, timeout_s=None) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(b"{}" if line.startswith(DONE) else line[6:])

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        with self._send(method, path, body, timeout_s) as response:
            return json.loads(response.read() or b"null")

    @contextmanager
    def _send(self, method: str, path: str, body: Any, timeout_s: float | None) -> Iterator[http.client.HTTPResponse]:
        family = socket.AF_UNIX if isinstance(self._launch.address, str) else socket.AF_INET
        with closing(http.client.HTTPConnection("engine")) as connection, socket.socket(family) as at:
            connection.sock = at
            self._open.add(at)
            at.settimeout(timeout_s)
            at.connect(self._launch.address)
            headers = {"Content-Type": "application/json", "Connection": "close", **self._launch.headers}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            if (response := connection.getresponse()).status != 200:
                text = response.read(2000).decode(errors="replace")
                told = f"the server answers {path} with {response.status}: {text}"
                raise ModelError(told) if response.status == 400 else ServerLostError(told)
            yield response

    def close(self) -> None:
        """End all its processes: they are one group. Asked first, the server leaves less shared memory behind."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, sign)
                self._process.wait(END_S)
        os.close(self._alive)


def numbers(release: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", release)[:3]]


class TheirServer(Server):
    """One that the user has started, at `http://host:port`, perhaps with `:key@` before it."""

    def __init__(self, address: str, directory: Path, launch: Callable[[Path], Launch]) -> None:
        if (url := urlsplit(address)).scheme != "http":
            raise ValueError("the address has to begin with http://")
        headers = {"Authorization": f"Bearer {unquote(url.password)}"} if url.password else {}
        directory.mkdir(parents=True, exist_ok=True)
        at = url.hostname or "", url.port or 80
        self._launch = replace(launch(directory), address=at, headers=headers, may_be_older=False)
        self.address, self.shown = address, without_keys(address)
        self.directory, self._open, self._closed = directory, WeakSet[socket.socket](), False

    def wait_ready(self) -> None:
        if self._closed:
            raise ServerLostError("it was left out")
        if not self.is_up:
            self.greet()

    def last_lines(self) -> str:
        return f"it is the server at {self.shown}"

    def close(self) -> None:
        """It goes on; what it is asked for ends, as its connection does."""
        self._closed = True
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

"""A server of another engine in place of the embedded one: a process of our own, in its own environment.

Answers are streamed. The server says which version sampled which token when an answer ends. Until
then the tokens are certain that came before the first update since the request was sent: those are
kept where an answer is cut off, by a checkpoint or because the server was lost.
"""

import http.client
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace.config import COMMANDS, MOST_TOP_K, RolloutSection
from headrace.errors import ConfigError, ModelError, WorkerLostError
from headrace.measured import EngineCounts
from headrace.policy.policy import Policy
from headrace.rollout.rows import Generation, Request, Rows, RowSequence, request_seed
from headrace.types import FinishReason, IntArray, RouteArray, Sampling, Trajectory

START_S = 900.0
HUNG_S = 300.0  # without a token, while answers are under way
LOOK_S, END_S = 0.05, 3.0
MOST_LOSSES = 3  # of servers in a row that gave no answer
# Runs beside the server, and away from this process: once that lets go of the pipe, however it ends, nothing is left.
GUARD = 'exec 3<&0; (cat <&3; kill -s KILL -- "-$0"; rm -rf "$1") >/dev/null 2>&1 &'
ALL = 2**62
Clock = Callable[[], float]
FINISH = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT, "stop": FinishReason.EOS}


def refusal(engine: str, sampling: Sampling) -> str:
    """Why training could not repeat how `engine` samples so; empty if it can."""
    told = ""
    if sampling.grammar:
        told = ": a JSON schema or a required tool call is only for the embedded engine"
    elif sampling.truncates and not 0 < sampling.top_k <= MOST_TOP_K:
        told = f" tells what top_p, min_p and top_k left only with a top_k up to {MOST_TOP_K}"
    return f"rollout.engine = '{engine}'{told}" if told and engine != "embedded" else ""


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
    least: str = "0"  # release that tells the version of every token
    greeting: tuple[str, Any] | None = None  # posted once it is up


class Server:
    """One server process group, perhaps in place of another. Its directory has the model that it loads, and its log."""

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
        except (OSError, ValueError) as error:
            shutil.rmtree(self.directory)
            raise ConfigError(f"rollout.command = '{command}' cannot be started: {error}") from error
        theirs, self._alive = os.pipe()
        guard = ["sh", "-c", GUARD, str(self._process.pid), str(self.directory)]
        subprocess.run(guard, stdin=theirs, start_new_session=True, check=True)
        os.close(theirs)
        self.is_up, self._again, self._starting = False, again, threading.Lock()

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
                    self._greet()
                    self.is_up = True

    def _greet(self) -> None:
        release, least = self._ask("GET", self._launch.release, timeout_s=5.0)["version"], self._launch.least
        told, needed = ([int(n) for n in re.findall(r"\d+", one)[:3]] for one in (release, least))
        if told < needed:
            why = f"{release} does not tell what weights sampled a token; {least} does"
            raise ConfigError(f"rollout.command starts a server of a release that is too old: {why}")
        if self._launch.greeting:
            self._ask("POST", *self._launch.greeting)

    def last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        self.wait_ready()
        return self._ask("POST", path, body, timeout_s)

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        with self._send("POST", path, body, timeout_s=None) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        with self._send(method, path, body, timeout_s) as response:
            return json.loads(response.read() or b"null")

    @contextmanager
    def _send(self, method: str, path: str, body: Any, timeout_s: float | None) -> Iterator[http.client.HTTPResponse]:
        address = self._launch.address
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with closing(http.client.HTTPConnection("engine")) as connection, socket.socket(family) as at:
            connection.sock = at
            at.settimeout(timeout_s)
            at.connect(address)
            headers = {"Content-Type": "application/json", "Connection": "close", **self._launch.headers}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
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


@dataclass(frozen=True)
class Part:
    """Of an answer, as it comes. The last one has a `finish`, and `spans`: which version sampled which tokens."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    supports: Sequence[Sequence[int]] = ()  # where some tokens were left out
    finish: FinishReason | None = None
    spans: Sequence[Mapping[str, Any]] = ()


@dataclass(eq=False)
class _Asked:
    """A request at the server. Its tokens count as those of `version`, until the server tells whose they are."""

    row: RowSequence
    sent: str = ""  # the id under which it was last sent
    known: int = 0  # tokens that it was sent with
    version: int = 0  # of the policy then
    certain: int = ALL  # tokens that no later version can have sampled
    aborted: bool = False

    @property
    def cut(self) -> RowSequence:
        """Without the tokens that a later version may have sampled."""
        return replace(self.row, sampled=self.row.sampled[: self.certain], supports=self.row.supports[: self.certain])


class ServerEngine:
    """Asked like `Engine`. Of each engine are flags, requests, answers and updates."""

    name: ClassVar[str]
    generate: ClassVar[str]  # the path of requests
    launch: Callable[[Path], Launch]  # of a server with the model in a directory, as `version`
    body: Callable[[str, IntArray, Sampling, int, int], dict[str, Any]]  # of a request; at most so many tokens, a seed
    part: Callable[[dict[str, Any], bool, int], Part]  # from an answer; whether it has supports, tokens so far
    load: Callable[[Server], None]  # its directory again, while requests are under way
    end: Callable[[Server, Sequence[str]], None]  # these requests, and no other

    def __init__(self, policy: Policy, section: RolloutSection, room: int, clock: Clock, on_gpu: bool = False) -> None:
        if policy.routers.shape[0]:
            told = "does not tell a mixture's experts; take the embedded engine"
            raise ConfigError(f"rollout.engine = '{section.engine}' {told}")
        self.policy, self.section, self.version, self._clock = policy, section, 0, clock
        self.max_context, self.on_gpu = room, on_gpu
        self.notes: list[str] = []  # for the user
        self.begun: deque[tuple[str, int]] = deque()  # requests with a first token, and its version
        self.sampled_tokens = self._computed = self._prompted = self._losses = 0
        self._server = self._start_server()
        self._threads = ThreadPoolExecutor(section.max_running, section.engine)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows = Rows()
        self._ids = (f"{number};" for number in itertools.count())  # none begins another: SGLang aborts by beginnings
        self._asked: dict[str, _Asked] = {}  # by the request's id
        self._finished: list[Generation] = []
        self._moved_s = time.monotonic()

    def sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p", "stop")
        return {name: getattr(sampling, name) for name in names} | {"stop_token_ids": sorted(self.policy.eos_ids)}

    def write_weights(self, directory: Path) -> None:
        """A model directory; adapters are merged."""
        self.policy.save(directory)

    # ---- called from any thread

    def submit(self, prompt: IntArray, requests: Sequence[Request], known: RouteArray | None = None) -> None:
        routes, nothing = np.zeros((0, 0, 0), np.uint8), np.zeros(0, self._rows.dtype)
        for request in requests:
            self._events.put(partial(self._ask, RowSequence(request, prompt, 0.0, routes, 0, [], nothing)))

    def resume_request(self, request: Request, known: Trajectory) -> None:
        self._events.put(lambda: self._ask(self._rows.parked(request, known)))

    def forget(self, sessions: set[str]) -> None:
        """The server itself drops the prefixes that were not used for longest."""

    def abort(self, ids: set[str]) -> None:
        self._events.put(lambda: self._abort(ids))

    @property
    def has_work(self) -> bool:
        return bool(self._asked) or not self._events.empty()

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(computed_tokens=self._computed, prompt_tokens=self._prompted)

    # ---- called from the device thread

    def advance(self) -> list[Generation]:
        """Wait a moment for what the server says."""
        with suppress(queue.Empty):
            self._events.get(timeout=LOOK_S)()
            self._moved_s = time.monotonic()
            for _ in range(self._events.qsize()):  # no more: new weights may be waiting
                self._events.get_nowait()()
        if not (self._asked and self._server.is_up):
            self._moved_s = time.monotonic()
        if time.monotonic() - self._moved_s > HUNG_S:
            self._replace_server(f"there was no token for {HUNG_S:g} s")
        finished, self._finished = self._finished, []
        return finished

    def weights_changed(self, version: int) -> None:
        """Hand the policy's weights over as those of `version`."""
        self.version = version
        for asked in self._asked.values():
            asked.certain = min(asked.certain, len(asked.row.sampled))
        try:
            self._server.wait_ready()  # it may still be reading the weights
            self.write_weights(self._server.directory)
            self.load(self._server)
        except (*LOST, ModelError) as why:
            self._replace_server(f"version {version} was not taken: {why}")

    def release_cache(self) -> None:
        """The server has a device of its own."""

    def greedy(self, prompt: IntArray) -> tuple[int, float] | None:
        sampling = Sampling(max_new_tokens=1, temperature=0.0)
        body = self.body(next(self._ids), prompt, sampling, 1, 0)
        try:
            part = self.part(self._server.post(self.generate, body), False, 0)
        except LOST as why:
            self._replace_server(str(why))
            part = self.part(self._server.post(self.generate, body), False, 0)
        return part.tokens[0], part.logprobs[0]

    def under_way(self) -> dict[str, Generation]:
        cuts = {id: asked.cut for id, asked in self._asked.items()}
        return {id: cut.generation(FinishReason.ABORT, self._clock()) for id, cut in cuts.items() if len(cut.sampled)}

    def close(self) -> None:
        self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- inside

    def _start_server(self) -> Server:
        command = self.section.command or COMMANDS[self.section.engine]
        return Server(command, self.write_weights, self.launch, self._losses > 0)

    def _ask(self, row: RowSequence, aborted: bool = False) -> None:
        asked = _Asked(row, next(self._ids), len(row.sampled), self.version, aborted=aborted)
        self._asked[row.request.id] = asked
        self._threads.submit(self._follow, asked)

    def _follow(self, asked: _Asked) -> None:
        """In a thread: send a request, and pass on what comes."""
        request, sampling = asked.row.request, asked.row.request.sampling
        try:
            if self._asked.get(request.id) is not asked:  # its server was replaced before
                return
            if asked.aborted:
                self._events.put(partial(self._hear, asked, Part([], [], finish=FinishReason.ABORT)))
                return
            server = self._server
            server.wait_ready()
            left, seed = sampling.max_new_tokens - asked.known, request_seed(request.seed, asked.known)
            body = self.body(asked.sent, asked.row.tokens, sampling, left, seed % 2**32)
            so_far = 0
            for answer in server.stream(self.generate, body | {"stream": True}):
                part = self.part(answer, sampling.truncates, so_far)
                so_far += len(part.tokens)
                if part.finish is FinishReason.ABORT and not asked.aborted:
                    raise ServerLostError(f"it ended an answer itself: {json.dumps(answer)[:500]}")
                self._events.put(partial(self._hear, asked, part))
                if part.finish:
                    return
                if asked.aborted:  # perhaps before the server knew the request
                    self.end(server, [asked.sent])
            raise ServerLostError("an answer broke off")
        except Exception as why:
            self._events.put(partial(self._fail, asked, why))

    def _hear(self, asked: _Asked, part: Part) -> None:
        request = asked.row.request
        if self._asked.get(request.id) is not asked:  # of a server that was replaced
            return
        fresh = np.zeros(len(part.tokens), self._rows.dtype)
        fresh["token"], fresh["logprob"], fresh["version"] = part.tokens, part.logprobs, asked.version
        if len(fresh) and not len(asked.row.sampled):
            asked.row = replace(asked.row, started_s=self._clock())
            self.begun.append((request.id, asked.version))
        if not request.sampling.temperature:
            fresh["logprob"] = 0.0  # the server's is that of a temperature of 1
        asked.row = replace(asked.row, sampled=np.concatenate([asked.row.sampled, fresh]))
        asked.row.supports.extend(np.array(sorted(left), np.int32) for left in part.supports)
        self.sampled_tokens += len(fresh) * request.counted
        self._computed += len(fresh)
        if part.finish:
            self._end(asked, part.finish, part.spans)

    def _end(self, asked: _Asked, finish: FinishReason, spans: Sequence[Mapping[str, Any]]) -> None:
        del self._asked[asked.row.request.id]
        versions = asked.row.sampled["version"][asked.known :]
        for span in spans:
            versions[span["start"] : span["end"]] = int(span["version"])
        if sum(span["end"] - span["start"] for span in spans) != len(versions):
            told = f"{self.name} sampled {len(versions)} tokens and tells the versions of others"
            raise ModelError(f"{told}: {spans}")
        self._prompted += len(asked.row.prompt)
        self._losses = 0
        self._finished.append(asked.row.generation(finish, self._clock()))

    def _abort(self, ids: set[str]) -> None:
        ended = [self._asked[id] for id in ids & self._asked.keys()]
        for asked in ended:
            asked.aborted = True
        if ended:
            with suppress(*LOST):  # `_follow` finds that out
                self.end(self._server, [asked.sent for asked in ended])

    def _fail(self, asked: _Asked, why: Exception) -> None:
        if self._asked.get(asked.row.request.id) is asked:
            if not isinstance(why, LOST):
                raise why
            self._replace_server(str(why) or type(why).__name__)

    def _replace_server(self, why: str) -> None:
        """Start a new server, which goes on from the tokens whose version is certain."""
        self._losses += 1
        last_lines = self._server.last_lines()
        self._server.close()
        if self._losses > MOST_LOSSES:
            raise WorkerLostError(
                f"{self._losses} {self.name} servers were lost, one after the other: {why}\n{last_lines}"
            )
        self.notes.append(f"a server of {self.name} was lost ({why}); another one goes on with its answers")
        self._server = self._start_server()
        for asked in list(self._asked.values()):
            self.sampled_tokens -= (len(asked.row.sampled) - len(asked.cut.sampled)) * asked.row.request.counted
            self._ask(asked.cut, asked.aborted)

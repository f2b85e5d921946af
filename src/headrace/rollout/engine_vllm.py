"""vLLM in place of the embedded engine: a server of our own, in its own environment, asked over a unix socket.

Answers are streamed. The server says which version sampled which token when an answer ends. Until
then the tokens are certain that came before the first update since the request was sent: those are
kept where an answer is cut off, by a checkpoint or because the server was lost.
"""

import http.client
import itertools
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import save_file

from headrace.config import MOST_TOP_K, RolloutSection
from headrace.errors import ConfigError, ModelError, WorkerLostError
from headrace.measured import EngineCounts
from headrace.policy.policy import Policy
from headrace.rollout.rows import Generation, Request, Rows, RowSequence, request_seed
from headrace.types import FinishReason, IntArray, RouteArray, Sampling, Trajectory

LEAST_VERSION = (0, 32)  # tells the version of every token
START_S = 900.0
HUNG_S = 300.0  # without a token, while answers are under way
LOOK_S, END_S = 0.05, 3.0
MOST_LOSSES = 3  # of servers in a row that gave no answer
OUTSIDE = -9000.0  # log-probs below: top-k, top-p or min-p left the token out
GENERATE, ABORT, LABEL = "/inference/v1/generate", "/inference/v1/abort_requests", "/update_weight_version"
# Runs beside the server, and away from this process: once that lets go of the pipe, however it ends, nothing is left.
GUARD = 'exec 3<&0; (cat <&3; kill -s KILL -- "-$0"; rm -rf "$1") >/dev/null 2>&1 &'
ALL = 2**62
FINISH = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def refusal(sampling: Sampling) -> str:
    """Why training could not repeat how vLLM samples so; empty if it can."""
    if sampling.grammar:
        return "rollout.engine = 'vllm': a JSON schema or a required tool call is only for the embedded engine"
    if sampling.truncates and not 0 < sampling.top_k <= MOST_TOP_K:
        return f"rollout.engine = 'vllm' tells what top_p, min_p and top_k left only with a top_k up to {MOST_TOP_K}"
    return ""


class ServerLostError(Exception):
    """The server ended, broke off, or refused what it must not refuse."""


LOST = (OSError, http.client.HTTPException, ServerLostError, ValueError, LookupError, TypeError)  # or nonsense


class Server:
    """One server process group. Its directory has the model that it loads, its socket and its log."""

    def __init__(self, command: str, flags: str, write: Callable[[Path], None], on_gpu: bool, version: int) -> None:
        self.directory = Path(tempfile.mkdtemp("-vllm", "headrace-", "/dev/shm" if os.path.isdir("/dev/shm") else None))
        self._socket, self._log = str(self.directory / "socket"), self.directory / "log"
        write(self.directory)
        own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}  # which are of ours
        env = own | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if not on_gpu:
            env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | env
        words = ["--model", str(self.directory), "--uds", self._socket, *flags.split()]
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [*(shlex.split(command) or [""]), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                shutil.rmtree(self.directory)
                raise ConfigError(f"rollout.command = '{command}' cannot be started: {error}") from error
        theirs, self._alive = os.pipe()
        guard = ["sh", "-c", GUARD, str(self._process.pid), str(self.directory)]
        subprocess.run(guard, stdin=theirs, start_new_session=True, check=True)
        os.close(theirs)
        self._version, self.is_up, self._starting = version, False, threading.Lock()

    def wait_ready(self) -> None:
        """Raises if the server does not come up, or cannot be used."""
        end_s = time.monotonic() + START_S
        with self._starting:
            while not self.is_up:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    told = "the server of rollout.command did not come up; its last lines:"
                    raise ConfigError(f"{told}\n{self.last_lines()}")
                time.sleep(LOOK_S)
                with suppress(*LOST):
                    version = str(self._ask("GET", "/version", timeout_s=5.0)["version"])
                    if tuple(map(int, version.split(".")[:2])) < LEAST_VERSION:
                        raise ConfigError(f"vLLM {version} does not tell which weights sampled a token; 0.32 does")
                    self._ask("POST", LABEL, {"new_version": str(self._version)})
                    self.is_up = True

    def last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        self.wait_ready()
        return self._ask("POST", path, body, timeout_s)

    def stream(self, body: Any) -> Iterator[dict[str, Any]]:
        with self._send("POST", GENERATE, body, timeout_s=None) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def _ask(self, method: str, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        with self._send(method, path, body, timeout_s) as response:
            return json.loads(response.read() or b"null")

    @contextmanager
    def _send(self, method: str, path: str, body: Any, timeout_s: float | None) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("vllm")) as connection, socket.socket(socket.AF_UNIX) as at:
            connection.sock = at
            at.settimeout(timeout_s)
            at.connect(self._socket)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                told = f"vLLM answers {path} with {response.status}: {response.read(2000).decode(errors='replace')}"
                raise ModelError(told) if response.status == 400 else ServerLostError(told)
            yield response

    def close(self) -> None:
        """End all its processes: they are one group. Asked first, the server leaves no shared memory behind."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, sign)
                self._process.wait(END_S)
        os.close(self._alive)


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


class VllmEngine:
    """Asked like `Engine`."""

    def __init__(self, policy: Policy, section: RolloutSection, max_context: int, clock: Callable[[], float]) -> None:
        if policy.routers.shape[0]:
            raise ConfigError("rollout.engine = 'vllm' does not tell a mixture's experts; take the embedded engine")
        self.policy, self.section, self.version, self._clock = policy, section, 0, clock
        self.notes: list[str] = []  # for the user
        self.begun: deque[tuple[str, int]] = deque()  # requests with a first token, and its version
        self.sampled_tokens = self._computed = self._prompted = 0
        on_gpu = policy.device.type == "cuda"
        # on a CPU it fails where a request with a seed is prefilled in chunks
        whole = f"--enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens {max(8192, max_context)}"
        flags = (
            f"--served-model-name policy --dtype {str(policy.dtype).removeprefix('torch.')} "
            f"--max-model-len {max_context} --max-num-seqs {section.max_running} --stream-interval 16 "
            f"--logprobs-mode processed_logprobs --max-logprobs {MOST_TOP_K} --generation-config vllm "
            f"--enable-scale-out --disable-uvicorn-access-log {'' if on_gpu else whole}"
        )
        self._start_server = partial(Server, section.command, flags, self._write_weights, on_gpu)
        self._server = self._start_server(0)
        self._threads = ThreadPoolExecutor(section.max_running, "vllm")
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows, self._numbers = Rows(), itertools.count()
        self._nothing = np.zeros(0, self._rows.dtype)
        self._asked: dict[str, _Asked] = {}  # by the request's id
        self._finished: list[Generation] = []
        self._moved_s, self._losses = time.monotonic(), 0

    # ---- called from any thread

    def submit(self, prompt: IntArray, requests: Sequence[Request], known: RouteArray | None = None) -> None:
        routes = np.zeros((0, 0, 0), np.uint8)
        for request in requests:
            self._events.put(partial(self._ask, RowSequence(request, prompt, 0.0, routes, 0, [], self._nothing)))

    def resume_request(self, request: Request, known: Trajectory, start: int) -> None:
        self._events.put(lambda: self._ask(self._rows.parked(request, known, start)))

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
        self._server.wait_ready()  # it may still be reading the weights
        self._write_weights(self._server.directory)
        self.version = version
        for asked in self._asked.values():
            asked.certain = min(asked.certain, len(asked.row.sampled))
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._server.directory)}}
        clears = str(self.section.on_update != "keep").lower()  # the cache
        try:
            self._server.post(f"/pause?mode=keep&clear_cache={clears}")
            self._server.post("/collective_rpc", reload, timeout_s=START_S)
            self._server.post(LABEL, {"new_version": str(version)})
            self._server.post("/resume")
        except LOST as why:
            self._replace_server(f"version {version} was not taken: {why}")

    def release_cache(self) -> None:
        """The server has a device of its own."""

    def greedy(self, prompt: IntArray) -> tuple[int, float] | None:
        body = self._body(str(next(self._numbers)), prompt, max_tokens=1, temperature=0.0, logprobs=0)
        try:
            choice = self._server.post(GENERATE, body)["choices"][0]
        except LOST as why:
            self._replace_server(str(why))
            choice = self._server.post(GENERATE, body)["choices"][0]
        return choice["token_ids"][0], choice["logprobs"]["content"][0]["logprob"]

    def under_way(self) -> dict[str, Generation]:
        cuts = {id: asked.cut for id, asked in self._asked.items()}
        return {id: cut.generation(FinishReason.ABORT, self._clock()) for id, cut in cuts.items() if len(cut.sampled)}

    def close(self) -> None:
        self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- inside

    def _write_weights(self, directory: Path) -> None:
        """A model directory; adapters are merged. On a CPU, vLLM has a copy of a tied head."""
        self.policy.save(directory)
        if self.policy.config.tie_word_embeddings:
            head = self.policy.head_weight.detach().contiguous()
            save_file({"lm_head.weight": head}, directory / "head.safetensors")

    def _body(self, id: str, tokens: IntArray, **sampling: Any) -> dict[str, Any]:
        ends = {"stop_token_ids": sorted(self.policy.eos_ids), "ignore_eos": True}
        return {
            "request_id": id,
            "token_ids": tokens.tolist(),
            "model": "policy",
            "cache_salt": f"v{self.version}",  # else a prefix of old weights would serve new requests
            "sampling_params": ends | sampling,
        }

    def _ask(self, row: RowSequence, aborted: bool = False) -> None:
        asked = _Asked(row, str(next(self._numbers)), len(row.sampled), self.version, aborted=aborted)
        self._asked[row.request.id] = asked
        self._threads.submit(self._follow, asked)

    def _follow(self, asked: _Asked) -> None:
        """In a thread: send a request, and pass on what comes."""
        request, sampling = asked.row.request, asked.row.request.sampling
        try:
            if self._asked.get(request.id) is not asked:  # its server was replaced before it was sent
                return
            if asked.aborted:
                self._events.put(partial(self._hear, asked, {"finish_reason": "abort"}, self._nothing))
                return
            self._server.wait_ready()
            body = self._body(
                asked.sent,
                asked.row.tokens,
                **{name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "stop")},
                max_tokens=sampling.max_new_tokens - asked.known,
                seed=request_seed(request.seed, asked.known) % 2**32,
                logprobs=sampling.top_k,
                detokenize=bool(sampling.stop),
            )
            for chunk in self._server.stream(body | {"stream": True}):
                if "choices" not in chunk:
                    raise ServerLostError(json.dumps(chunk)[:500])
                choice = chunk["choices"][0]
                fresh = np.zeros(len(choice["token_ids"]), self._nothing.dtype)
                fresh["token"], fresh["version"] = choice["token_ids"], asked.version
                fresh["logprob"] = [entry["logprob"] for entry in choice["logprobs"]["content"]] if len(fresh) else 0.0
                self._events.put(partial(self._hear, asked, choice, fresh))
                if choice.get("finish_reason"):
                    return
                if asked.aborted:  # perhaps before the server knew the request
                    self._server.post(ABORT, {"request_ids": [f"generate-tokens-{asked.sent}"]})
            raise ServerLostError("an answer broke off")
        except Exception as why:
            self._events.put(partial(self._fail, asked, why))

    def _hear(self, asked: _Asked, choice: dict[str, Any], fresh: npt.NDArray[np.void]) -> None:
        request = asked.row.request
        if self._asked.get(request.id) is not asked:  # of a server that was replaced
            return
        if len(fresh) and not len(asked.row.sampled):
            asked.row = replace(asked.row, started_s=self._clock())
            self.begun.append((request.id, asked.version))
        if not request.sampling.temperature:
            fresh["logprob"] = 0.0  # the server's is that of a temperature of 1
        asked.row = replace(asked.row, sampled=np.concatenate([asked.row.sampled, fresh]))
        for entry in choice["logprobs"]["content"] if request.sampling.truncates and len(fresh) else ():
            left = [top["token_id"] for top in entry["top_logprobs"] if top["logprob"] > OUTSIDE]
            asked.row.supports.append(np.array(sorted(left), np.int32))
        self.sampled_tokens += len(fresh) * request.counted
        self._computed += len(fresh)
        if choice.get("finish_reason"):
            self._end(asked, choice)

    def _end(self, asked: _Asked, choice: dict[str, Any]) -> None:
        del self._asked[asked.row.request.id]
        versions = asked.row.sampled["version"][asked.known :]
        told = choice.get("weight_versions") or []
        for part in told:
            versions[part["start"] : part["end"]] = int(part["version"])
        if sum(part["end"] - part["start"] for part in told) != len(versions):
            raise ModelError(f"vLLM sampled {len(versions)} tokens and tells the versions of others: {told}")
        finish = FINISH.get(choice["finish_reason"], FinishReason.EOS)
        if isinstance(choice.get("stop_reason"), str):
            finish = FinishReason.STOP
        self._prompted += len(asked.row.prompt)
        self._losses = 0
        self._finished.append(asked.row.generation(finish, self._clock()))

    def _abort(self, ids: set[str]) -> None:
        ended = [self._asked[id] for id in ids & self._asked.keys()]
        for asked in ended:
            asked.aborted = True
        if ended:  # an abort without names may end all
            with suppress(*LOST):  # `_follow` finds that out
                self._server.post(ABORT, {"request_ids": [f"generate-tokens-{asked.sent}" for asked in ended]})

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
            raise WorkerLostError(f"{self._losses} vLLM servers were lost, one after the other: {why}\n{last_lines}")
        self.notes.append(f"a vLLM server was lost ({why}); another one goes on with its answers")
        self._server = self._start_server(self.version)
        for asked in list(self._asked.values()):
            self.sampled_tokens -= (len(asked.row.sampled) - len(asked.cut.sampled)) * asked.row.request.counted
            self._ask(asked.cut, asked.aborted)

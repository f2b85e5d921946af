"""Servers of another engine in place of the embedded one: a process of our own, or those at addresses of the user's.

Answers are streamed. The server says which version sampled which token when an answer ends. Until
then the tokens are certain that came before the first update since the request was sent: those are
kept where an answer is cut off, by a checkpoint or because the server was lost. Where a server
does not tell versions an update ends its answers, and each is asked for again, from its tokens on.
"""

import itertools
import json
import queue
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace.config import COMMANDS, MOST_TOP_K, RolloutSection
from headrace.config_file import without_keys
from headrace.errors import ConfigError, HeadraceError, ModelError, WorkerLostError
from headrace.measured import EngineCounts
from headrace.policy.policy import Policy
from headrace.rollout.rows import Generation, Request, Rows, RowSequence, request_seed
from headrace.rollout.server import LOOK_S, LOST, START_S, Launch, Server, ServerLostError, TheirServer
from headrace.types import FinishReason, IntArray, RouteArray, Sampling, Trajectory

HUNG_S = 300.0  # without a token, while answers are under way
SETTLE_S = 1.0  # for the last tokens of answers that an update ends
AGAIN_S = 2.0  # between questions to a server of the user's that does not answer
MOST_LOSSES = 3  # of servers in a row that gave no answer
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


class OtherWeightsError(ServerLostError):
    """Somebody else has loaded some into the server, or it was started anew."""


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
    server: Server | None  # None: it waits for one
    sent: str = ""  # the id under which it was last sent
    known: int = 0  # tokens that it was sent with
    version: int = 0  # of the policy then
    certain: int = ALL  # tokens that no later version can have sampled
    aborted: bool = False
    is_held: bool = False  # an update ends it, and it goes on with the new weights

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

    def __init__(
        self, policy: Policy, section: RolloutSection, room: int, clock: Clock, on_gpu: bool = False, shared: str = ""
    ) -> None:
        if policy.routers.shape[0]:
            told = "does not tell a mixture's experts; take the embedded engine"
            raise ConfigError(f"rollout.engine = '{section.engine}' {told}")
        self.policy, self.section, self.version, self._clock = policy, section, 0, clock
        self.max_context, self.on_gpu = room, on_gpu
        self._shared = shared  # the directory where servers of the user's find weights
        self.notes: list[str] = []  # for the user
        self.begun: deque[tuple[str, int]] = deque()  # requests with a first token, and its version
        self.sampled_tokens = self._losses = 0
        self.counts = EngineCounts()
        self._servers: list[Server] = []  # without those of the user's that do not answer
        addresses = section.addresses or [""]
        self.mark = f"{secrets.token_hex(4)}-"  # of our versions: nobody else's weights go by it
        self._threads = ThreadPoolExecutor(section.max_running * len(addresses), section.engine)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rows = Rows()
        self._ids = (f"{number};" for number in itertools.count())  # none begins another: SGLang aborts by beginnings
        self._asked: dict[str, _Asked] = {}  # by the request's id
        self._finished: list[Generation] = []
        self._closed, self._left_s = threading.Event(), 0.0  # when the last server was lost
        for address in addresses:
            try:
                self._join(self._new_server(address))
            except Exception as why:
                self.close()
                if not isinstance(why, LOST):
                    raise
                told = f"rollout.command: the server at {without_keys(address)} cannot be used"
                raise ConfigError(f"{told}, for weights in {self._shared}: {why}") from why

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

    # ---- called from the device thread

    def advance(self) -> list[Generation]:
        """Wait a moment for what the server says."""
        with suppress(queue.Empty):
            self._events.get(timeout=LOOK_S)()
            for _ in range(self._events.qsize()):  # no more: new weights may be waiting
                self._events.get_nowait()()
        now_s = time.monotonic()
        for server in list(self._servers):
            if not (server.num_asked and server.is_up):
                server.heard_s = now_s
            elif now_s - server.heard_s > HUNG_S:
                self._replace_server(server, f"there was no token for {HUNG_S:g} s")
        if not self._servers and now_s - self._left_s > START_S:
            raise WorkerLostError(f"no server of rollout.command answered for {START_S:g} s")
        finished, self._finished = self._finished, []
        return finished

    def weights_changed(self, version: int) -> None:
        """Hand the policy's weights over as those of `version`."""
        self.version = version
        for asked in self._asked.values():
            asked.certain = min(asked.certain, len(asked.row.sampled))
        failed: dict[Server, Exception] = {}

        def attempt(step: Callable[[], Any], *servers: Server) -> None:
            try:
                step()
            except (*LOST, ModelError) as why:
                failed.update(dict.fromkeys(servers, why))

        for server in self._servers:
            attempt(server.wait_ready, server)  # it may still be reading the weights
        late = self._late(attempt)
        for directory in {server.directory for server in self._servers}:
            readers = [server for server in self._servers if server.directory == directory]
            attempt(partial(self.write_weights, directory), *readers)
        able = [server for server in self._servers if server not in failed]
        with ThreadPoolExecutor(len(able) or 1) as pool:
            list(pool.map(lambda server: attempt(partial(self.load, server), server), able))
        for asked in late:
            if asked.server in able:
                attempt(partial(self.end, asked.server, [asked.sent]), asked.server)
        for server, why in failed.items():
            self._replace_server(server, f"version {version} was not taken: {why}")

    def hold(self, server: Server) -> None:
        """End its answers before an update, if it does not tell versions. It waits for `load`."""

    def _late(self, attempt: Callable[..., None]) -> list[_Asked]:
        """Hold servers, and hear what they sampled. What they may not know yet is asked again."""
        held = [a for a in self._asked.values() if a.server and not a.server.tells_versions]
        for asked in held:
            asked.is_held = True
        for server in self._servers:
            attempt(partial(self.hold, server), server)
        end_s = time.monotonic() + SETTLE_S
        while late := [asked for asked in held if self._asked.get(asked.row.request.id) is asked]:
            with suppress(queue.Empty):
                self._events.get(timeout=max(0.0, end_s - time.monotonic()))()
                continue
            for asked in late:
                self._ask(asked.row, asked.aborted)
            break
        return late

    def release_cache(self) -> None:
        """The server has a device of its own."""

    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        body = self.body(next(self._ids), prompt, Sampling(max_new_tokens=1, temperature=0.0), 1, 0)
        found: dict[Server, Part] = {}
        while waiting := [server for server in self._servers if server not in found]:
            try:
                found[waiting[0]] = self.part(waiting[0].post(self.generate, body), False, 0)
            except LOST as why:
                self._replace_server(waiting[0], str(why))
        return [(part.tokens[0], part.logprobs[0]) for part in found.values()]

    def under_way(self) -> dict[str, Generation]:
        cuts = {id: asked.cut for id, asked in self._asked.items()}
        return {id: cut.generation(FinishReason.ABORT, self._clock()) for id, cut in cuts.items() if len(cut.sampled)}

    def close(self) -> None:
        self._closed.set()
        for server in self._servers:
            server.close()
        shutil.rmtree(self._shared, ignore_errors=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new_server(self, address: str) -> Server:
        if address:
            return TheirServer(address, Path(self._shared), self.launch)
        command = self.section.command or COMMANDS[self.section.engine]
        return Server(command, self.write_weights, self.launch, self._losses > 0)

    def _join(self, server: Server) -> None:
        """A user's takes the present weights first; one of ours reads them when it starts."""
        if server.address:
            server.wait_ready()
            if not self._servers:  # else they are written
                self.write_weights(server.directory)
            self.load(server)
        self._servers.append(server)
        for asked in [asked for asked in self._asked.values() if asked.server is None]:
            self._ask(asked.row, asked.aborted)

    def _ask(self, row: RowSequence, aborted: bool = False) -> None:
        server = min(self._servers, key=lambda server: server.num_asked, default=None)
        asked = _Asked(row, server, next(self._ids), len(row.sampled), self.version, aborted=aborted)
        self._asked[row.request.id] = asked
        if server:
            server.heard_s = server.heard_s if server.num_asked else time.monotonic()
            server.num_asked += 1
        if server or aborted:
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
            server = asked.server
            assert server
            server.wait_ready()
            left, seed = sampling.max_new_tokens - asked.known, request_seed(request.seed, asked.known)
            body = self.body(asked.sent, asked.row.tokens, sampling, left, seed % 2**32)
            so_far = 0
            for answer in server.stream(self.generate, body | {"stream": True}):
                part = self.part(answer, sampling.truncates, so_far)
                so_far += len(part.tokens)
                if any(not str(span["version"]).startswith(self.mark) for span in part.spans):
                    raise OtherWeightsError("it has weights that are not of this run")
                if part.finish is FinishReason.ABORT and not (asked.aborted or asked.is_held):
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
        if asked.server:
            asked.server.heard_s = time.monotonic()
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
        self.counts.computed_tokens += len(fresh)
        if not part.finish:
            return
        del self._asked[request.id]
        if asked.server:
            asked.server.num_asked -= 1
        if asked.is_held and part.finish is FinishReason.ABORT and not asked.aborted:
            self._ask(asked.row)
            return
        versions = asked.row.sampled["version"][asked.known :]
        for span in part.spans:
            versions[span["start"] : span["end"]] = int(span["version"].removeprefix(self.mark))
        told_tokens = sum(span["end"] - span["start"] for span in part.spans)
        if told_tokens != len(versions) and (asked.server is None or asked.server.tells_versions):
            told = f"{self.name} sampled {len(versions)} tokens and tells the versions of others"
            raise ModelError(f"{told}: {part.spans}")
        self.counts.prompt_tokens += len(asked.row.prompt)
        self._losses = 0
        self._finished.append(asked.row.generation(part.finish, self._clock()))

    def _abort(self, ids: set[str]) -> None:
        ended: dict[Server, list[str]] = {}
        for asked in [self._asked[id] for id in ids & self._asked.keys()]:
            asked.aborted = True
            if asked.server:
                ended.setdefault(asked.server, []).append(asked.sent)
            else:
                self._ask(asked.row, aborted=True)
        for server, sent in ended.items():
            with suppress(*LOST):  # `_follow` finds that out
                self.end(server, sent)

    def _fail(self, asked: _Asked, why: Exception) -> None:
        if self._asked.get(asked.row.request.id) is asked:
            if not isinstance(why, LOST):
                raise why
            assert asked.server
            for other in self._asked.values() if isinstance(why, OtherWeightsError) else ():
                if other.server is asked.server:
                    other.certain = other.known
            self._replace_server(asked.server, str(why) or type(why).__name__)

    def _replace_server(self, server: Server, why: str) -> None:
        """Another one, or the others, go on from the tokens whose version is certain."""
        self._losses += not server.address
        last_lines = server.last_lines()
        server.close()
        self._servers.remove(server)
        if self._losses > MOST_LOSSES:
            told = f"{self._losses} {self.name} servers were lost, one after the other"
            raise WorkerLostError(f"{told}: {why}\n{last_lines}")
        if server.address:
            self.notes.append(f"the server at {server.shown} is left out until it can be used again ({why})")
            self._left_s = time.monotonic()
            threading.Thread(target=self._await, args=(server.address,), daemon=True).start()
        else:
            self.notes.append(f"a server of {self.name} was lost ({why}); another one goes on with its answers")
            self._servers.append(self._new_server(""))
        for asked in [asked for asked in self._asked.values() if asked.server is server]:
            self.sampled_tokens -= (len(asked.row.sampled) - len(asked.cut.sampled)) * asked.row.request.counted
            self._ask(asked.cut, asked.aborted)

    def _await(self, address: str) -> None:
        """In a thread: until the server answers."""
        server = self._new_server(address)
        while not self._closed.wait(AGAIN_S):
            with suppress(*LOST, HeadraceError):
                server.wait_ready()
                self._events.put(partial(self._rejoin, server))
                return

    def _rejoin(self, server: Server) -> None:
        try:
            self._join(server)
            self.notes.append(f"the server at {server.shown} is used again")
        except (*LOST, ModelError):
            threading.Thread(target=self._await, args=(server.address,), daemon=True).start()

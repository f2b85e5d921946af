"""Reward functions and filters in child processes (workers), so that they may hang or crash and can be killed.

A worker is started with `python -c`, not by multiprocessing: its spawn method would run the
trainer's main script again in every worker, which imports torch and, without a main guard, trains.
Everything here runs in one asyncio loop, without threads. A worker has a process group of its own,
so a kill also reaches what the user code has started.
"""

import asyncio
import contextlib
import json
import os
import pickle
import reprlib
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, get_args

from headrace.errors import ConfigError, RewardError
from headrace.reward.function import Judged, Mode, Setup, failure
from headrace.reward.printed import Printed
from headrace.reward.worker import HEADER, frame, score_of
from headrace.sandbox import enclosed
from headrace.types import Command, Completion, DropReason, Score
from headrace.user_code import names_file, search_path, user_folders

START_TIMEOUT_S = 120.0  # user code may import large libraries
GRACE_S = 1.0  # more than the time limit that the worker itself has for coroutines
PAUSE_S = 0.5  # before a retry of what was unavailable; doubled each time
MAX_GOING = {"single": 16, "async": 64, "batch": 64}  # jobs that one worker has at a time
MAX_PLAYING = 1024  # agents, or replies of environments that are coroutines
MAX_REPLY_BYTES = 1 << 20
LIMITS = {"nproc": 1024, "nofile": 1024}  # of a worker in a sandbox; threads count as processes
DISK_MB = 256
PASSED_ON = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "TZ")  # of the environment

BOOT = "import sys; sys.path[:] = sys.argv[2:]; from headrace.reward.worker import main; main(int(sys.argv[1]))"


class JudgeLostError(Exception):
    """A worker ended or does not answer. `score` is for its job, if no retries are left."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(detail)
        self.score = failure(detail, reason)


@dataclass(slots=True, eq=False)
class Job:
    """One completion on its way through the pool."""

    blob: bytes
    done: asyncio.Future[Score]
    tries: int = 0
    due: float = 0.0  # loop time by which the worker must have replied
    suspect: bool = False  # was with a lost worker, among others: judged alone next


class JudgeProcess:
    """One worker: a child process and the socket to it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.mode: Mode = "single"
        self.num_sent = 0  # jobs; also the number of the next item
        self.going: dict[int, Job] = {}  # by item number, oldest first
        self.replies: deque[dict[str, Any]] = deque()
        self._is_ready = False
        self._wrong = ""  # with what it sent
        self._limit_s = 0.0  # for one reply
        self._heard_s = 0.0  # loop time of the last reply
        self.wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        argv = [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), *search_path()]
        own: dict[str, Any] = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE, "bufsize": 0}
        own |= {"env": {} if setup.sandbox else None, "start_new_session": True}
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            with isolated(argv, setup) as (command, fds):
                self.process = Popen(command, pass_fds=[theirs.fileno(), *fds], **own)
            undo.pop_all()
        self.printed = Printed(*filter(None, (self.process.stdout, self.process.stderr)))
        self._said: str | None = None  # by the call whose verdicts come in; None: not read yet
        self._socket.setblocking(False)
        self._listening = asyncio.create_task(self._listen())

    @property
    def ended(self) -> bool:
        """Whether its end of the socket is closed, or it is not heard any more."""
        return self._listening.done()

    async def prepare(self) -> None:
        """Load the function in the worker; raises RewardError if that fails."""
        setup = self._setup
        deadline = self._loop.time() + START_TIMEOUT_S
        try:
            await self.send(setup, START_TIMEOUT_S)
            late = f"not ready after {START_TIMEOUT_S:g} s"
            while (ready := await self.receive(deadline, late)) is None:
                pass
            if isinstance(ready.get("error"), str):
                raise (RewardError if setup.setting == "reward.function" else ConfigError)(ready["error"])
            if ready.get("mode") not in get_args(Mode):
                raise JudgeLostError(DropReason.REWARD_ERROR, f"its process sent {reprlib.repr(ready)}")
            self.mode, self._is_ready = ready["mode"], True
            self.printed.take()  # by the imports
        except JudgeLostError as lost:
            said = f"\n{said}" if (said := self.printed.rest().strip()) else ""
            raise RewardError(f"{setup.setting} = '{setup.function}' cannot be loaded: {lost}{said}") from lost
        finally:
            if not self._is_ready:
                await self.stop()
        self._limit_s = setup.timeout_s + (GRACE_S if self.mode == "async" else 0.0)

    async def send(self, request: Any, timeout_s: float) -> None:
        self._said = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.sock_sendall(self._socket, frame(pickle.dumps(request)))
        except TimeoutError as error:
            raise JudgeLostError(DropReason.REWARD_TIMEOUT, f"request not read within {timeout_s:g} s") from error
        except OSError as error:
            await asyncio.wait([self._listening], timeout=GRACE_S)  # it may have replied first
            raise JudgeLostError(DropReason.REWARD_ERROR, await self._epitaph()) from error

    async def receive(self, deadline: float, late: str) -> dict[str, Any] | None:
        """The next reply; None if `wake` was set first. Past the `deadline` it is lost."""
        if not self.replies and not self.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.woken()
            await asyncio.sleep(0)  # if this loop was busy past the deadline, the reply is here
        if self.replies:
            self._heard_s = self._loop.time()
            return self.replies.popleft()
        if self.ended:
            raise JudgeLostError(DropReason.REWARD_ERROR, await self._epitaph())
        if self._loop.time() > deadline:
            raise JudgeLostError(DropReason.REWARD_TIMEOUT, late)
        return None

    def output(self) -> str:
        """What was printed for the verdict that came in. Coroutines print side by side: nobody knows for which."""
        if self.mode == "async":
            return ""
        if self._said is None or self.mode == "single":  # a batch's verdicts come from one call
            self._said = self.printed.take()
        return self._said

    def start_timing(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.due = self._loop.time() + self._limit_s

    def deadline(self) -> float:
        """Loop time at which the worker counts as lost, because of its oldest job.

        Coroutines have a time limit in the worker, so there any reply shows that it is not blocked.
        """
        due = next(iter(self.going.values())).due
        return due if self.mode != "async" else max(due, self._heard_s + self._limit_s)

    def elapsed_s(self) -> float:
        """Since the oldest job was begun."""
        due = min((job.due for job in self.going.values()), default=0.0)
        return max(0.0, self._loop.time() + self._limit_s - due) if due else 0.0

    def takes_more(self) -> bool:
        """Whether jobs may join: only coroutines, unless one is late or to be judged alone."""
        late = any(job.suspect or self._loop.time() > job.due for job in self.going.values())
        return not self.going or (self.mode == "async" and not late)

    async def woken(self) -> None:
        await self.wake.wait()
        self.wake.clear()

    async def stop(self, *, gently: bool = False) -> None:
        """End the process and reap it; with `gently`, an idle one may first end by itself."""
        self._listening.cancel()
        await asyncio.wait([self._listening])
        self._socket.close()
        if gently and not self.going:
            await self._exited(GRACE_S)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)  # not reaped yet, so the id is its own
            await self._exited(None)
            self.process.wait()
        self.printed.close()

    async def _listen(self) -> None:
        """Take in replies, until the other end is closed or has sent something else."""
        try:
            while True:
                (num_bytes,) = HEADER.unpack(await self._received(HEADER.size))
                if num_bytes > MAX_REPLY_BYTES:
                    raise ValueError(f"a reply of {num_bytes:,} bytes, more than {MAX_REPLY_BYTES:,}")
                reply = json.loads(await self._received(num_bytes))
                if not isinstance(reply, dict):
                    raise ValueError(reprlib.repr(reply))
                if len(self.replies) == (len(self.going) if self._is_ready else 1):
                    raise ValueError("a reply that nobody asked for")
                self.replies.append(reply)
                self.wake.set()
        except (ValueError, RecursionError) as error:  # user code wrote to the socket
            self._wrong = f"the worker process sent something that is no verdict: {error}"
        except (EOFError, OSError):
            pass
        finally:
            self.wake.set()

    async def _received(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += (piece := await self._loop.sock_recv(self._socket, num_bytes - len(data)))
            if not piece:
                raise EOFError
        return data

    async def _exited(self, timeout_s: float | None) -> None:
        """Wait until the process has ended. It is not reaped yet: nothing else can have its id."""
        look: Callable[[], object] = self.process.poll
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            look = partial(os.waitid, os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        with contextlib.suppress(TimeoutError, ChildProcessError):
            async with asyncio.timeout(timeout_s):
                while look() is None:
                    await asyncio.sleep(0.005)

    async def _epitaph(self) -> str:
        """Why the process is lost. Stops it first, so that its exit code is known."""
        if self._setup.sandbox and not self._wrong:
            await self._exited(GRACE_S)  # what started it ends a little later
        await self.stop()
        code = self.process.returncode
        code = 128 - code if self._setup.sandbox and code > 128 else code
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return self._wrong or f"the worker process ended ({how})"


class JudgePool:
    """`num_workers` processes that judge completions with one function (implements `Judge`)."""

    def __init__(self, setup: Setup, *, num_workers: int, retries: int) -> None:
        self._setup, self._num_workers, self._retries = setup, num_workers, retries
        self._workers: list[JudgeProcess] = []
        self._servers: list[asyncio.Task[None]] = []
        self._queue: deque[Job] = deque()
        self._unfinished: set[Job] = set()
        self._broken: Exception | None = RewardError("the reward workers are not started")
        self.num_retried = self.num_workers_replaced = 0

    async def start(self) -> None:
        self._workers = [JudgeProcess(self._setup) for _ in range(self._num_workers)]
        self._servers = [asyncio.create_task(worker.prepare()) for worker in self._workers]
        try:
            await asyncio.gather(*self._servers)
        except BaseException:
            await self.close()
            raise
        self._broken = None
        self._servers = [asyncio.create_task(self._serve(slot)) for slot in range(self._num_workers)]

    async def run(self, completion: Judged) -> Score:
        blob = pickled(completion)
        return await self.judge(blob) if isinstance(blob, bytes) else blob

    async def judge(self, blob: bytes) -> Score:
        if self._broken is not None:
            raise self._broken
        job = Job(blob, asyncio.get_running_loop().create_future())
        self._unfinished.add(job)
        try:
            self._enqueue([job])
            return await job.done
        finally:
            self._unfinished.discard(job)

    async def close(self) -> None:
        """End the workers and reap them. May be called twice."""
        self._break(RewardError("the reward workers are closed"))
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        await asyncio.gather(*(worker.stop(gently=True) for worker in self._workers))

    async def _serve(self, slot: int) -> None:
        try:
            while True:
                worker = self._workers[slot]
                if not self._queue:
                    await worker.woken()
                elif worker.ended or not await self._judge(worker):
                    self.num_workers_replaced += 1
                    await worker.stop()
                    self._workers[slot] = JudgeProcess(self._setup)
                    await self._workers[slot].prepare()
        except Exception as error:  # for the callers of `run`: nobody awaits this task
            self._break(error)

    def _take(self, worker: JudgeProcess) -> list[Job]:
        """The next jobs for this worker, leaving a share of the queue to the other workers."""
        mode, num_going = worker.mode, len(worker.going)
        plays = mode == "async" and self._setup.setting.startswith("episode.")
        num_wanted = (MAX_PLAYING if plays else MAX_GOING[mode]) - num_going if worker.takes_more() else 0
        if mode != "batch" and self._num_workers > 1:
            num_wanted = min(num_wanted, 1 + len(self._queue) // (2 * self._num_workers))
        jobs: list[Job] = []
        while self._queue and len(jobs) < num_wanted:
            if self._queue[0].suspect and (jobs or num_going):
                break
            job = self._queue.popleft()
            if not job.done.done():  # the caller may have been cancelled
                jobs.append(job)
                num_wanted = 1 if job.suspect else num_wanted
        return jobs

    async def _judge(self, worker: JudgeProcess) -> bool:
        """Send jobs and book the replies until the worker is idle; False if the worker is lost.

        Functions that are called one at a time get a chunk of jobs, the next when all are judged.
        New jobs join coroutines at any time: one slow verdict does not delay others.
        """
        late = f"no verdict in {self._setup.timeout_s:g} s"
        try:
            while True:
                if jobs := self._take(worker):
                    joining = dict(enumerate(jobs, worker.num_sent))
                    worker.going |= joining
                    worker.num_sent += len(jobs)
                    blobs = {item: job.blob for item, job in joining.items()}
                    await worker.send(blobs, self._setup.timeout_s)
                    worker.start_timing(jobs)
                    await asyncio.sleep(0)  # let the other workers take their share first
                elif not worker.going:
                    return True
                elif (reply := await worker.receive(worker.deadline(), late)) is not None:
                    self._book(worker, reply)
        except JudgeLostError as lost:
            with contextlib.suppress(JudgeLostError):
                while worker.replies:  # from before it was lost
                    self._book(worker, worker.replies.popleft())
            left = list(worker.going.values())
            num_in_progress = 1 if worker.mode == "single" else len(left)
            score = replace(lost.score, output=worker.printed.rest(), seconds=worker.elapsed_s())
            self._queue.extendleft(reversed(left[num_in_progress:]))
            self._enqueue([])  # the others wake up
            for job in left[:num_in_progress]:
                job.suspect = worker.mode != "single"
                self._settle(job, score, again=True)
            return False

    def _book(self, worker: JudgeProcess, reply: dict[str, Any]) -> None:
        item = reply.get("item")
        if type(item) is not int or item not in worker.going:  # True and 1.0 are equal to 1
            worker.replies.clear()
            detail = f"the worker process sent a verdict on an unknown answer: {reprlib.repr(item)}"
            raise JudgeLostError(DropReason.REWARD_ERROR, detail)
        job, score = worker.going.pop(item), score_of(reply, worker.output())
        if worker.mode != "async":  # the next one in the chunk starts now
            worker.start_timing(list(worker.going.values())[:1])
        is_passing = score.failure in (DropReason.REWARD_TIMEOUT, DropReason.REWARD_UNAVAILABLE)
        self._settle(job, score, again=is_passing)

    def _settle(self, job: Job, score: Score, *, again: bool) -> None:
        """Try the job `again`, if it has tries left; else this is its score."""
        if not again or job.tries >= self._retries:
            if not job.done.done():  # the caller may have been cancelled
                job.done.set_result(score)
            return
        job.tries += 1
        self.num_retried += 1
        if score.failure is DropReason.REWARD_UNAVAILABLE:  # an immediate retry would fail too
            pause_s = PAUSE_S * 2 ** (job.tries - 1)
            asyncio.get_running_loop().call_later(pause_s, self._enqueue, [job])
        else:
            self._enqueue([job])

    def _enqueue(self, jobs: Iterable[Job]) -> None:
        self._queue.extend(jobs)
        for worker in sorted(self._workers, key=lambda w: len(w.going)):  # least busy first
            worker.wake.set()

    def _break(self, error: Exception) -> None:
        self._broken = error
        self._queue.clear()
        for job in self._unfinished:
            if not job.done.done():
                job.done.set_exception(error)


def isolated(argv: list[str], setup: Setup) -> contextlib.AbstractContextManager[tuple[list[str], list[int]]]:
    """The command that starts a worker, perhaps in a sandbox, and the files to start it with."""
    if not setup.sandbox:
        return contextlib.nullcontext((argv, []))
    folders, place = user_folders(), setup.function.rpartition(":")[0]
    code = [os.path.abspath(os.path.expanduser(place))] if names_file(place) else []
    folders |= {os.path.dirname(os.path.realpath(path)) for path in code}
    shown = [path for path in search_path() if os.path.realpath(path) not in folders]
    shown += [*code, *(path for folder in folders for path in _code_in(folder))]
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    here, hidden = os.getcwd(), setup.hidden
    return enclosed(argv, LIMITS, read_only=shown, hidden=hidden, env=env, cwd=here, disk_mb=DISK_MB)


def _code_in(folder: str) -> Iterator[str]:
    """Modules and packages. Other files of a folder may be anything: data, keys, runs."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            package = entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))
            readable = os.geteuid() != 0 or entry.stat().st_mode & 0o004
            if readable and (package or (entry.is_file() and entry.name.endswith((".py", ".so")))):
                yield entry.path


def own_copy(judged: Judged) -> Judged:
    """A copy for user code: it cannot change the fields, and they are no read-only view, which cannot be pickled."""
    if isinstance(judged, Command):
        return judged
    if isinstance(judged, Completion):
        return replace(judged, fields=dict(judged.fields))
    return replace(judged, prompt=replace(judged.prompt, fields=dict(judged.prompt.fields)))


def pickled(judged: Judged) -> bytes | Score:
    """What workers are sent, each by itself: a field that cannot be pickled fails this one only."""
    try:
        return pickle.dumps(own_copy(judged))
    except Exception as error:  # pickling runs the fields' own code
        return failure(f"the prompt's fields cannot be pickled for a worker process: {error!r}")

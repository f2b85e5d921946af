"""Every socket (interface) of the system: what can be done in several ways, or elsewhere.

Rollout and learner are asked through *ports*, the sockets `Sampler` and `Trainer`. An object behind
a port lives in a worker, in this process or in another one. One rule says where its methods run:

    def         in the worker's device thread, one at a time, so between two decode steps
    async def   on the worker's event loop, at once, while the device computes

A worker is asked by the port's own function, so that types are checked and calls can be followed:

    worker.ask(Sampler.commit, version)     # await it, or `.result(timeout_s)` in a thread
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from headrace.config import Config
from headrace.measured import Mismatch, PolicyFacts, PublishTimes, Row, Sample, StepStats
from headrace.types import Example, FloatArray, Group, IntArray, Item, News, Order, Score, Ticket, Trajectory

if TYPE_CHECKING:  # holds tensors, and this file needs no torch
    from torch import Tensor

    from headrace.publish.encoding import Payload

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Port = TypeVar("Port")
Port_co = TypeVar("Port_co", covariant=True)
Judged_contra = TypeVar("Judged_contra", contravariant=True)  # a `Completion`, or a `Command`


# ---- rollout, learner, judges


class Sampler(Protocol):
    """Samples answers: the embedded engine, another engine, or a script."""

    async def take(self, orders: Sequence[Order]) -> None:
        """Sample these, too. If an order cannot be taken, the next `news` raises."""

    async def news(self) -> News:
        """What happened since the last call; returns when there is something, or after a second."""

    async def abort(self, serials: Sequence[int]) -> None:
        """End what is left of these groups; what they have sampled comes as `news`."""

    async def forget(self, sessions: Sequence[str]) -> None:
        """These episodes are over: no turn will go on from their cache."""

    async def tell_under_way(self) -> None:
        """The next `news` tells what unfinished answers have sampled, too."""

    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        """The likeliest next token and its log-prob, of each engine that has room, computed as for a request."""

    def release_cache(self) -> None:
        """Free the KV cache until the next decode step, for a learner on the same device."""

    async def stage(self, ticket: Ticket, timeout_s: float) -> None:
        """Fetch the weights of a version and verify them; sampling goes on with the old ones."""

    def commit(self, version: int) -> float:
        """From the next decode step on `version` samples. Returns the seconds that fetching took."""

    async def abandon(self, version: int) -> None:
        """Forget a staged version and stay with the old one."""


class Trainer(Protocol):
    """One rank of the learner. All ranks compute together: they get the same calls in one order."""

    async def alive(self) -> bool:
        """Answers even while the device waits for other ranks."""

    def warm_up(self, examples: Sequence[Sequence[Example]]) -> list[float]:
        """Supervised steps, one batch of worked examples each, before the first real one; the losses."""

    def address(self) -> tuple[str, int]:
        """Host and port of the store at which the ranks meet; the rank that is asked serves it."""

    def meet(self, host: str, port: int) -> PolicyFacts:
        """Load the policy, sharded among the ranks; facts about it."""

    def accumulate(self, items: Sequence[Item]) -> None:
        """Forward and backward over this rank's part of a micro-batch."""

    def finish(self) -> StepStats:
        """The optimizer step."""

    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Log-probs of the sampled tokens under the reference, of this rank's part of a group."""

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        """How far the learner's log-probs are from the behaviour's. Trains nothing."""

    def next_logprob(self, prompt: IntArray, token: int) -> float:
        """Log-prob of `token` after `prompt`, as training computes it."""

    def snapshot(self, *, reference: bool = False) -> None:
        """Copy what a checkpoint holds of this rank (or its reference), for `write`."""

    async def write(self, directory: Path) -> None:
        """Write the copies into `directory`, beside the training."""

    def load(self, directory: Path, version: int, *, reference: bool = False) -> None:
        """Continue from a checkpoint's tensors (or take them as the reference's)."""

    def save(self, directory: Path) -> None:
        """Write the whole policy; the first rank does, with the parts of all."""

    def offer(self, version: int, nodes: Sequence[str]) -> Ticket | None:
        """Make a version ready for receivers on `nodes`. The first rank returns the ticket."""

    async def send(self, ticket: Ticket, timeout_s: float) -> None:
        """The sender's part of a transfer, while receivers fetch."""

    async def offered(self, version: int, wanted: Sequence[int]) -> PublishTimes:
        """Receivers hold the version. Those that are late still fetch the `wanted` ones."""

    async def withdraw(self, version: int) -> None:
        """Withdraw an offered version; receivers keep the old one."""

    def catch_up(self, nodes: Sequence[str]) -> list[Ticket]:
        """Tickets that bring receivers without weights to the published version."""


class Judge(Protocol[Judged_contra]):
    """Judges answers, or plays environments: in this process, beside it, or on a cluster."""

    num_retried: int  # further tries after a crash or a timeout
    num_workers_replaced: int  # processes that ended or had to be ended

    async def start(self) -> None:
        """Raises if the user's function or class cannot be loaded."""

    async def run(self, judged: Judged_contra, /) -> Score:
        """A completion's reward, an environment's answer to a command (`value`), or a `failure`."""

    async def close(self) -> None:
        """End the processes."""


class Answers(Protocol):
    """What is asked for the answers of a group: the engines, or episodes of several turns."""

    def start(self, order: Order) -> Sequence[Future[Any]]:
        """An answer per sampling: a trajectory, or an episode's outcome."""

    def abort(self, serials: Sequence[int]) -> None:
        """End the rest of these groups; their futures give what was sampled so far."""

    async def drain(self) -> None:
        """Wait until every answer is complete."""

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished answers have sampled."""


# ---- attention: T tokens in one row, H query heads, J key/value heads, D head size


class AttentionPlan(Protocol):
    """Which tokens of a forward pass attend to which.

    Plans for a CPU take one more argument, `exact`: batch-invariant, a token's result is then
    independent of its batch. A plan of the paged cache also has `rotate_and_attend` (paged.py).
    """

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """The attention output `[T, H, D]`. A `window` of 0 sees the whole past."""


# ---- where they run


class Device(Protocol):
    """Runs one piece of work at a time in a thread of its own."""

    async def run(self, work: Callable[..., R], *args: Any) -> R:
        """The result of `work(*args)`, without blocking the event loop."""

    def call(self, work: Callable[..., R], *args: Any) -> R:
        """The same for a caller that can block."""

    def close(self, *, wait: bool = True) -> None:
        """End the thread; with `wait`, after the work under way."""


class Reply(Protocol[R_co]):
    """The pending result of a call to a worker."""

    def __await__(self) -> Generator[Any, None, R_co]: ...

    def result(self, timeout_s: float | None = None) -> R_co:
        """Wait for it in this thread."""

    def is_there(self) -> bool:
        """Whether `result` would not wait."""


class Worker(Protocol[Port_co]):
    """An object behind a port. If its process is dead or slow, calls raise `WorkerLostError`."""

    name: str
    node: str
    pid: int

    @overload
    def ask(
        self,
        method: Callable[Concatenate[Port_co, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **named: P.kwargs,
    ) -> Reply[R]: ...

    @overload
    def ask(self, method: Callable[Concatenate[Port_co, P], R], *args: P.args, **named: P.kwargs) -> Reply[R]:
        """Call the object's method of that name."""

    def beside(self, make: Callable[..., Port], *args: Any) -> Worker[Port]:
        """`make(device, *args, this object)` in the same process: both share its device thread."""

    async def ready(self) -> None:
        """Wait until the object is made."""

    def wait_ready(self) -> None:
        """The same in a thread."""

    def kill(self) -> None:
        """End the process at once."""


class Cluster(Protocol):
    """Where workers live."""

    num_gpus: int
    num_nodes: int

    @property
    def device(self) -> Device:
        """The thread in which this process waits for workers; in-process workers compute in it."""

    def spawn(self, name: str, make: Callable[..., Port], *args: Any, gpus: float = 0.0) -> Worker[Port]:
        """A worker that serves `make(device, *args)`. Its first call raises start-up errors."""

    def gather(self, answers: Sequence[Reply[R]]) -> list[R]:
        """All results, in a thread; the first failure is raised without waiting for the others."""

    def close(self) -> None:
        """End all workers, and the cluster if it is this run's own."""


class SendingEnd(Protocol):
    """The learner's side of a transport for weights."""

    def expect(self, nodes: Sequence[str]) -> None:
        """The node of every receiver from now on, one entry each. Earlier tickets are void."""
        return  # unless the transport must know

    def stage(self, payload: Payload) -> None:
        """Make a payload ready to be fetched, until `forget`."""

    def ticket(self, version: int) -> Ticket:
        """For a staged version and the receivers expected now."""

    def send(self, ticket: Ticket, timeout_s: float) -> None:
        """The sender's part while receivers fetch, if there is one."""
        return

    def forget(self, version: int) -> None:
        """Nobody will fetch the version any more."""


class ReceivingEnd(Protocol):
    """A sampler's side of a transport for weights."""

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        """The payload, whole and verified, or a `PublishError`."""


# ---- in and out


class PromptSource(Protocol):
    """Raw prompt records: a file, a data set, a generator. Index `i` always gives the same record.

    A record has `prompt` (text) or `messages` (a chat), perhaps an `id`, and fields for the reward.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Mapping[str, Any]: ...


class Watcher:
    """Who is told about a run's progress: the terminal, or nobody. It ignores everything itself."""

    def header(self, config: Config, run_dir: Path, facts: Mapping[str, str]) -> None:
        """The run begins; `facts` are lines to show."""

    def phase(self, text: str) -> None:
        """A phase begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """How far the phase is."""

    def row(self, row: Row) -> None:
        """A step is done."""

    def sample(self, sample: Sample) -> None:
        """An answer to look at."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Sink(Watcher):
    """Where rows and samples are exported to, besides the ledger itself."""

    def close(self) -> None:
        """Write what is still held back."""

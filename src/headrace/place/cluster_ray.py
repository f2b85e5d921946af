"""Workers on a Ray cluster: one that runs already, or one that starts and stops with the run."""

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from headrace.errors import ConfigError, HeadraceError, WorkerLostError
from headrace.place.device import STEPS, DeviceThread, memory_for
from headrace.roles import R, Reply

START_TIMEOUT_S = 300.0  # until a worker's process is up and its model loaded


class _Host:
    """The Ray actor of a worker: holds the objects that are served, and their device thread.

    If an object cannot be made, every call raises that error. (Of an error in an actor's
    constructor, Ray passes on only the text.)
    """

    def __init__(self, directory: str, make: Callable[..., Any], *args: Any) -> None:
        if os.path.isdir(directory):  # paths in settings are relative to it
            os.chdir(directory)
        self._device = DeviceThread()
        self._served: list[Any] = []
        self._failure: Exception | None = None
        self._serve(make, *args)

    async def whereabouts(self) -> tuple[str, int]:
        self._check()
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    async def serve_beside(self, make: Callable[..., Any], *args: Any) -> tuple[str, int]:
        self._check()
        await asyncio.to_thread(self._serve, make, *args, self._served[0])
        return await self.whereabouts()

    async def ask(self, place: int, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._check()
        with memory_for("training", STEPS):
            bound = getattr(self._served[place], method)
            if inspect.iscoroutinefunction(bound):
                return await bound(*args, **named)
            return await asyncio.wrap_future(self._device.submit(bound, *args, **named))

    def _serve(self, make: Callable[..., Any], *args: Any) -> None:
        try:
            with memory_for("the start of a worker", STEPS):
                self._served.append(make(self._device, *args))
        except Exception as error:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class RayReply:
    """An object reference, with errors in our words."""

    def __init__(self, ref: Any, worker: str) -> None:
        self.ref, self.worker = ref, worker

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self.ref.__await__())
        except RayError as error:
            raise _in_our_words(error, self.worker) from None

    def is_there(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0)[0])

    def result(self, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(self.ref, timeout=timeout_s)
        except GetTimeoutError:
            raise WorkerLostError(f"{self.worker} did not answer within {timeout_s:g} s") from None
        except RayError as error:
            raise _in_our_words(error, self.worker) from None


class RayWorker:
    """One object in a process of the cluster; the first of that process, or one beside it."""

    def __init__(self, name: str, handle: Any, place: int = 0, made: Any = None) -> None:
        self.name, self.node, self.pid = name, "", 0
        self._handle, self._place = handle, place
        self._made = RayReply(made or handle.whereabouts.remote(), name)

    def ask(self, method: Callable[..., Any], *args: Any, **named: Any) -> RayReply:
        ref = self._handle.ask.remote(self._place, method.__name__, args, named)
        return RayReply(ref, self.name)

    def beside(self, make: Callable[..., Any], *args: Any) -> "RayWorker":
        return RayWorker(self.name, self._handle, self._place + 1, self._handle.serve_beside.remote(make, *args))

    async def ready(self) -> None:
        self.node, self.pid = await self._made

    def wait_ready(self) -> None:
        self.node, self.pid = self._made.result(START_TIMEOUT_S)

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)


class RayCluster:
    """All workers of one run."""

    def __init__(self) -> None:
        address = os.environ.get("RAY_ADDRESS", "")
        self._own = not ray.is_initialized()
        self.device = DeviceThread()  # here the run waits for workers
        self._workers: list[RayWorker] = []
        if self._own:
            # messages that are not for the user of a training run
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            logging.getLogger("ray").setLevel(logging.ERROR)
            search = os.pathsep.join(path for path in sys.path if path)
            try:
                ray.init(
                    address=address or "local",
                    include_dashboard=None if address else False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": {"PYTHONPATH": search}},
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                what = f"RAY_ADDRESS = '{address}' cannot be reached"
                raise ConfigError(f"{what if address else 'Ray cannot be started'}: {error}") from error
        self.num_nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
        self.num_gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

    def spawn(self, name: str, make: Callable[..., Any], *args: Any, gpus: float = 0.0) -> RayWorker:
        host = ray.remote(_Host).options(
            num_cpus=0, num_gpus=gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        worker = RayWorker(name, host.remote(os.getcwd(), make, *args))
        self._workers.append(worker)
        return worker

    def gather(self, answers: Sequence[Reply[R]]) -> list[R]:
        by_ref = {answer.ref: answer for answer in answers if isinstance(answer, RayReply)}
        left = list(by_ref)
        while left:
            (done,), left = ray.wait(left)
            by_ref[done].result()
        return [answer.result() for answer in answers]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        if self._own:
            ray.shutdown()


def _in_our_words(error: RayError, worker: str) -> BaseException:
    """The error that the worker raised, or a WorkerLostError if it died."""
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, HeadraceError)
        return error.cause if known else RuntimeError(f"{worker} failed:\n{error}")
    why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, ActorDiedError):
        why = "its process or its node died"
    return WorkerLostError(f"{worker} is lost: {why}")

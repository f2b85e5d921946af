"""A cluster whose workers are objects of this process. They share its device thread with the loop.

A call from the device thread is a plain function call, so the loop's update (optimizer step, new
version, check) runs between two decode steps without a queue in between.
"""

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Generic

from headrace.errors import WorkerLostError
from headrace.loop.watchdog import background
from headrace.place.device import DeviceThread
from headrace.roles import Port, Port_co, R, Reply, Worker


class InlineReply(Generic[R]):
    """The future of a call, awaited on the event loop or waited for in a thread."""

    def __init__(self, future: Future[R] | asyncio.Task[R], worker: str) -> None:
        self._future, self._worker, self.is_there = future, worker, future.done

    def __await__(self) -> Generator[Any, None, R]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout_s: float | None = None) -> R:
        if not isinstance(self._future, Future):
            return self._future.result()
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():  # the call itself raised it
                raise
            raise WorkerLostError(f"{self._worker} did not answer within {timeout_s:g} s") from None


class InlineWorker(Generic[Port_co]):
    """Serves one object."""

    def __init__(self, name: str, cluster: "InlineCluster", served: Port_co) -> None:
        self.name, self.node, self.pid = name, "", os.getpid()
        self._cluster, self.served = cluster, served

    def ask(self, method: Callable[..., Any], *args: Any, **named: Any) -> InlineReply[Any]:
        bound = getattr(self.served, method.__name__)
        if inspect.iscoroutinefunction(bound):
            return InlineReply(self._cluster.schedule(bound(*args, **named)), self.name)
        return InlineReply(self._cluster.device.submit(bound, *args, **named), self.name)

    def beside(self, make: Callable[..., Port], *args: Any) -> Worker[Port]:
        return self._cluster.spawn(self.name, make, *args, self.served)

    async def ready(self) -> None:
        """A worker is ready when it is made."""

    def wait_ready(self) -> None:
        """A worker is ready when it is made."""

    def kill(self) -> None:
        """Nothing to do: it ends with the cluster."""


class InlineCluster:
    """All workers of one run, in this process."""

    num_nodes = 1
    num_gpus = 0  # none to share out: workers use `model.device`

    def __init__(self) -> None:
        self.device = DeviceThread()
        self._events = asyncio.get_running_loop()  # the run's
        self._tasks: set[asyncio.Task[Any]] = set()
        self._served: list[Any] = []

    def spawn(self, name: str, make: Callable[..., Port], *args: Any, gpus: float = 0.0) -> InlineWorker[Port]:
        self._served.append(served := make(self.device, *args))
        return InlineWorker(name, self, served)

    def schedule(self, work: Coroutine[Any, Any, R]) -> Future[R] | asyncio.Task[R]:
        """Start a coroutine on the run's event loop; called there or in another thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(work, self._events)
        return background(work, self._tasks)

    def gather(self, answers: Sequence[Reply[R]]) -> list[R]:
        return [answer.result() for answer in answers]

    def close(self) -> None:
        """Stop the workers' coroutines. `Place` closes the device thread."""
        for task in self._tasks:
            task.cancel()
        for served in self._served:
            if (close := getattr(served, "close", None)) is not None:
                close()

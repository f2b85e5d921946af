"""What a place knows of the workers that it talks to, whatever brings the words to them.

A worker is an object in another process. `ask` calls one of its methods: the answer can be awaited, or waited for in a
thread. A worker that died, or does not answer in time, is lost (`WorkerLostError`); what it raises is raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from headrace.errors import HeadraceError


class WorkerLostError(HeadraceError):
    """A worker died or cannot be reached."""


class LearnerLostError(HeadraceError):
    """A rank of the learner is gone, and with it a part of the weights: the run goes on from its last checkpoint."""


class Answer(Protocol):
    """What a worker was asked for."""

    def __await__(self) -> Generator[Any, None, Any]: ...

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for it in this thread."""
        ...


class Worker(Protocol):
    """An object in another process."""

    name: str
    node: str  # that its process runs on
    pid: int

    def ask(self, method: str, *args: Any) -> Answer:
        """Call a method there."""
        ...

    async def ready(self) -> None:
        """Wait until its object is made."""
        ...

    def wait_ready(self) -> None:
        """The same, in a thread."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...


class Cluster(Protocol):
    """Where workers live."""

    num_gpus: int
    num_nodes: int

    def spawn(self, name: str, make: Callable[..., Any], *args: Any, gpus: float = 0.0) -> Worker:
        """A process that serves `make(*args)`. It may not be up yet: what keeps it from it, the first answer says."""
        ...

    def first_failure(self, answers: Sequence[Answer], timeout_s: float | None = None) -> list[Any]:
        """All results; as soon as one fails its error is raised, without waiting for the others."""
        ...

    def close(self) -> None:
        """End all workers, and the cluster if it is this run's own."""
        ...

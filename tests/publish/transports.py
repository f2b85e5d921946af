"""What the contract needs of a transport: both ends, a way to tear a publication, and processes that can be killed."""

from __future__ import annotations

import multiprocessing.connection
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

import torch
from small_weights import Weights, published

from headrace.errors import PublishError
from headrace.publish.collective import CollectiveReceiver, CollectiveSender
from headrace.publish.disk import COMPLETE, DiskReceiver, DiskSender
from headrace.publish.encoding import Encoder
from headrace.publish.publisher import Publisher, Subscriber
from headrace.roles import ReceivingEnd, SendingEnd
from headrace.types import Ticket

PATIENCE_S = 60.0  # for what should succeed, on a busy machine
SHORT_S = 0.7  # for what should not


class Elsewhere(Protocol):
    """A process that does something until it is killed."""

    def hear(self) -> Any:
        """The next thing that it says."""
        ...

    def kill(self) -> None: ...


class Frame(Protocol):
    """One transport."""

    def sender(self) -> SendingEnd: ...

    def receiver(self) -> ReceivingEnd: ...

    def elsewhere(self, work: Callable[..., None], *args: Any) -> Elsewhere:
        """Call `work(say, frame, *args)` in a process of its own."""
        ...

    def tear(self, ticket: Ticket) -> None:
        """As if the sender had died before it was done."""
        ...

    def close(self) -> None: ...


class Process:
    """A child of this process."""

    def __init__(self, context: ForkServerContext, work: Callable[..., None], *args: Any) -> None:
        self._ear, mouth = context.Pipe(duplex=False)
        self._process = context.Process(target=_in_child, args=(mouth, work, *args), daemon=True)
        self._process.start()
        mouth.close()

    def hear(self) -> Any:
        assert self._ear.poll(PATIENCE_S), "the process says nothing"
        return self._ear.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._ear.close()


def _in_child(mouth: multiprocessing.connection.Connection, work: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    work(mouth.send, *args)


class _Local:
    """Processes are children, and are killed at the end."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self._children: list[Process] = []
        self._ends: list[Any] = []

    def elsewhere(self, work: Callable[..., None], *args: Any) -> Process:
        self._children.append(Process(self._context, work, self._twin(), *args))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            child.kill()

    def _twin(self) -> Frame:
        raise NotImplementedError


class DiskFrame(_Local):
    def __init__(self, context: Any, directory: Path) -> None:
        super().__init__(context)
        self._directory = directory

    def sender(self) -> SendingEnd:
        self._ends.append(DiskSender(self._directory))
        return self._ends[-1]  # type: ignore[no-any-return]

    def receiver(self) -> ReceivingEnd:
        return DiskReceiver()

    def tear(self, ticket: Ticket) -> None:
        path = Path(ticket.where)
        (path / COMPLETE).unlink()
        for file in path.iterdir():
            file.write_bytes(file.read_bytes()[:-1])

    def _twin(self) -> Frame:
        return DiskFrame(None, self._directory)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory)


class CollectiveFrame(_Local):
    def __init__(self, context: Any) -> None:
        super().__init__(context)

    def sender(self) -> SendingEnd:
        self._ends.append(CollectiveSender())
        return self._ends[-1]  # type: ignore[no-any-return]

    def receiver(self) -> ReceivingEnd:
        self._ends.append(CollectiveReceiver())
        return self._ends[-1]  # type: ignore[no-any-return]

    def tear(self, ticket: Ticket) -> None:
        self._ends[0].forget(ticket.version)
        self._ends[0].expect([""] * ticket.where.num_receivers)

    def _twin(self) -> Frame:
        return CollectiveFrame(None)


class Audience:
    """A publisher, and subscribers in threads of this process."""

    def __init__(self, frame: Frame, kind: str, lives: Sequence[Weights]) -> None:
        self.frame, self.kind, self.lives = frame, kind, list(lives)
        self.end = frame.sender()
        self.publisher = Publisher(Encoder(kind, bucket_bytes=1000), self.end)
        self.subscribers = [Subscriber(frame.receiver(), live) for live in lives]
        self.publisher.expect([""] * len(lives))

    def deliver(self, ticket: Ticket, timeout_s: float = PATIENCE_S) -> list[str]:
        """Stage a version at every subscriber; returns what went wrong."""
        return deliver(self.publisher, ticket, self.subscribers, timeout_s)

    def publish(self, version: int, weights: Weights) -> None:
        """A whole publication that must succeed."""
        problems = self.deliver(self.publisher.stage(version, published(self.kind, weights).items()))
        assert not problems
        for subscriber in self.subscribers:
            subscriber.commit(version)
        self.publisher.commit(version)


def deliver(
    publisher: Publisher, ticket: Ticket, subscribers: Sequence[Subscriber], timeout_s: float = PATIENCE_S
) -> list[str]:
    """Send and fetch at the same time; returns what went wrong, and checks that nobody waits much longer than told."""
    started = time.monotonic()
    problems = []
    with ThreadPoolExecutor(len(subscribers) + 1) as pool:
        jobs = [pool.submit(subscriber.stage, ticket, timeout_s) for subscriber in subscribers]
        jobs.append(pool.submit(publisher.send, ticket, timeout_s))
        for job in jobs:
            try:
                job.result()
            except PublishError as error:
                problems.append(str(error))
    assert time.monotonic() - started < timeout_s + 5.0
    return problems

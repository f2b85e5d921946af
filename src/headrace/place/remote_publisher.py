"""New weights from the learner's ranks to the rollout workers, as one transaction.

A version is staged by all, checked by all, and only then taken by all. A worker that cannot take part is given up: what
it owed is sampled elsewhere, and a new one catches up. Should nobody get the version, everybody stays with the old one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace.config import PublishSection
from headrace.errors import PublishError
from headrace.ledger.clock import StageClock
from headrace.place.remote_trainer import RemoteTrainer
from headrace.place.workers import Answer, Worker, WorkerLostError
from headrace.publish.publisher import OPERATIONS, with_receivers
from headrace.types import PublishTimes, StageSpan, Ticket

TRIES = 3
LEADER = "learner-0"
GRACE_S = 10.0  # more than the workers' own limit: they say themselves what is wrong


class RemotePublisher:
    """Called in the device thread; workers join from threads of their own, one at a time and never during a commit."""

    def __init__(
        self,
        trainer: RemoteTrainer,
        section: PublishSection,
        clock: StageClock,
        *,
        workers: Callable[[], list[Worker]],
        give_up: Callable[[Worker, str], None],
    ) -> None:
        self.moved_bytes = 0
        self.version: int | None = None
        self._trainer, self._section, self._clock = trainer, section, clock
        self._workers, self._give_up = workers, give_up
        self._lock = threading.Lock()

    def commit(self, version: int) -> None:
        """The learner's weights became `version`: all workers sample with them from here on."""
        with self._lock:
            workers = self._staged_by_all(version)
            answers = {worker: worker.ask("commit", version) for worker in workers}
            received = self._heard(answers)
            times: PublishTimes = self._first("offered", version)
            self.version = version
        self._book(version, with_receivers(times, received.values()), len(workers))

    def welcome(self, worker: Worker, admit: Callable[[Worker], None]) -> None:
        """Bring a new worker to the present version, then let it in. Raises `WorkerLostError` where that fails."""
        with self._lock:
            if self.version is not None:
                for ticket in self._first("catch_up", [worker.node]):
                    self._deliver(ticket, [worker])
                    worker.ask("commit", ticket.version).result(self._limit_s)
            admit(worker)

    def farewell(self, worker: Worker, leave: Callable[[Worker], None]) -> None:
        """Let a worker go between two versions: during one, its end would be a death."""
        with self._lock:
            leave(worker)

    def _staged_by_all(self, version: int) -> list[Worker]:
        """Those that hold it, checked. If none is left, there is nobody to wait for: who joins is given it then."""
        for _ in range(TRIES):
            workers = self._workers()
            ticket: Ticket = self._trainer.all("offer", version, [worker.node for worker in workers])[0]
            failed = self._deliver(ticket, workers)
            dead = {worker: why for worker, why in failed.items() if isinstance(why, WorkerLostError)}
            for worker, why in (dead or failed).items():  # a death keeps others from getting it, too
                self._give_up(worker, str(why))
            if not workers or (len(failed) < len(workers) and not (dead and len(failed) > len(dead))):
                return [worker for worker in workers if worker not in failed]
            self._first("withdraw", version)
            for worker in self._workers():
                worker.ask("abandon", version)
        reasons = "; ".join(f"{worker.name}: {why}" for worker, why in failed.items())
        raise PublishError(f"version {version} could not be published, and the old one stays: {reasons}")

    def _deliver(self, ticket: Ticket, workers: Sequence[Worker]) -> dict[Worker, Exception]:
        """The workers that did not get it, and why."""
        limit_s = self._section.timeout_s
        sending = self._trainer.ranks[0].ask("send", ticket, limit_s)
        failed: dict[Worker, Exception] = {}
        self._heard({worker: worker.ask("stage", ticket, limit_s) for worker in workers}, failed)
        try:
            sending.result(self._limit_s)
        except PublishError as error:
            if not failed:
                raise PublishError(f"version {ticket.version}: {error}") from error
        except WorkerLostError as lost:
            raise self._trainer.gone(str(lost)) from lost
        return failed

    def _heard(
        self, answers: dict[Worker, Answer], failed: dict[Worker, Exception] | None = None
    ) -> dict[Worker, PublishTimes]:
        """What those say that do; without `failed`, whoever does not is given up at once."""
        found = {}
        for worker, answer in answers.items():
            try:
                found[worker] = answer.result(self._limit_s)
            except (WorkerLostError, PublishError) as error:
                if failed is None:
                    self._give_up(worker, str(error))
                else:
                    failed[worker] = error
        return found

    def _first(self, method: str, *args: Any) -> Any:
        return self._trainer.all(method, *args, ranks=self._trainer.ranks[:1])[0]

    @property
    def _limit_s(self) -> float:
        return self._section.timeout_s + GRACE_S

    def _book(self, version: int, times: PublishTimes, num_workers: int) -> None:
        self.moved_bytes = times.transfer_bytes * num_workers
        at_s = self._clock.now() - times.total_s
        for operation in OPERATIONS[:-1]:  # what applying takes, workers book themselves
            end_s = at_s + getattr(times, f"{operation}_s")
            detail = f"{operation}, {getattr(times, f'{operation}_bytes')} bytes"
            span = StageSpan(stage="publish", start_s=at_s, end_s=end_s, version=version, worker=LEADER, detail=detail)
            self._clock.add(span)
            at_s = end_s

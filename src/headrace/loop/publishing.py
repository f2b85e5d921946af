"""New weights from the learner's ranks to the samplers, as one transaction.

A version is staged by all, verified by all, and only then taken by all. A worker that cannot take part is given up:
what it owed is sampled elsewhere, and a new one catches up. If nobody gets the version, everybody stays with the old
one. Where sampler and learner share one copy of the weights there is nothing to stage: the commit tells the engine that
its weights are new ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.config import PublishSection
from headrace.errors import PublishError, WorkerLostError
from headrace.learner.ranks import Ranks
from headrace.ledger.clock import StageClock
from headrace.publish.publisher import OPERATIONS, with_receivers
from headrace.roles import Reply, Sampler, Trainer, Worker
from headrace.types import PublishTimes, StageSpan, Ticket

TRIES = 3
LEADER = "learner-0"
R = TypeVar("R")
GRACE_S = 10.0  # more than the workers' own limit: they say themselves what is wrong


class WeightPublisher:
    """Called in the device thread; workers join from threads of their own, one at a time and never during a commit."""

    def __init__(
        self,
        ranks: Ranks,
        section: PublishSection,
        clock: StageClock,
        *,
        workers: Callable[[], list[Worker[Sampler]]],
        give_up: Callable[[Worker[Sampler], str], None],
    ) -> None:
        self.moved_bytes = 0
        self.version: int | None = None
        self._ranks, self._section, self._clock = ranks, section, clock
        self._workers, self._give_up = workers, give_up
        self._lock = threading.Lock()

    def commit(self, version: int) -> None:
        """The learner's weights became `version`: all workers sample with them from here on."""
        with self._lock:
            workers = self._staged_by_all(version)
            received = self._heard({worker: worker.ask(Sampler.commit, version) for worker in workers})
            (times,) = self._ranks.gather([self._ranks.first.ask(Trainer.offered, version)])
            self.version = version
        self._book(version, with_receivers(times, received.values()), len(workers))

    def add_receiver(self, worker: Worker[Sampler], admit: Callable[[Worker[Sampler]], None]) -> None:
        """Bring a new worker to the present version, then let it in. Raises `WorkerLostError` where that fails."""
        with self._lock:
            if self.version is not None:
                (tickets,) = self._ranks.gather([self._ranks.first.ask(Trainer.catch_up, [worker.node])])
                for ticket in tickets:
                    self._deliver(ticket, [worker])
                    worker.ask(Sampler.commit, ticket.version).result(self._limit_s)
            admit(worker)

    def remove_receiver(self, worker: Worker[Sampler], leave: Callable[[Worker[Sampler]], None]) -> None:
        """Let a worker go between two versions: during one, its end would be a death."""
        with self._lock:
            leave(worker)

    def _staged_by_all(self, version: int) -> list[Worker[Sampler]]:
        """Those that hold it, checked. If none is left, there is nobody to wait for: who joins is given it then."""
        for _ in range(TRIES):
            workers = self._workers()
            nodes = [worker.node for worker in workers]
            ticket = self._ranks.gather([rank.ask(Trainer.offer, version, nodes) for rank in self._ranks.ranks])[0]
            if ticket is None:  # one copy of the weights
                return workers
            failed = self._deliver(ticket, workers)
            dead = {worker: why for worker, why in failed.items() if isinstance(why, WorkerLostError)}
            for worker, why in (dead or failed).items():  # a death keeps others from getting it, too
                self._give_up(worker, str(why))
            if not workers or (len(failed) < len(workers) and not (dead and len(failed) > len(dead))):
                return [worker for worker in workers if worker not in failed]
            self._ranks.gather([self._ranks.first.ask(Trainer.withdraw, version)])
            for worker in self._workers():
                worker.ask(Sampler.abandon, version)
        reasons = "; ".join(f"{worker.name}: {why}" for worker, why in failed.items())
        raise PublishError(f"version {version} could not be published, and the old one stays: {reasons}")

    def _deliver(self, ticket: Ticket, workers: Sequence[Worker[Sampler]]) -> dict[Worker[Sampler], Exception]:
        """The workers that did not get it, and why."""
        limit_s = self._section.timeout_s
        sending = self._ranks.first.ask(Trainer.send, ticket, limit_s)
        failed: dict[Worker[Sampler], Exception] = {}
        self._heard({worker: worker.ask(Sampler.stage, ticket, limit_s) for worker in workers}, failed)
        try:
            sending.result(self._limit_s)
        except PublishError as error:
            if not failed:
                raise PublishError(f"version {ticket.version}: {error}") from error
        except WorkerLostError as lost:
            raise self._ranks.gone(str(lost)) from lost
        return failed

    def _heard(
        self, answers: dict[Worker[Sampler], Reply[R]], failed: dict[Worker[Sampler], Exception] | None = None
    ) -> dict[Worker[Sampler], R]:
        """Collect the answers. Workers that fail go into `failed`; without it they are given up at once."""
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

    @property
    def _limit_s(self) -> float:
        return self._section.timeout_s + GRACE_S

    def _book(self, version: int, times: PublishTimes, num_workers: int) -> None:
        self.moved_bytes = times.transfer_bytes * num_workers
        if not times.total_s:  # one copy of the weights
            return
        at_s = self._clock.now() - times.total_s
        for operation in OPERATIONS[:-1]:  # what applying takes, workers book themselves
            end_s = at_s + getattr(times, f"{operation}_s")
            detail = f"{operation}, {getattr(times, f'{operation}_bytes')} bytes"
            span = StageSpan(stage="publish", start_s=at_s, end_s=end_s, version=version, worker=LEADER, detail=detail)
            self._clock.add(span)
            at_s = end_s

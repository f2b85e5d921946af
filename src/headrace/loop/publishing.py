"""New weights from the learner's ranks to the samplers, as one transaction.

First all workers stage a version: they fetch and verify it. Then all commit it: they sample with
it. A worker that fails is given up; its answers are sampled elsewhere, and a new worker catches up.
If no worker gets the version, all keep the old one. Where engine and learner share one copy of the
weights, nothing is staged: the commit only tells the engine its new version.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.errors import PublishError, WorkerLostError
from headrace.learner.ranks import Ranks
from headrace.measured import PublishTimes, StageClock, StageSpan
from headrace.publish.publisher import OPERATIONS, with_receivers
from headrace.roles import Reply, Sampler, Trainer, Worker
from headrace.types import Ticket

TRIES = 3
LEADER = "learner-0"
R = TypeVar("R")
Failed = dict[Worker[Sampler], Exception]
GRACE_S = 10.0  # beyond the workers' own time limit, so that they can say what is wrong


@dataclass(eq=False)
class WeightPublisher:
    """Publishes in the device thread. Workers join or leave in other threads, between commits."""

    ranks: Ranks
    clock: StageClock
    timeout_s: float
    workers: Callable[[], list[Worker[Sampler]]]
    give_up: Callable[[Worker[Sampler], str], None]  # and why
    version: int | None = None
    moved_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, version: int) -> None:
        """Publish the learner's weights as `version`; returns once all workers sample with it."""
        with self._lock:
            workers, failed = self._staged_by_all(version), Failed()
            received = self._results({w: w.ask(Sampler.commit, version) for w in workers}, failed)
            for worker, why in failed.items():
                self.give_up(worker, str(why))
            (times,) = self.ranks.gather([self.ranks.first.ask(Trainer.offered, version)])
            self.version = version
        self._book(version, with_receivers(times, received), len(workers))

    def add_receiver(self, worker: Worker[Sampler], admit: Callable[[Worker[Sampler]], None]) -> None:
        """Bring a new worker to the published version, then `admit` it.

        Raises `WorkerLostError` if that fails.
        """
        with self._lock:
            if self.version is not None:
                (tickets,) = self.ranks.gather([self.ranks.first.ask(Trainer.catch_up, [worker.node])])
                for ticket in tickets:
                    self._deliver(ticket, [worker])
                    worker.ask(Sampler.commit, ticket.version).result(self.timeout_s + GRACE_S)
            admit(worker)

    def remove_receiver(self, worker: Worker[Sampler], leave: Callable[[Worker[Sampler]], None]) -> None:
        """Let a worker `leave` between two commits: during one it would count as lost."""
        with self._lock:
            leave(worker)

    def _staged_by_all(self, version: int) -> list[Worker[Sampler]]:
        """The workers that hold `version`, verified. None may be left: new ones catch up."""
        for _ in range(TRIES):
            workers = self.workers()
            nodes = [worker.node for worker in workers]
            offers = [rank.ask(Trainer.offer, version, nodes) for rank in self.ranks.ranks]
            ticket = self.ranks.gather(offers)[0]
            if ticket is None:  # engine and learner share one copy of the weights
                return workers
            failed = self._deliver(ticket, workers)
            dead = {w: why for w, why in failed.items() if isinstance(why, WorkerLostError)}
            for worker, why in (dead or failed).items():  # a dead worker makes others fail, too
                self.give_up(worker, str(why))
            if not workers or (len(failed) < len(workers) and not (dead and len(failed) > len(dead))):
                return [worker for worker in workers if worker not in failed]
            self.ranks.gather([self.ranks.first.ask(Trainer.withdraw, version)])
            for worker in self.workers():
                worker.ask(Sampler.abandon, version)
        reasons = "; ".join(f"{worker.name}: {why}" for worker, why in failed.items())
        raise PublishError(f"version {version} was not published, and the old one stays: {reasons}")

    def _deliver(self, ticket: Ticket, workers: Sequence[Worker[Sampler]]) -> Failed:
        """Send the ticket's version to `workers`; returns those that did not get it, and why."""
        sending = self.ranks.first.ask(Trainer.send, ticket, self.timeout_s)
        failed: Failed = {}
        self._results({w: w.ask(Sampler.stage, ticket, self.timeout_s) for w in workers}, failed)
        try:
            sending.result(self.timeout_s + GRACE_S)
        except PublishError as error:
            if not failed:
                raise PublishError(f"version {ticket.version}: {error}") from error
        except WorkerLostError as lost:
            raise self.ranks.gone(str(lost)) from lost
        return failed

    def _results(self, replies: dict[Worker[Sampler], Reply[R]], failed: Failed) -> list[R]:
        """The results of `replies`; workers that raise instead go into `failed`."""
        found = []
        for worker, reply in replies.items():
            try:
                found.append(reply.result(self.timeout_s + GRACE_S))
            except (WorkerLostError, PublishError) as error:
                failed[worker] = error
        return found

    def _book(self, version: int, times: PublishTimes, num_workers: int) -> None:
        self.moved_bytes = times.transfer_bytes * num_workers
        if not times.total_s:  # engine and learner share one copy of the weights
            return
        end_s = self.clock.now() - times.total_s
        for operation in OPERATIONS[:-1]:  # the last is `apply`: workers book it themselves
            start_s, end_s = end_s, end_s + getattr(times, f"{operation}_s")
            detail = f"{operation}, {getattr(times, f'{operation}_bytes')} bytes"
            span = StageSpan(
                stage="publish", start_s=start_s, end_s=end_s, version=version, worker=LEADER, detail=detail
            )
            self.clock.add(span)

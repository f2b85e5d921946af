"""New weights from the learner's ranks to the samplers, as one transaction.

First the ranks offer a version: they gather and encode it. Then, while they train on, it is
delivered: the workers stage it (fetch and verify), and then commit it (sample with it). One that is
late keeps what it has, and takes versions at its own pace until it has the newest: nobody waits for
it. A worker that fails is given up; its answers are sampled elsewhere, and a new worker catches up.
If no worker gets the version, all keep the old one. Where engine and learner share one copy of the
weights, nothing is to be delivered: the offer tells the engine its new version.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headrace.errors import PublishError, WorkerLostError
from headrace.learner.ranks import Ranks
from headrace.measured import PublishTimes, StageClock, StageSpan
from headrace.roles import Reply, Sampler, Trainer, Worker
from headrace.rollout.pool import RolloutPool
from headrace.types import Ticket

TRIES = 3
LEADER = "learner-0"
Failed = dict[Worker[Sampler], Exception]
Staging = dict[Worker[Sampler], Reply[None]]
GRACE_S = 10.0  # beyond the workers' own time limit, so that they can say what is wrong
LATE_S = 0.25  # a worker is late that needs so much longer than twice the time of the first
LOOK_S = 0.005


@dataclass(eq=False)
class WeightPublisher:
    """Versions are offered in the device thread. Workers join or leave in others, between deliveries."""

    ranks: Ranks
    clock: StageClock
    timeout_s: float
    pool: RolloutPool
    give_up: Callable[[Worker[Sampler], str], None]  # and why
    bring: Callable[..., None] | None  # calls `follow` in a thread, with what it gets; None: wait for all
    version: int | None = None
    pending: Ticket | None = None  # offered, to be delivered
    moved_bytes: int = 0
    _receivers: list[Worker[Sampler]] = field(default_factory=list)  # of what is offered
    _late: dict[Worker[Sampler], list[int]] = field(default_factory=dict)  # and what they fetch
    _begun_s: float = 0.0  # when it was begun to be
    _tries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def commit(self, version: int) -> None:
        """Offer and deliver; returns once all workers sample with `version`."""
        self.offer(version)
        while not self.deliver():
            self.offer(version)

    def offer(self, version: int) -> None:
        """Make the learner's weights of this moment ready as `version`."""
        with self._lock:
            self._begun_s, self._receivers = self.clock.now(), self._on_time()
            nodes = [worker.node for worker in self._receivers]
            offers = [rank.ask(Trainer.offer, version, nodes) for rank in self.ranks.ranks]
            self.pending = self.ranks.gather(offers)[0]
            if self.pending is None:  # engine and learner share one copy of the weights
                self._commit(version, self._receivers)
            else:
                self.moved_bytes = self.pending.manifest.num_bytes * len(nodes)

    def deliver(self) -> bool:
        """Bring what is offered to all workers, in any thread. False: it must be offered again."""
        with self._lock:
            ticket, workers = self.pending, self._receivers
            if ticket is None:
                return True
            if workers != self._on_time():
                return False
            failed, late = self._send(ticket, workers)
            dead = {w: why for w, why in failed.items() if isinstance(why, WorkerLostError)}
            for worker, why in (dead or failed).items():  # a dead worker makes others fail, too
                self.give_up(worker, str(why))
            if not workers or (len(failed) < len(workers) and not (dead and len(failed) > len(dead))):
                # none may be left: new ones catch up
                for worker, staging in late.items():
                    assert self.bring is not None
                    self._late[worker] = [ticket.version]
                    self.bring(worker, self.version, ticket, staging)
                self._commit(ticket.version, [w for w in workers if w not in failed and w not in late])
                self.pending, self._tries = None, 0
                return True
            self.ranks.gather([self.ranks.first.ask(Trainer.withdraw, ticket.version)])
            for worker in self.pool.workers:
                worker.ask(Sampler.abandon, ticket.version)
            self._tries += 1
            if self._tries < TRIES:
                return False
        reasons = "; ".join(f"{worker.name}: {why}" for worker, why in failed.items())
        raise PublishError(f"version {ticket.version} was not published, and the old one stays: {reasons}")

    def _commit(self, version: int, workers: Sequence[Worker[Sampler]]) -> None:
        received = []
        for worker, reply in [(w, w.ask(Sampler.commit, version)) for w in workers]:
            try:
                received.append(reply.result(self.timeout_s + GRACE_S))
                self.pool.reached(worker, version)
            except (WorkerLostError, PublishError) as error:
                self.give_up(worker, str(error))
        self.version = version
        if self.pending is not None:
            wanted = [wanted for worker in self.pool.workers for wanted in self._late.get(worker, ())]
            (times,) = self.ranks.gather([self.ranks.first.ask(Trainer.offered, version, wanted)])
            self._book(version, times, max(received, default=0.0))

    def add_receiver(self, worker: Worker[Sampler], admit: Callable[[Worker[Sampler]], None]) -> None:
        """Bring a new worker to the published version, then `admit` it.

        Raises `WorkerLostError` if that fails.
        """
        with self._lock:
            self._receivers = []  # the ends connect otherwise now: what is offered must be offered again
            if self.version is not None:
                (tickets,) = self.ranks.gather([self.ranks.first.ask(Trainer.catch_up, [worker.node])])
                for ticket in tickets:
                    self._send(ticket, [worker])
                    worker.ask(Sampler.commit, ticket.version).result(self.timeout_s + GRACE_S)
            admit(worker)

    def remove_receiver(self, worker: Worker[Sampler], leave: Callable[[Worker[Sampler]], None]) -> None:
        """Let a worker `leave` between two deliveries: during one it would count as lost."""
        with self._lock:
            leave(worker)

    def _on_time(self) -> list[Worker[Sampler]]:
        return [worker for worker in self.pool.workers if worker not in self._late]

    def _send(self, ticket: Ticket, workers: Sequence[Worker[Sampler]]) -> tuple[Failed, Staging]:
        """Send the ticket's version to `workers`; returns who did not get it, and why, and who is late."""
        sending = self.ranks.first.ask(Trainer.send, ticket, self.timeout_s)
        failed, waiting = Failed(), {w: w.ask(Sampler.stage, ticket, self.timeout_s) for w in workers}
        waits_for_all = self.bring is None or self.version is None
        begun_s = time.monotonic()
        end_s = begun_s + self.timeout_s + GRACE_S
        while waiting and (now_s := time.monotonic()) < end_s:
            for worker in [w for w, staging in waiting.items() if staging.is_there()]:
                try:
                    waiting.pop(worker).result()
                    end_s = end_s if waits_for_all else min(end_s, 2 * now_s - begun_s + LATE_S)
                except (WorkerLostError, PublishError) as error:
                    failed[worker] = error
            time.sleep(LOOK_S)
        if waits_for_all or len(failed) + len(waiting) == len(workers):
            failed |= {w: WorkerLostError(f"{w.name} has no answer to version {ticket.version}") for w in waiting}
            waiting = {}
        try:
            sending.result(self.timeout_s + GRACE_S)
        except PublishError as error:
            if not failed:
                raise PublishError(f"version {ticket.version}: {error}") from error
        except WorkerLostError as lost:
            raise self.ranks.gone(str(lost)) from lost
        return failed, waiting

    def follow(self, worker: Worker[Sampler], held: int | None, ticket: Ticket, staging: Reply[None]) -> None:
        """Let a late worker, at version `held`, take what it is staging, and then what is newer, until nothing is.

        Call it in a thread. Raises `WorkerLostError` or `PublishError` if the worker fails.
        """
        tickets, asked, failures, limit_s = [ticket], [staging], 0, self.timeout_s + GRACE_S
        while True:
            try:
                for ticket in tickets:
                    (asked.pop() if asked else worker.ask(Sampler.stage, ticket, self.timeout_s)).result(limit_s)
                    worker.ask(Sampler.commit, ticket.version).result(limit_s)
                    self.pool.reached(worker, ticket.version)
                    held, failures = ticket.version, 0
            except PublishError:  # newer versions may have replaced it on its way
                failures += 1
                if failures == TRIES:
                    raise
            with self._lock:  # waits for a delivery under way
                if held == self.version and self.pending is None:
                    del self._late[worker]
                    return
                (newest,) = self.ranks.gather([self.ranks.first.ask(Trainer.catch_up, [worker.node])])
                tickets = [ticket for ticket in newest if held is None or ticket.version > held]
                self._late[worker] = [ticket.version for ticket in tickets]
                self.moved_bytes += sum(ticket.manifest.num_bytes for ticket in tickets)
            time.sleep(LOOK_S)

    def _book(self, version: int, times: PublishTimes, fetch_s: float) -> None:
        """`fetch_s` is the slowest receiver's. Workers book themselves what applying takes."""
        end_s = self._begun_s
        span = partial(StageSpan, stage="publish", version=version, worker=LEADER)
        for operation, (seconds, num_bytes) in times.items():
            start_s, end_s = end_s, end_s + seconds + (fetch_s if operation == "transfer" else 0.0)
            detail = f"{operation}, {num_bytes} bytes"
            self.clock.add(span(start_s=start_s, end_s=end_s, detail=detail))

"""Rollout workers in a simulation. Only the starts and ends of answers are events, not the tokens between them.

All rows of a worker advance together, one token in each decode step, and a step's seconds follow from the number of
rows. So a worker is a counter of decode steps: an answer of n tokens that starts at step s ends at s + n - 1 (its first
token comes with its prompt). When rows come or go, only the counter's speed changes.

The pool has a clock of its own that stands still while it is paused: then nothing has to be scheduled again.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from headrace.insight.virtual_clock import VirtualLoop
from headrace.insight.workload import Cluster

_SAME_S = 1e-6  # more than the event loop's own idea of the same moment
_SAME = 1e-7  # decode steps: rows that end closer together than this end together


class Family:
    """Answers to one prompt that start together on one worker."""

    __slots__ = ("lengths", "owner", "worker")

    def __init__(self, owner: object, lengths: Sequence[int]) -> None:
        self.owner = owner  # the group it belongs to
        self.lengths = lengths  # of those that run or wait
        self.worker: Worker | None = None  # None while it waits


Row = tuple[float, int, Family, int]  # the worker's step at which it ends, a number, its family, its length


class Worker:
    """One engine. Times are the pool's."""

    __slots__ = (
        "at_s",
        "busy_s",
        "down",
        "ends",
        "hold_s",
        "number",
        "sampled",
        "slow",
        "stamp",
        "step_s",
        "steps",
    )

    def __init__(self, number: int, slow: float) -> None:
        self.number, self.slow = number, slow
        self.ends: list[Row] = []  # a heap of the rows
        self.steps = 0.0  # decode steps so far
        self.step_s = 0.0  # of the present batch
        self.at_s = 0.0  # up to when `steps` is counted
        self.hold_s = 0.0  # until when it does something else than decode
        self.busy_s = 0.0
        self.sampled = 0.0  # tokens
        self.stamp = 0  # of the newest event
        self.down = False

    def advance(self, now_s: float) -> None:
        """Count the decode steps up to now."""
        since_s = max(self.at_s, self.hold_s)
        if now_s > since_s and self.ends:
            steps = (now_s - since_s) / self.step_s
            self.steps += steps
            self.sampled += steps * len(self.ends)
            self.busy_s += now_s - since_s
        self.at_s = max(self.at_s, now_s)

    def hold(self, seconds: float) -> None:
        """Decode nothing for so long, after what holds it already."""
        self.hold_s = max(self.at_s, self.hold_s) + seconds

    def so_far(self, row: Row) -> float:
        """Tokens that a running row has."""
        return row[3] - (row[0] - self.steps)


class EnginePool:
    """Starts families in order, on the worker with the fewest rows, as soon as it has room for all their answers.

    `on_begin(family)` hears that a family has its rows, `on_end(family, length)` of every answer that is complete,
    `on_lost(family, tokens)` what a failing worker had sampled of an answer; that answer is started again.
    """

    def __init__(
        self,
        cluster: Cluster,
        rng: np.random.Generator,
        *,
        prefill_s: float,
        on_begin: Callable[[Family], None],
        on_end: Callable[[Family, int], None],
        on_lost: Callable[[Family, float], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop = loop
        self._cluster, self._rng, self._prefill_s = cluster, rng, prefill_s
        self._on_begin, self._on_end, self._on_lost = on_begin, on_end, on_lost
        slow = set(rng.permutation(cluster.rollout_workers)[: round(cluster.straggler_share * cluster.rollout_workers)])
        factor = cluster.straggler_factor
        self.workers = [Worker(i, factor if i in slow else 1.0) for i in range(cluster.rollout_workers)]
        self.num_failures = 0
        self._waiting: deque[Family] = deque()
        self._events: list[tuple[float, int, int]] = []  # when, worker, its stamp: others than the newest are void
        self._by_load = [(0, i) for i in range(cluster.rollout_workers)]  # a heap; void where the rows are others now
        self._numbers = count()
        self._num_rows = 0
        self._active_s, self._active_since_s = 0.0, 0.0  # while any worker had a row
        self._shift_s, self._paused_s, self._pauses = 0.0, 0.0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False

    def now(self) -> float:
        """Seconds that the pool was not paused."""
        return self._paused_s if self._pauses else self._loop.time() - self._shift_s

    @property
    def active_s(self) -> float:
        """Seconds in which anything was generated."""
        return self._active_s + (self.now() - self._active_since_s if self._num_rows else 0.0)

    @property
    def busy_s(self) -> float:
        """Seconds that workers decoded or computed prompts, added up over them."""
        now_s = self.now()
        for worker in self.workers:
            worker.advance(now_s)
        return sum(worker.busy_s for worker in self.workers)

    @property
    def sampled_tokens(self) -> float:
        """By all workers, ever; a part of a token counts as such."""
        now_s = self.now()
        for worker in self.workers:
            worker.advance(now_s)
        return sum(worker.sampled for worker in self.workers)

    def under_way(self) -> list[tuple[Family, float]]:
        """Every running answer's family, and the tokens it has."""
        now_s = self.now()
        for worker in self.workers:
            worker.advance(now_s)
        return [(row[2], worker.so_far(row)) for worker in self.workers for row in worker.ends]

    def submit(self, owner: object, lengths: Sequence[int]) -> list[Family]:
        """Queue the answers to a prompt; where one worker cannot hold them all they are split."""
        at_once = self._cluster.rows_per_worker
        families = [Family(owner, lengths[start : start + at_once]) for start in range(0, len(lengths), at_once)]
        self._waiting.extend(families)
        self._poke()
        return families

    def abort(self, families: Sequence[Family]) -> float:
        """End what is left of these; the tokens that their unfinished answers had."""
        tokens = 0.0
        for family in families:
            worker = family.worker
            if worker is None:
                self._waiting.remove(family)
                continue
            worker.advance(self.now())
            tokens += sum(worker.so_far(row) for row in worker.ends if row[2] is family)
            self._set_rows(worker, [row for row in worker.ends if row[2] is not family])
        self._poke()
        return tokens

    def pause(self) -> None:
        """Stop all workers, e.g. while the learner has the devices; as often as it is paused it must be resumed."""
        if not self._pauses:
            self._paused_s = self.now()
            self._disarm()
        self._pauses += 1

    def resume(self) -> None:
        """The workers go on."""
        self._pauses -= 1
        if not self._pauses:
            self._shift_s = self._loop.time() - self._paused_s
            self._turn()

    def hold_each(self, seconds: float) -> None:
        """Every worker stops by itself for so long; those that have nothing to do lose nothing by it."""
        now_s = self.now()
        for worker in self.workers:
            worker.advance(now_s)
            worker.hold(seconds)
            self._schedule(worker)
        self._poke()

    def fail(self, worker: Worker) -> None:
        """The worker dies, its answers with it; they are started again, before others."""
        if worker.down:
            return
        worker.advance(self.now())
        lost: dict[Family, list[int]] = {}
        for row in worker.ends:
            self._on_lost(row[2], worker.so_far(row))
            lost.setdefault(row[2], []).append(row[3])
        for family, lengths in lost.items():
            family.lengths, family.worker = lengths, None
            self._waiting.appendleft(family)
        self.num_failures += 1
        worker.down = True
        self._set_rows(worker, [])
        self._loop.call_later(self._cluster.repair_s, self._repaired, worker)
        self._poke()

    def _repaired(self, worker: Worker) -> None:
        worker.down = False
        heapq.heappush(self._by_load, (len(worker.ends), worker.number))
        self._poke()

    # ---- one moment

    def _poke(self) -> None:
        """Look what can start, once everybody has said what they have to say at this moment."""
        if not self._poked:
            self._poked = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._poked = False
        if self._pauses:
            return
        self._disarm()
        while True:
            now_s = self.now()
            while self._events and self._events[0][0] <= now_s + _SAME_S:
                _, number, stamp = heapq.heappop(self._events)
                if self.workers[number].stamp == stamp:
                    self._end_rows(self.workers[number], now_s)
            if self._waiting:
                self._start_families(now_s)
            while self._events and self.workers[self._events[0][1]].stamp != self._events[0][2]:
                heapq.heappop(self._events)
            if not self._events:
                return
            next_s = self._events[0][0] + self._shift_s
            if not self._loop.jump(next_s):
                self._timer = self._loop.call_at(next_s, self._turn)
                return

    def _end_rows(self, worker: Worker, now_s: float) -> None:
        """The rows that are complete; one is, since the worker's event is due."""
        worker.advance(now_s)
        due = worker.ends[0][0]
        worker.sampled += (due - worker.steps) * len(worker.ends)
        worker.steps = due  # without the error of adding up seconds
        ended = []
        while worker.ends and worker.ends[0][0] <= due + _SAME:
            ended.append(heapq.heappop(worker.ends))
        self._rows_changed(worker, -len(ended))
        for _, _, family, length in ended:
            self._on_end(family, length)
        limit = int(self._cluster.repack_below * self._cluster.rows_per_worker)
        if not self._waiting and len(worker.ends) <= limit < len(worker.ends) + len(ended):
            self._repack(worker)

    def _start_families(self, now_s: float) -> None:
        while self._waiting:
            worker = self._freest()
            family = self._waiting[0]
            if worker is None or len(worker.ends) + len(family.lengths) > self._cluster.rows_per_worker:
                return
            self._waiting.popleft()
            worker.advance(now_s)
            worker.hold(self._prefill_s * worker.slow)
            worker.busy_s += self._prefill_s * worker.slow
            worker.sampled += len(family.lengths)
            family.worker = worker
            for length in family.lengths:
                heapq.heappush(worker.ends, (worker.steps + length - 1, next(self._numbers), family, length))
            self._rows_changed(worker, len(family.lengths))
            self._on_begin(family)

    def _freest(self) -> Worker | None:
        """The worker with the fewest rows, if any is up."""
        while self._by_load:
            num_rows, number = self._by_load[0]
            worker = self.workers[number]
            if len(worker.ends) == num_rows and not worker.down:
                return worker
            heapq.heappop(self._by_load)
        return None

    def _repack(self, worker: Worker) -> None:
        """Give the last rows to a worker that is not slower, and has rows of its own and room for these."""
        room = self._cluster.rows_per_worker - len(worker.ends)
        others = [
            other
            for other in self.workers
            if other is not worker and not other.down and other.slow <= worker.slow
            if len(other.ends) <= room and (len(other.ends) >= len(worker.ends) or other.slow < worker.slow)
        ]
        if not worker.ends or not others:
            return
        target = min(others, key=lambda other: (other.slow, -len(other.ends), other.number))
        target.advance(self.now())
        target.hold(self._cluster.repack_s)
        moved, gone = worker.ends, worker.steps
        for end, number, family, length in moved:
            family.worker = target
            heapq.heappush(target.ends, (target.steps + end - gone, number, family, length))
        self._set_rows(worker, [])
        self._rows_changed(target, len(moved))

    def _set_rows(self, worker: Worker, rows: list[Row]) -> None:
        change = len(rows) - len(worker.ends)
        worker.ends = rows
        heapq.heapify(rows)
        self._rows_changed(worker, change)

    def _rows_changed(self, worker: Worker, change: int) -> None:
        """So many rows more: the worker's speed is another now."""
        if self._num_rows == 0 and change > 0:
            self._active_since_s = self.now()
        self._num_rows += change
        if self._num_rows == 0 and change < 0:
            self._active_s += self.now() - self._active_since_s
        worker.step_s = worker.slow * (self._cluster.decode_s + self._cluster.decode_row_s * len(worker.ends))
        if not worker.down:
            heapq.heappush(self._by_load, (len(worker.ends), worker.number))
        self._schedule(worker)

    def _schedule(self, worker: Worker) -> None:
        worker.stamp += 1
        if worker.ends:
            start_s = max(worker.at_s, worker.hold_s)
            at_s = start_s + max(0.0, worker.ends[0][0] - worker.steps) * worker.step_s
            heapq.heappush(self._events, (at_s, worker.number, worker.stamp))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""Rollout workers in a simulation, and the virtual clock that they run on.

Only the starts and ends of answers are events, not the tokens between them. All rows of a worker
advance together, one token in each decode step, and a step's seconds follow from the number of rows
and the length of their contexts. So a worker is a counter of decode steps: an answer of n tokens
that starts at step s ends at s + n - 1 (its first token comes with its prompt). When rows come or
go, only the counter's speed changes.

The pool has a clock of its own that stands still while it is paused: nothing is scheduled again.

The virtual clock is an asyncio event loop whose time jumps: where another would wait for the next
timer, this one is there at once. So code that waits, like the buffer, runs unchanged, and hours of
it pass in seconds. What happens depends on the order of timers alone, not on this machine's speed.
"""

import asyncio
import heapq
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np

from headrace.errors import StalledError
from headrace.insight.workload import Machine

Result = TypeVar("Result")
Heard = Callable[..., None]

_SAME_S = 1e-6  # more than the event loop's own idea of the same moment
_SAME = 1e-7  # decode steps: rows that end closer together than this end together


class _Jump(selectors.SelectSelector):
    """Waits for no file: the time it would have waited has passed when it returns."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            waits = "everybody waits, and nothing is left that could happen"
            raise StalledError(f"the simulation stands still: {waits}")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at second 0. Nothing outside it can wake it, so no threads, processes or sockets."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, without waiting. Call it where no event loop runs."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclass(slots=True, eq=False)
class GroupPart:
    """Answers of one group that start together on one worker."""

    owner: Any  # the group it belongs to, of whatever class
    lengths: Sequence[int]  # of those that run or wait
    worker: "SimulatedEngine | None" = None  # None while it waits


Running = tuple[float, int, GroupPart, int]  # the step at which it ends, a number, part, length


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One engine. Times are the pool's."""

    number: int
    slow: float  # 1 is full speed
    context_s: float  # of a decode step, for each token of its rows' contexts
    ends: list[Running] = field(default_factory=list)  # a heap of the rows
    level: float = 0.0  # tokens of the rows' contexts, less one for each row and decode step so far
    steps: float = 0.0  # decode steps so far
    step_s: float = 0.0  # of the present batch
    at_s: float = 0.0  # up to when `steps` is counted
    hold_s: float = 0.0  # until when it does something else than decode
    busy_s: float = 0.0
    sampled: float = 0.0  # tokens

    def advance(self, now_s: float) -> None:
        since_s = max(self.at_s, self.hold_s)
        if now_s > since_s and self.ends:
            seconds, rows = now_s - since_s, len(self.ends)
            first_s = self.step_s + self.context_s * (self.level + rows * self.steps)
            growth_s = self.context_s * rows
            steps = seconds / first_s  # from here on, the inverse of `seconds_of`
            if growth_s * seconds >= 1e-12 * first_s**2:
                steps = (math.sqrt(first_s**2 + 2 * growth_s * seconds) - first_s) / growth_s
            self.steps += steps
            self.sampled += steps * rows
            self.busy_s += seconds
        self.at_s = max(self.at_s, now_s)

    def seconds_of(self, steps: float) -> float:
        """Of the next decode steps with these rows; each makes every context longer by a token."""
        rows = len(self.ends)
        return steps * (self.step_s + self.context_s * (self.level + rows * (self.steps + steps / 2)))

    def so_far(self, row: Running) -> float:
        return row[3] - (row[0] - self.steps)


class EnginePool:
    """Starts parts in order, on the worker with the fewest rows, once it has room for a whole part.

    `on_begin(owner)` hears that a part has its rows, `on_end(owner, length)` of every answer that
    is complete. `lost_tokens` are what failed workers had sampled: those answers start again.
    """

    def __init__(
        self, machine: Machine, rng: np.random.Generator, prompt_tokens: float, on_begin: Heard, on_end: Heard
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine, self._prompt_tokens, workers = machine, prompt_tokens, machine.rollout_workers
        self._prefill_s = machine.prefill_s + machine.prefill_token_s * prompt_tokens
        self._on_begin, self._on_end = on_begin, on_end
        slow = set(rng.permutation(workers)[: round(machine.straggler_share * workers)])
        factors = [machine.straggler_factor if i in slow else 1.0 for i in range(workers)]
        self.workers = [SimulatedEngine(i, by, by * machine.context_s) for i, by in enumerate(factors)]
        self.num_failures, self.lost_tokens = 0, 0.0
        self._waiting: deque[GroupPart] = deque()
        self._ends_s = np.full(workers, np.inf)  # when the next row of each worker is complete
        self._loads = np.zeros(workers)  # rows of each worker; infinite while it is down
        self._numbers = count()
        self._is_active = False  # whether any worker has a row
        self._active_s, self._active_since_s = 0.0, 0.0
        self._shift_s, self._paused_s, self._paused = 0.0, 0.0, False
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False

    def now(self) -> float:
        """Seconds that the pool was not paused."""
        return self._paused_s if self._paused else self._loop.time() - self._shift_s

    @property
    def active_s(self) -> float:
        return self._active_s + (self.now() - self._active_since_s if self._is_active else 0.0)

    def submit(self, owner: object, lengths: Sequence[int]) -> list[GroupPart]:
        """Queue the answers to a prompt; where one worker cannot hold them all they are split."""
        rows = self._machine.rows_per_worker
        parts = [GroupPart(owner, lengths[i : i + rows]) for i in range(0, len(lengths), rows)]
        self._waiting.extend(parts)
        self._poke()
        return parts

    def abort(self, parts: Sequence[GroupPart]) -> float:
        """End what is left of these; the tokens that their unfinished answers had."""
        tokens = 0.0
        for part in parts:
            if (worker := part.worker) is None:
                self._waiting.remove(part)
                continue
            worker.advance(self.now())
            tokens += sum(worker.so_far(row) for row in worker.ends if row[2] is part)
            self._set_rows(worker, [row for row in worker.ends if row[2] is not part])
        self._poke()
        return tokens

    def pause(self) -> None:
        self._paused_s, self._paused = self.now(), True

    def resume(self) -> None:
        self._paused = False
        self._shift_s = self._loop.time() - self._paused_s
        self._turn()

    def fail(self, worker: SimulatedEngine) -> None:
        """The worker dies, its answers with it; they are started again, before others."""
        if self._loads[worker.number] == math.inf:  # it is down already
            return
        worker.advance(self.now())
        self.lost_tokens += sum(map(worker.so_far, worker.ends))
        for part in dict.fromkeys(row[2] for row in worker.ends):
            part.lengths, part.worker = [row[3] for row in worker.ends if row[2] is part], None
            self._waiting.appendleft(part)
        self.num_failures += 1
        self._set_rows(worker, [])
        self._loads[worker.number] = math.inf
        self._loop.call_later(self._machine.repair_s, self._repaired, worker)
        self._poke()

    def _repaired(self, worker: SimulatedEngine) -> None:
        self._loads[worker.number] = 0
        self._poke()

    def _poke(self) -> None:
        """Look what can start, once everybody has said what they have to say at this moment."""
        if not self._poked:
            self._poked = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._poked = False
        if self._paused:
            return
        if self._timer is not None:
            self._timer.cancel()
        now_s = self.now()
        while self._ends_s[first := self._ends_s.argmin()] <= now_s + _SAME_S:
            self._end_rows(self.workers[first], now_s)
        self._start_waiting(now_s)
        if (next_s := float(self._ends_s.min())) < math.inf:
            self._timer = self._loop.call_at(next_s + self._shift_s, self._turn)

    def _end_rows(self, worker: SimulatedEngine, now_s: float) -> None:
        """The rows that are complete; one is, since the worker's event is due."""
        worker.advance(now_s)
        due = worker.ends[0][0]
        worker.sampled += (due - worker.steps) * len(worker.ends)
        worker.steps = due  # without the error of adding up seconds
        ended = []
        while worker.ends and worker.ends[0][0] <= due + _SAME:
            ended.append(heapq.heappop(worker.ends))
            worker.level -= self._level(ended[-1])
        self._rows_changed(worker)
        for _, _, part, length in ended:
            self._on_end(part.owner, length)

    def _start_waiting(self, now_s: float) -> None:
        while self._waiting:
            number, part = self._loads.argmin(), self._waiting[0]
            worker = self.workers[number]
            if self._loads[number] + len(part.lengths) > self._machine.rows_per_worker:
                return
            self._waiting.popleft()
            worker.advance(now_s)
            prefill_s = self._prefill_s * worker.slow
            worker.hold_s = max(worker.at_s, worker.hold_s) + prefill_s
            worker.busy_s += prefill_s
            worker.sampled += len(part.lengths)
            part.worker = worker
            for length in part.lengths:
                row = (worker.steps + length - 1, next(self._numbers), part, length)
                heapq.heappush(worker.ends, row)
                worker.level += self._level(row)
            self._rows_changed(worker)
            self._on_begin(part.owner)

    def _set_rows(self, worker: SimulatedEngine, rows: list[Running]) -> None:
        worker.ends = rows
        worker.level = sum(map(self._level, rows))
        heapq.heapify(rows)
        self._rows_changed(worker)

    def _level(self, row: Running) -> float:
        return self._prompt_tokens + row[3] - row[0]

    def _rows_changed(self, worker: SimulatedEngine) -> None:
        """The worker has more rows or fewer, and another speed."""
        rows, end_s = len(worker.ends), math.inf
        worker.step_s = worker.slow * (self._machine.decode_s + self._machine.decode_row_s * rows)
        if rows:
            steps_s = worker.seconds_of(max(0.0, worker.ends[0][0] - worker.steps))
            end_s = max(worker.at_s, worker.hold_s) + steps_s
        if self._loads[worker.number] < math.inf:  # it is not down
            self._loads[worker.number] = rows
        self._ends_s[worker.number] = end_s
        if self._is_active != (self._ends_s.min() < math.inf):
            self._active_s, self._active_since_s = self.active_s, self.now()
            self._is_active = not self._is_active

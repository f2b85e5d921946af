"""The number of CPU threads that torch computes with: the one that a short measurement finds best.

The threads of one operation wait for each other. Alone on its cores a model is faster with all of
them. When another process takes a core, every operation waits for the thread that has to share it,
and fewer threads are faster. Load averages do not tell the two cases apart; a measurement does.
"""

import time
from collections.abc import Callable

import torch
from torch.nn.functional import silu

ROWS = 256  # tokens of a probe: more than a decode step has, fewer than a micro-batch
ROUNDS = 3  # each thread count is tried this often, in turns
ROUND_S = 0.01
SHARE = 0.01  # of all time that measuring may take
EVERY_S = 5.0  # but not more often than this


def _seconds_per_call(work: Callable[[], object]) -> float:
    work()  # the threads of another count have to start
    begun_s, calls = time.perf_counter(), 0
    while (now_s := time.perf_counter()) < begun_s + ROUND_S:
        work()
        calls += 1
    return (now_s - begun_s) / calls


class ThreadChoice:
    """The fastest thread count for products of `width` columns. For the thread that computes."""

    def __init__(self, width: int) -> None:
        most = torch.get_num_threads()
        self.candidates = sorted({most, *(2**i for i in range(most.bit_length()))})
        self._x, self._up = torch.zeros(ROWS, width), torch.zeros(width, 3 * width)
        self._next_s = 0.0

    def choose(self) -> None:
        """Measure, unless that was done shortly before: conditions may have changed since then."""
        begun_s = time.perf_counter()
        if begun_s < self._next_s:
            return
        seconds = dict.fromkeys(self.candidates, 0.0)
        for _ in range(ROUNDS if len(seconds) > 1 else 0):
            for count in seconds:
                torch.set_num_threads(count)
                seconds[count] += _seconds_per_call(lambda: silu(self._x @ self._up) @ self._up.T)
        torch.set_num_threads(min(seconds, key=seconds.__getitem__))
        ended_s = time.perf_counter()
        self._next_s = ended_s + max(EVERY_S, (ended_s - begun_s) / SHARE)

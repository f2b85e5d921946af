"""Measured seconds: which stage was busy when, on one monotonic clock that starts with the run."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from headrace.measured import StageSpan

STALL = "training waits"  # detail of a `checkpoint` span that holds up training


class StageClock:
    """Seconds since the run's start, and the spans measured with it. Thread-safe.

    `start_s` is the last time of the run that is resumed.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._origin = time.monotonic() - start_s
        self._lock = threading.Lock()
        self._finished: list[StageSpan] = []
        self._running: dict[object, StageSpan] = {}
        self._moves: Counter[str] = Counter()

    def now(self) -> float:
        """Seconds since the run began, without the time between two processes of it."""
        return time.monotonic() - self._origin

    @contextmanager
    def span(
        self, stage: str, *, version: int | None = None, worker: str = "local", detail: str = ""
    ) -> Iterator[None]:
        """Measure the body as busy time of `stage`, also when it raises."""
        start_s, key = self.now(), object()
        with self._lock:
            self._running[key] = StageSpan(
                stage=stage, start_s=start_s, end_s=start_s, worker=worker, version=version, detail=detail
            )
        try:
            yield
        finally:
            end_s = self.now()
            with self._lock:
                self._finished.append(replace(self._running.pop(key), end_s=end_s))
                self._moves[stage] += 1

    def add(self, span: StageSpan) -> None:
        with self._lock:
            self._finished.append(span)

    def moved(self, stage: str) -> None:
        with self._lock:
            self._moves[stage] += 1

    def moves(self) -> dict[str, int]:
        """How often each stage made progress: equal results mean that nothing happened."""
        with self._lock:
            return dict(self._moves)

    def drain(self) -> list[StageSpan]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def running(self) -> list[StageSpan]:
        """Unfinished spans, as if they ended now, for the next row.

        Call it before `drain`: a span that ends in between is then in both and counts once, instead
        of in neither.
        """
        with self._lock:
            now_s = self.now()
            return [replace(span, end_s=now_s) for span in self._running.values()]


def busy_s(spans: Iterable[StageSpan], start_s: float, end_s: float) -> dict[str, float]:
    """By stage, the seconds in which it was busy; overlapping spans count once."""
    total: dict[str, float] = defaultdict(float)
    reached: dict[str, float] = defaultdict(lambda: start_s)
    for span in sorted(spans, key=lambda span: span.start_s):
        begin, end = max(span.start_s, reached[span.stage]), min(span.end_s, end_s)
        if end > begin:
            total[span.stage] += end - begin
            reached[span.stage] = end
    return total

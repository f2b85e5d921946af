"""The loop as users run it, timed from row to row."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.config import Config
from headrace.measured import Row
from headrace.place.place import open_place


async def timed_loop(
    config: Config, run_dir: Path, at_end: Callable[[], None] = lambda: None
) -> tuple[list[float], list[Row]]:
    """Seconds of each step, and its row; `at_end` is called while all processes of the run still live.

    A row's own wall time leaves out the writing of the row; from row to row nothing is left out.
    """
    rows: list[Row] = []
    ends: list[float] = []

    def on_row(row: Row) -> None:
        ends.append(time.perf_counter())
        rows.append(row)

    place = open_place(config, run_dir)
    try:
        await place.scorer.start()
        loop = await place.loop(on_row)
        started = time.perf_counter()
        await loop.run()
        at_end()
    finally:
        await place.close()
    return np.diff([started, *ends]).tolist(), rows

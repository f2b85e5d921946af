"""The device thread: engine steps and learner passes take turns on one accelerator (or one CPU).

They share it anyway. Taking turns keeps two thread pools from fighting over the same cores, makes "between two decode
steps" a place in a queue, and costs nothing, since neither would finish earlier beside the other.

On a CPU all heavy work belongs here, loading included: each thread that computes gets OpenMP threads of its own, and
as soon as there are more of them than cores, OpenMP puts them to sleep after every operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeviceThread:
    """First come, first served."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """The result of `work(*args)`, run in the device thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def call(self, work: Callable[..., Result], *args: Any) -> Result:
        """The same, for whoever can wait: while the run is being built, before there is an event loop to keep going."""
        return self._executor.submit(work, *args).result()

    def close(self) -> None:
        """Wait for the work under way."""
        self._executor.shutdown(wait=True, cancel_futures=True)

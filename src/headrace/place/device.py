"""The device thread: engine steps and learner passes take turns on one accelerator (or one CPU).

Side by side they would share it, and neither would finish earlier. Taking turns keeps two thread
pools from competing for the same cores, and makes "between two decode steps" a place in a queue.

On a CPU all heavy work belongs here, loading included: each thread that computes gets OpenMP
threads of its own, and with more of them than cores, OpenMP lets them sleep after every operation.

Does not import torch: processes that host reward functions do without it, and start in a second.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from headrace.errors import ConfigError
from headrace.loop.watchdog import settle
from headrace.roles import R


class DeviceThread:
    """Runs work in the order it is queued. A daemon thread: Python waits for an executor's."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._between: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., R], *args: Any) -> R:
        return await asyncio.wrap_future(self.submit(work, *args))

    def call(self, work: Callable[..., R], *args: Any) -> R:
        return self.submit(work, *args).result()

    def submit(self, work: Callable[..., R], *args: Any, **named: Any) -> Future[R]:
        """Queue work. Called in the device thread itself, it is done at once."""
        future: Future[R] = Future()
        if threading.current_thread() is self._thread:
            settle(future, work, *args, **named)
        else:
            self._queue.put(partial(settle, future, work, *args, **named))
        return future

    def do_between(self, work: Callable[[], None]) -> None:
        """Call `work` after each piece of work, too."""
        self._between = work

    def close(self, *, wait: bool = True) -> None:
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            item()
            del item  # keep no tensors alive while waiting
            self._between()


# ---- errors about the device's memory: what needed it, how much is free, which settings need less

GIB = 2**30

MODEL = "Take a smaller model (model.path), or model.dtype=bfloat16"
CACHE = "Lower rollout.kv_tokens or rollout.max_running, or take a smaller model"
LEARNER = "Set learner.kl_coef=0 if there is a reference, lower rollout.kv_tokens, or take a smaller model"
STEPS = "Lower learner.micro_batch_tokens or rollout.kv_tokens, or set learner.checkpoint_activations=true"


@contextmanager
def memory_for(what: str, advice: str, *, wanted_bytes: int = 0) -> Iterator[None]:
    """Turn an allocation that fails inside into an error with the numbers and the `advice`."""
    try:
        yield
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        wanted = f" ({wanted_bytes / GIB:.1f} GiB in all)" if wanted_bytes else ""
        # what torch says that it tried, without its advice on fragmentation
        said = str(error).removeprefix("CUDA out of memory. ").strip().split(". ")[0].rstrip(".")
        tried = said or type(error).__name__
        raise ConfigError(f"out of memory for {what}{wanted}: {room()}{tried}. {advice}") from error


def room() -> str:
    """How much of the GPU's memory is free; empty without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free. "

"""A cluster of processes of this machine that start at once: what a run does when they die needs no Ray.

Objects are served as on Ray, by the same `_Host`. Calls and answers go through a pipe.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import forked
import torch
from ray import cloudpickle

from headrace.errors import HeadraceError, WorkerLostError
from headrace.place.cluster_ray import _Host
from headrace.place.device import DeviceThread
from headrace.place.inline import InlineReply


class Host(_Host):
    async def whereabouts(self) -> tuple[str, int]:
        self._check()
        return "here", os.getpid()


def _serve(pipe: Connection, name: str, directory: str, made_of: bytes) -> None:
    torch.set_num_threads(1)
    asyncio.run(_answer_calls(pipe, name, Host(directory, *pickle.loads(made_of))))


async def _answer_calls(pipe: Connection, name: str, host: Host) -> None:
    async def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            found = await getattr(host, method)(*args)
        except HeadraceError as error:
            found = error
        except Exception:
            found = RuntimeError(f"{name} failed:\n{traceback.format_exc()}")
        pipe.send_bytes(cloudpickle.dumps((number, found)))

    tasks = set()  # an event loop alone would not keep them
    while True:
        try:
            call = await asyncio.to_thread(pipe.recv_bytes)
        except EOFError:  # the run has ended
            os._exit(0)
        tasks.add(task := asyncio.create_task(answer(*pickle.loads(call))))
        task.add_done_callback(tasks.discard)


class ForkedReply(InlineReply[Any]):
    def __init__(self, future: Future[Any], worker: str) -> None:
        super().__init__(future, worker)
        self.future = future


class Process:
    """One worker's process, or with another object beside the first, that of two workers."""

    def __init__(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._pipe, there = forked.context.Pipe()
        made_of = cloudpickle.dumps((make, *args))
        self._process = forked.context.Process(target=_serve, args=(there, name, os.getcwd(), made_of), daemon=True)
        self._process.start()
        there.close()
        self.pid = self._process.pid
        self._numbers, self._sending = itertools.count(), threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        threading.Thread(target=self._hear, name=f"hears {name}", daemon=True).start()

    def call(self, method: Callable[..., Any], *args: Any) -> ForkedReply:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who does not wait any more must not cancel it
        number = next(self._numbers)
        self._pending[number] = future
        with self._sending:
            try:
                self._pipe.send_bytes(cloudpickle.dumps((number, method.__name__, args)))
            except OSError:
                self._lose_all()
        return ForkedReply(future, self.name)

    def kill(self) -> None:
        self._process.kill()

    def _hear(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, found = pickle.loads(self._pipe.recv_bytes())
                future = self._pending.pop(number)
                if isinstance(found, Exception):
                    future.set_exception(found)
                else:
                    future.set_result(found)
        self._lose_all()

    def _lose_all(self) -> None:
        with suppress(KeyError):  # there are none left
            while True:
                _, future = self._pending.popitem()
                future.set_exception(WorkerLostError(f"{self.name} is lost: its process died"))


class ForkedWorker:
    node = "here"

    def __init__(self, process: Process, place: int = 0, made: ForkedReply | None = None) -> None:
        self.name, self.pid = process.name, process.pid
        self._process, self._place = process, place
        self._made = made or process.call(Host.whereabouts)

    def ask(self, method: Callable[..., Any], *args: Any, **named: Any) -> ForkedReply:
        return self._process.call(Host.ask, self._place, method.__name__, args, named)

    def beside(self, make: Callable[..., Any], *args: Any) -> ForkedWorker:
        return ForkedWorker(self._process, self._place + 1, self._process.call(Host.serve_beside, make, *args))

    async def ready(self) -> None:
        await self._made

    def wait_ready(self) -> None:
        self._made.result()

    def kill(self) -> None:
        self._process.kill()


class ForkedCluster:
    """All workers of one run. `address` is Ray's and means nothing here."""

    num_nodes = 1
    num_gpus = 0

    def __init__(self, address: str = "") -> None:
        self.device = DeviceThread()  # in which the run waits for workers
        self._workers: list[ForkedWorker] = []

    def spawn(self, name: str, make: Callable[..., Any], *args: Any, gpus: float = 0.0) -> ForkedWorker:
        self._workers.append(ForkedWorker(Process(name, make, *args)))
        return self._workers[-1]

    def gather(self, answers: Sequence[ForkedReply], timeout_s: float | None = None) -> list[Any]:
        done, _ = wait([answer.future for answer in answers], timeout_s, FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [answer.result(0) for answer in answers]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

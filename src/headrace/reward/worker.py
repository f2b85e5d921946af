"""The child process: it loads the reward function once, then judges the completions it is sent.

Requests and replies are frames (a length, then that many bytes) on one socket, so user code may
print. Requests are pickled. Replies are JSON: the trainer must not unpickle what a process that
runs user code sends. There is no torch here, so that a worker starts in a fraction of a second.
"""

import asyncio
import atexit
import inspect
import json
import math
import os
import pickle
import reprlib
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO

from headrace.errors import HeadraceError
from headrace.reward.function import STEPS, RewardFunction, Setup, failure, failure_of, read_verdict
from headrace.types import DropReason, Score

HEADER = struct.Struct("!Q")
LAST_WORDS_S = 5.0
END_OF_CALL = b"\0headrace: end of a call\0"  # written to stdout and stderr: what comes next belongs to the next call
REASONS = (DropReason.REWARD_ERROR, DropReason.REWARD_TIMEOUT, DropReason.REWARD_UNAVAILABLE)
_IN_REPLY = ("reward", "parts", "failure", "detail", "value", "steps")


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    num_bytes = int.from_bytes(stream.read(HEADER.size), "big")  # 0 where the stream ends
    payload = stream.read(num_bytes)
    return payload if payload and len(payload) == num_bytes else None


def score_of(reply: Mapping[str, Any], output: str = "") -> Score:
    """The verdict in a reply, and what was printed for it.

    User code can write to the socket, so a reply is checked like any input.
    """
    seconds: Any = reply.get("seconds")
    known = type(seconds) is float and 0.0 <= seconds < math.inf
    return replace(_verdict(reply), output=output, seconds=seconds if known else 0.0)


def _verdict(reply: Mapping[str, Any]) -> Score:
    reward, parts, reason, detail, value, steps = map(reply.get, _IN_REPLY)
    if isinstance(reason, str) and reason in REASONS and isinstance(detail, str):
        return failure(detail, DropReason(reason))
    if value is not None and reason is None:
        return Score(reward=0.0, value=value)
    if reason is None and isinstance(parts, dict) and {type(n) for n in (reward, *parts.values())} <= {int, float}:
        score = read_verdict(parts | ({STEPS: steps} if steps else {}), "")
        if score.reward == reward:
            return score
    return failure(f"the worker process sent something that is no verdict: {reprlib.repr(dict(reply))}")


def main(fd: int) -> None:
    os.set_inheritable(fd, False)
    atexit.register(_end_group)  # before user code can register anything, so it is called last
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
    streams = [os.dup(1), os.dup(2)]  # user code may close its own
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(fileno=fd) as sock, sock.makefile("rb") as requests, suppress(ConnectionError):
        if (first := read_frame(requests)) is None:
            return
        setup: Setup = pickle.loads(first)
        try:
            function = setup.load()
        except HeadraceError as error:
            sock.sendall(frame(json.dumps({"error": str(error)}).encode()))
            return
        _end_call(streams)
        sock.sendall(frame(json.dumps({"mode": function.mode}).encode()))
        with asyncio.Runner() as runner:
            if function.mode == "async":
                runner.run(_judge_concurrently(function, setup.timeout_s, sock))
                return
            while (request := read_frame(requests)) is not None:
                _judge_in_turn(function, pickle.loads(request), runner, sock, streams)


def _reply(item: int, score: Score, seconds: float) -> bytes:
    reply = {"item": item, "seconds": seconds} | {name: getattr(score, name) for name in _IN_REPLY}
    return frame(json.dumps(reply, default=dict).encode())


# User code may raise anything, SystemExit too: a failure of its item, and not the worker's end.


def _judge_in_turn(
    function: RewardFunction, blobs: dict[int, bytes], runner: asyncio.Runner, sock: socket.socket, streams: list[int]
) -> None:
    """One call per item, or per batch. No event loop is running, so user code may start one."""
    for items in [list(blobs)] if function.mode == "batch" else [[item] for item in blobs]:
        began = time.perf_counter()
        try:
            verdict = function.invoke([pickle.loads(blobs[item]) for item in items])
            if inspect.isawaitable(verdict):
                verdict = runner.run(asyncio.wait_for(verdict, None))
            scores = function.scores(verdict, len(items))
        except BaseException as error:
            scores = [failure_of(error)] * len(items)
        seconds = time.perf_counter() - began
        _end_call(streams)
        for item, score in zip(items, scores, strict=True):
            sock.sendall(_reply(item, score, seconds))


async def _judge_concurrently(function: RewardFunction, timeout_s: float, sock: socket.socket) -> None:
    requests, replies = await asyncio.open_connection(sock=sock)

    async def judge(item: int, blob: bytes) -> None:
        score = await function.judge(lambda: pickle.loads(blob), timeout_s, BaseException)
        replies.write(_reply(item, score, score.seconds))

    going: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks
    with suppress(asyncio.IncompleteReadError):  # the other end has closed
        while True:
            (num_bytes,) = HEADER.unpack(await requests.readexactly(HEADER.size))
            for item, blob in pickle.loads(await requests.readexactly(num_bytes)).items():
                task = asyncio.create_task(judge(item, blob))
                going.add(task)
                task.add_done_callback(going.discard)


def _end_with_parent(fd: int) -> None:
    """Thread that ends the process when the trainer is gone, even while user code blocks."""
    hangup = select.poll()
    hangup.register(fd, 0)  # no events: only the hang-up is reported
    hangup.poll()
    time.sleep(LAST_WORDS_S)  # an idle worker ends by itself
    _end_group()
    os._exit(1)


def _end_group() -> None:
    """End this process and all that user code has started in its process group."""
    _flush()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def _end_call(streams: list[int]) -> None:
    _flush()
    for fd in streams:
        with suppress(OSError):
            os.write(fd, END_OF_CALL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # user code may have closed or replaced it
            stream.flush()

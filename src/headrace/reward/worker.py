"""The child process: it loads the reward function once, then judges what it is sent.

Both directions are frames on one socket (a length, then that many bytes), so what user code prints does no harm.
Requests are pickled. Replies are JSON: the trainer must not unpickle what a process that runs user code sends it.
No torch here: a worker starts in a fraction of a second, and again after every kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from headrace.errors import HeadraceError
from headrace.reward.function import (
    Mode,
    RewardFunction,
    failure,
    failure_of,
    read_verdict,
    read_verdicts,
    resolve,
)
from headrace.types import Completion, DropReason, Score

HEADER = struct.Struct("!I")
LAST_WORDS_S = 5.0

Reply = Callable[[int, Score], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message to a worker: which function, and the settings of the built-in ones.

    Example:
        Setup(function="rewards.py:score", answer_field="answer", pattern="", timeout_s=10.0)
    """

    function: str
    answer_field: str
    pattern: str
    timeout_s: float


def frame(payload: bytes) -> bytes:
    """`payload` as it goes over the socket."""
    return HEADER.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next payload; None when the other end has closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (num_bytes,) = HEADER.unpack(header)
    payload = stream.read(num_bytes)
    return payload if len(payload) == num_bytes else None


def pack_completion(completion: Completion) -> bytes:
    """A completion as bytes, packed one by one so that a strange field spoils nothing else."""
    fields = dict(completion.fields)  # a read-only view does not pickle
    parts = (completion.prompt, completion.text, fields, completion.num_tokens, str(completion.finish))
    return pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_completion(blob: bytes) -> Completion:
    """The completion that `pack_completion` packed."""
    prompt, text, fields, num_tokens, finish = pickle.loads(blob)
    return Completion(prompt=prompt, text=text, fields=fields, num_tokens=num_tokens, finish=finish)


def score_to_json(item: int, score: Score) -> dict[str, Any]:
    """A reply, ready for JSON."""
    return {
        "item": item,
        "reward": score.reward,
        "parts": dict(score.parts),
        "failure": score.failure,
        "detail": score.detail,
    }


def score_from_json(reply: dict[str, Any]) -> tuple[int, Score]:
    """The item number and the Score of a reply."""
    reason = None if reply["failure"] is None else DropReason(reply["failure"])
    return reply["item"], Score(reward=reply["reward"], parts=reply["parts"], failure=reason, detail=reply["detail"])


def main(fd: int) -> None:
    """Serve the socket `fd` until the other end closes it."""
    os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
    with socket.socket(fileno=fd) as sock, sock.makefile("rb") as requests, contextlib.suppress(ConnectionError):
        first = read_frame(requests)
        if first is None:
            return
        setup: Setup = pickle.loads(first)
        try:
            function = resolve(setup.function, answer_field=setup.answer_field, pattern=setup.pattern)
        except HeadraceError as error:
            sock.sendall(frame(json.dumps({"error": str(error)}).encode()))
            return
        sock.sendall(frame(json.dumps({"mode": function.mode}).encode()))
        _serve(function, setup, requests, sock)


def _serve(function: RewardFunction, setup: Setup, requests: BinaryIO, sock: socket.socket) -> None:
    def reply(item: int, score: Score) -> None:
        sock.sendall(_reply_frame(item, score))

    with asyncio.Runner() as runner:
        if function.mode is Mode.ASYNC:
            runner.run(_judge_side_by_side(function, setup.timeout_s, sock))
            return
        judge = _judge_batch if function.mode is Mode.BATCH else _judge_in_turn
        while (request := read_frame(requests)) is not None:
            judge(function, pickle.loads(request), runner, reply)


def _reply_frame(item: int, score: Score) -> bytes:
    return frame(json.dumps(score_to_json(item, score)).encode())


# User code may raise anything, SystemExit too; whatever it is, it is an answer to this item and not the worker's end.


def _judge_in_turn(function: RewardFunction, blobs: dict[int, bytes], runner: asyncio.Runner, reply: Reply) -> None:
    for item, blob in blobs.items():
        try:
            score = read_verdict(_call(function, unpack_completion(blob), runner), function.name)
        except BaseException as error:
            score = failure_of(error)
        reply(item, score)


def _judge_batch(function: RewardFunction, blobs: dict[int, bytes], runner: asyncio.Runner, reply: Reply) -> None:
    try:
        verdicts = _call(function, [unpack_completion(blob) for blob in blobs.values()], runner)
        scores = read_verdicts(verdicts, function.name, len(blobs))
    except BaseException as error:
        scores = [failure_of(error)] * len(blobs)
    for item, score in zip(blobs, scores, strict=True):
        reply(item, score)


async def _judge_side_by_side(function: RewardFunction, timeout_s: float, sock: socket.socket) -> None:
    """Whatever is sent joins what is still being judged."""
    requests, replies = await asyncio.open_connection(sock=sock)

    async def judge(item: int, blob: bytes) -> None:
        replies.write(_reply_frame(item, await _verdict_in_time(function, blob, timeout_s)))

    going: set[asyncio.Task[None]] = set()  # the loop itself keeps no hold of its tasks
    with contextlib.suppress(asyncio.IncompleteReadError):  # the other end has closed
        while True:
            (num_bytes,) = HEADER.unpack(await requests.readexactly(HEADER.size))
            for item, blob in pickle.loads(await requests.readexactly(num_bytes)).items():
                task = asyncio.create_task(judge(item, blob))
                going.add(task)
                task.add_done_callback(going.discard)


async def _verdict_in_time(function: RewardFunction, blob: bytes, timeout_s: float) -> Score:
    limit = asyncio.timeout(timeout_s)
    try:
        completion = unpack_completion(blob)
        async with limit:
            verdict = await function.call(completion)
        return read_verdict(verdict, function.name)
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return failure(f"no verdict in {timeout_s:g} s", DropReason.REWARD_TIMEOUT)
        return failure_of(error)


def _call(function: RewardFunction, argument: Any, runner: asyncio.Runner) -> Any:
    verdict = function.call(argument)
    return runner.run(_wait_for(verdict)) if inspect.isawaitable(verdict) else verdict


async def _wait_for(verdict: Awaitable[Any]) -> Any:
    return await verdict


def _end_with_parent(fd: int) -> None:
    """A worker caught in user code does not see that the trainer is gone; this thread does."""
    hangup = select.poll()
    hangup.register(fd, 0)  # no events asked for: only the hang-up is reported
    hangup.poll()
    time.sleep(LAST_WORDS_S)  # an idle worker ends by itself
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with what the user code started
    os._exit(1)

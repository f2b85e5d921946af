"""Replies of a process that runs user code: whatever it writes to the socket is at most a failure of its answers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reward_completions import completion

from headrace.config import RewardSection
from headrace.errors import RewardError
from headrace.reward.function import Setup
from headrace.reward.pool import JudgePool
from headrace.reward.scorer import Scorer
from headrace.reward.worker import REASONS
from headrace.types import Score
from headrace.user_code import MAX_DETAIL_CHARS

READY = '{"mode": "single"}'
OK = {"item": "ITEM", "reward": 1.0, "parts": {"a": 1.0}, "failure": None, "detail": ""}

# A child that starts faster than a worker. It sends what stands in the answer: {"json": a reply, or several, in which
# "ITEM" is the number of the answer} or {"raw": bytes in hex}.
CHILD = """
import json, pickle, re, socket, struct, sys
sock = socket.socket(fileno=int(sys.argv[1]))
stream = sock.makefile("rb")
def read():
    header = stream.read(8)
    return stream.read(struct.unpack("!Q", header)[0]) if len(header) == 8 else sys.exit()
def send(text):
    sock.sendall(struct.pack("!Q", len(text)) + text)
read()
send(READY)
while True:
    for item, blob in pickle.loads(read()).items():
        orders = json.loads(bytes.fromhex(re.search(rb"<<(.*?)>>", blob)[1].decode()))
        for text in orders.get("json", []) * orders.get("times", 1):
            send(text.replace('"ITEM"', str(item)).encode())
        sock.sendall(bytes.fromhex(orders.get("raw", "")))
"""


@contextmanager
def child_pool(
    monkeypatch: pytest.MonkeyPatch, ready: str = READY, *, timeout_s: float = 10.0
) -> Iterator[tuple[asyncio.Runner, JudgePool]]:
    monkeypatch.setattr("headrace.reward.pool.BOOT", f"READY = {ready.encode()!r}\n{CHILD}")
    setup = Setup(function="exact", answer_field="answer", timeout_s=timeout_s)
    with asyncio.Runner() as runner:

        async def make() -> JudgePool:
            return JudgePool(setup, num_workers=1, retries=0)

        pool = runner.run(make())
        try:
            yield runner, pool
        finally:
            runner.run(pool.close())


def ask(runner: asyncio.Runner, pool: JudgePool, **orders: Any) -> Score:
    text = f"<<{json.dumps(orders).encode().hex()}>>"
    return runner.run(asyncio.wait_for(pool.run(completion(text)), 30))


def changed(**values: Any) -> str:
    return json.dumps(OK | values)


BAD = {
    "not JSON": "certainly",
    "not text": "\ud800",
    "a list": "[1, 2]",
    "a number": "7",
    "null": "null",
    "nothing in it": "{}",
    "very deep": "[" * 100_000,
    "a huge number": changed(reward=1).replace("1", "9" * 5000, 1),
    "a large number": changed(reward=10**400, parts={"a": 10**400}),
    "no reward": json.dumps({name: value for name, value in OK.items() if name != "reward"}),
    "NaN": changed(reward=math.nan),
    "NaN in parts": changed(reward=math.nan, parts={"a": math.nan}),
    "infinite": changed(reward=math.inf, parts={"a": math.inf}),
    "a bool": changed(reward=True, parts={"a": True}),
    "a text": changed(reward="1"),
    "other parts": changed(parts={"a": 0.5}),
    "parts that are a list": changed(parts=[1.0]),
    "parts that are texts": changed(parts={"a": "1"}),
    "nested parts": changed(parts={"a": {"b": 1.0}}),
    "no parts": changed(reward=0.0, parts={}),
    "another stage's reason": changed(failure="stale"),
    "an unknown reason": changed(failure="laziness"),
    "a reason that is a list": changed(failure=["reward_error"]),
    "a detail that is a number": changed(failure="reward_error", detail=7),
    "an unknown answer": changed(item=12345),
    "an answer by its text": changed(item="0"),
    "an answer that is a bool": changed(item=False),
    "an answer that is a list": changed(item=[0]),
    "no answer": changed(item=None),
    "a very long reply": changed(failure="reward_error", detail="x" * 1_100_000),
}


def test_a_reply_that_is_no_verdict_is_a_failure_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_pool(monkeypatch) as (runner, pool):
        runner.run(pool.start())
        for name, reply in BAD.items():
            raw = reply.encode(errors="surrogatepass") if name == "not text" else b""
            frame = len(raw).to_bytes(8, "big") + raw
            score = ask(runner, pool, raw=frame.hex()) if raw else ask(runner, pool, json=[reply])
            assert (score.failure, score.reward) == ("reward_error", None), name
            assert 0 < len(score.detail) <= MAX_DETAIL_CHARS, name
            assert ask(runner, pool, json=[json.dumps(OK)]).reward == 1.0, name


def test_a_reply_that_never_ends_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_pool(monkeypatch, timeout_s=0.2) as (runner, pool):
        runner.run(pool.start())
        for half in (b"\0\0", b"\0" * 7 + b"\x09{", b""):
            assert ask(runner, pool, raw=half.hex()).failure == "reward_timeout"
        huge = (1 << 32) - 1
        assert "4,294,967,295 bytes" in ask(runner, pool, raw=huge.to_bytes(8, "big").hex()).detail


def test_replies_that_nobody_asked_for_reach_no_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_pool(monkeypatch) as (runner, pool):
        runner.run(pool.start())
        twice = changed(reward=5.0, parts={"a": 5.0})
        assert ask(runner, pool, json=[twice, twice]).reward == 5.0
        runner.run(asyncio.sleep(0.05))
        assert ask(runner, pool, json=[json.dumps(OK)]).reward == 1.0
        assert pool.num_workers_replaced == 1
        assert ask(runner, pool, json=[twice], times=50_000).reward == 5.0, "more than is read at a time"


@pytest.mark.parametrize("ready", ["{}", "7", "", "[" * 9999, '{"mode": "other"}', '{"mode": []}', '{"error": 1}'])
def test_a_first_reply_that_is_wrong_stops_the_start(monkeypatch: pytest.MonkeyPatch, ready: str) -> None:
    with child_pool(monkeypatch, ready) as (runner, pool), pytest.raises(RewardError, match="cannot be loaded"):
        runner.run(pool.start())


def test_a_reply_before_any_question_is_the_answer_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_pool(monkeypatch) as (runner, pool):
        runner.run(pool.start())
        early = changed(item=1, reward=5.0, parts={"a": 5.0})  # the number of the next answer
        assert ask(runner, pool, json=[json.dumps(OK), early]).reward == 1.0
        runner.run(asyncio.sleep(0.05))  # the worker is idle, and its early reply is read
        assert ask(runner, pool, json=[json.dumps(OK)]).reward == 1.0
        assert pool.num_workers_replaced == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
some = {name: st.just(value) | values for name, value in OK.items()}
some["failure"] |= st.sampled_from(["reward_error", "reward_timeout", "stale"])
replies = st.fixed_dictionaries({}, optional=some) | st.fixed_dictionaries(some) | values
orders = st.fixed_dictionaries(
    {"json": st.lists(replies.map(json.dumps), min_size=1, max_size=2)}
) | st.fixed_dictionaries({"raw": st.binary(max_size=40).map(bytes.hex)})


def test_whatever_arrives_every_answer_ends_with_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    with child_pool(monkeypatch, timeout_s=0.05) as (runner, pool):
        runner.run(pool.start())

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(orders)
        def holds(order: dict[str, Any]) -> None:
            began = time.monotonic()
            score = ask(runner, pool, **order)
            assert time.monotonic() - began < 10, "far more than a timeout and a new process on a busy machine"
            if score.failure is None:
                assert type(score.reward) is float
                assert math.isfinite(score.reward)
                assert sum(score.parts.values()) == score.reward
            else:
                assert score.failure in REASONS
                assert len(score.detail.encode()) <= 4 * MAX_DETAIL_CHARS

        holds()


FORGERS = """
import json, sys
import socket
from headrace.reward import worker

def score(completion):
    sock = socket.socket(fileno=int(sys.argv[1]))
    what = completion.fields["forge"]
    sock.sendall(what if isinstance(what, bytes) else worker.frame(json.dumps(what).encode()))
    sock.detach()
    return 1.0
"""


async def test_user_code_that_writes_to_the_real_socket(tmp_path: Path) -> None:
    (tmp_path / "forgers.py").write_text(FORGERS)
    section = RewardSection(function=f"{tmp_path}/forgers.py:score", retries=0, cache=False)
    scorer = Scorer(section, max_new_tokens=10)
    await scorer.start()
    forged = [b"\xff" * 100, {"item": 1, "failure": "stale", "detail": "", "parts": {}, "reward": None}, {"item": []}]
    for what in forged:
        score = await asyncio.wait_for(scorer.score(completion(forge=what)), 30)
        assert score.failure == "reward_error"
    await scorer.close()

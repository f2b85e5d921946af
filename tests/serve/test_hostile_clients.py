"""Clients that mean no good, or are broken: each is refused, and learns nothing of other sessions."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from served import House, add, house

from headrace.episode.chat import MARKS
from headrace.serve import starlette_app, uvicorn_server
from headrace.serve.front_desk import FrontDesk

FUNCTION = {"type": "function"}
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hm?"}]}
OWN = {"Authorization": "Bearer k"}


def chat(**changes: Any) -> dict[str, Any]:
    return ASKED | changes


def saying(**message: Any) -> dict[str, Any]:
    return chat(messages=[message])


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({}, ""),
        ({"Authorization": "Bearer "}, ""),
        ({"Authorization": "Bearer wrong"}, ""),
        ({"Authorization": "Basic k"}, ""),
        ({"Authorization": "k"}, ""),
        ({"Authorization": "Bearer k\u00e9".encode("latin-1")}, ""),
        ({}, "/sessions/wrong"),
        (OWN, "/sessions/wrong"),
        (OWN, "/sessions/k%00"),
    ],
)
async def test_an_unknown_key_opens_nothing(headers: Any, path: str):
    async with house(num_calls=0) as home:
        home.open("k")
        async with home.client(httpx) as client:
            for method, route, body in (
                ("POST", "/v1/chat/completions", ASKED),
                ("POST", "/v1/responses", {"model": "m", "input": "Hm?"}),
                ("POST", "/v1/completions", {"model": "m", "prompt": "Hm?"}),
                ("POST", "/inference/v1/generate", {"token_ids": [5]}),
                ("GET", "/v1/models", None),
                ("POST", "/episodes", {}),
                ("POST", "/episodes/x/reward", {"reward": 1.0}),
            ):
                found = await client.request(method, f"http://house{path}{route}", json=body, headers=headers)
                assert found.status_code == 401, route
                assert "k" not in found.json()["error"]["message"].split()
        assert not home.orders


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        {},
        {"messages": []},
        {"messages": "Hm?"},
        {"messages": [None]},
        chat(messages=[{"content": "no role"}]),
        saying(role="root", content="x"),
        saying(role="user", content=[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]),
        saying(role="user", content=7),
        saying(role="user", content={"text": "x"}),
        saying(role="assistant", tool_calls="rm"),
        saying(role="assistant", tool_calls=[{"id": 1}]),
        saying(role="assistant", tool_calls=[{"id": "a", "function": "f"}]),
        saying(role="assistant", tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "[" * 100_000}}]),
        chat(temperature="hot"),
        chat(temperature=-1),
        chat(temperature=float("nan")),
        chat(temperature=True),
        chat(temperature=1e-300),  # logits divided by it are not finite, which would end the run
        saying(role="assistant", content="", reasoning_content=7),
        saying(role="user", content="".join(map(chr, MARKS))),
        chat(tools=[FUNCTION | {"function": {"name": "f", "parameters": "x"}}], tool_choice="required"),
        chat(top_p=0),
        chat(top_p=2),
        chat(n=0),
        chat(n=10**9),
        chat(max_tokens=0),
        chat(max_tokens=1.5),
        chat(seed=2**80),
        chat(stop=[""]),
        chat(stop=[7]),
        chat(tools=[{"type": "web_search"}]),
        chat(tools="all"),
        chat(tools=[None]),
        chat(tool_choice="required"),
        chat(tool_choice={"type": "function", "function": {"name": "nobody"}}),
        chat(tool_choice=7),
        chat(response_format="json"),
        chat(response_format={"type": "json_schema", "json_schema": "x"}),
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x"}}}),
        chat(frequency_penalty=0.5),
        chat(logit_bias={"5": 100}),
        chat(functions=[{"name": "f"}]),
        chat(parallel_tool_calls=False),
        chat(stream_options=7, messages=[]),
    ],
    ids=lambda body: str(body)[:60],
)
async def test_what_makes_no_sense_is_refused_in_words(body: Any):
    async with house(num_calls=0) as home:
        home.open("k")
        async with home.client(httpx) as client:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            found = await client.post("http://house/v1/chat/completions", content=data, headers=OWN)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["message"]
        assert found.headers["x-should-retry"] == "false"
        assert not home.orders


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": [{"type": "computer_call"}]}),
        ("/v1/responses", {"input": [7]}),
        ("/v1/responses", {"input": "x", "instructions": 7}),
        ("/v1/responses", {"input": "x", "n": 2}),
        ("/v1/responses", {"input": "x", "prompt": {"id": "pmpt_1"}}),
        ("/v1/completions", {"prompt": "hi", "messages": [1]}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"messages": [1]}}),
        ("/v1/responses", {"input": "x", "text": 7}),
        ("/v1/responses", {"input": "x", "truncation": "auto"}),
        ("/v1/responses", {"input": [{"type": "function_call", "name": 7}]}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/completions", {"prompt": "a", "logprobs": 3}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/inference/v1/generate", {"token_ids": [-1]}),
        ("/inference/v1/generate", {"token_ids": [10**6]}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 5}}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"stop_token_ids": [9]}}),
        ("/inference/v1/generate", {"token_ids": [5], "stream": True}),
        ("/inference/v1/generate", {"token_ids": list(range(5, 200)) * 40}),
    ],
)
async def test_the_other_routes_refuse_too(route: str, body: Any):
    async with house(num_calls=0) as home:
        home.open("k")
        async with home.client(httpx) as client:
            found = await client.post(f"http://house{route}", json=body, headers=OWN)
        assert found.status_code == 400, found.text
        assert not home.orders


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/v1", "/v1/%2e%2e/v1/models", "/v1//models", "/v1/models/..", "/sessions//v1/models", "/.env"),
        *("/sessions/k/%2e%2e/k/v1/models", "/v1/chat/completions/x"),
    ],
)
async def test_paths_are_what_they_are(path: str):
    async with house(num_calls=0) as home:
        home.open("k")
        async with home.client(httpx) as client:
            assert (await client.get(f"http://house{path}", headers=OWN)).status_code == 404


async def test_a_path_can_be_the_key_and_ids_of_another_session_mean_nothing():
    async with house() as home:
        home.open("k")
        other = home.open("other")
        async with home.client(httpx) as client:

            async def ask(key: str, messages: list[Any]) -> Any:
                tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
                body = chat(messages=messages, tools=tools)
                headers = {"Authorization": "Bearer whatever a tool puts here"}
                url = f"http://house/sessions/{key}/v1/chat/completions"
                found = await client.post(url, json=body, headers=headers)
                assert found.status_code == 200, found.text
                return found.json()["choices"][0]["message"]

            message = await ask("k", ASKED["messages"])
            (call,) = message["tool_calls"]
            result = {"role": "tool", "content": add(call["function"]["arguments"]), "tool_call_id": call["id"]}
            await ask("other", [*ASKED["messages"], message, result])
            # for the other session the call is text of its client's: only what follows it was sampled there
            assert len(other.trajectory.turns) == 1
            assert not other.trajectory.sampled[: other.trajectory.turns[0].start].any()


@pytest.fixture
async def listening(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[House, int]]:
    monkeypatch.setattr(starlette_app, "BODY_S", 0.3)
    async with house(num_calls=0) as home:
        home.open("k")
        async with uvicorn_server.listening(starlette_app.application(home.front), "127.0.0.1", 0) as port:
            yield home, port


async def said(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """The reply to raw bytes on a socket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(4096), 10)
    except ConnectionError:
        return b"closed"
    finally:
        writer.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"


async def test_bodies_and_headers_that_are_huge_slow_or_broken(
    listening: tuple[House, int], monkeypatch: pytest.MonkeyPatch
):
    home, port = listening
    monkeypatch.setattr(starlette_app, "MAX_BODY_BYTES", 10_000)
    big = HEAD + b"Content-Length: 20000\r\n\r\n" + b"x" * 20_000
    assert b" 413 " in await said(port, big)
    assert b" 408 " in await said(port, HEAD + b"Content-Length: 100\r\n\r\n", b"{", pause_s=0.1)
    assert b" 400 " in await said(port, HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n")
    assert b" 400 " in await said(port, HEAD + b"Content-Length: many\r\n\r\n")
    assert b" 400 " in await said(port, b"\x00\x01\x02 nothing\r\n\r\n")
    assert not home.orders


async def test_a_stream_that_its_client_closes_half_way_leaves_its_turn(listening: tuple[House, int]):
    home, port = listening
    body = json.dumps(chat(stream=True)).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not home.orders:
            await asyncio.sleep(0.001)
    while not home.sessions[0].trajectory.turns:
        await asyncio.sleep(0.001)
    body = json.dumps(ASKED).encode()
    assert b" 200 " in await said(port, HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert len(home.sessions[0].trajectory.turns) == 2


async def test_our_own_errors_are_told_in_the_same_form(monkeypatch: pytest.MonkeyPatch):
    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the engine is gone")

    async with house(num_calls=0) as home:
        home.sessions.append(session := home.open("k"))
        monkeypatch.setattr(type(session), "sample", broken)
        transport = httpx.ASGITransport(app=starlette_app.application(home.front), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport) as client:
            found = await client.post("http://house/v1/chat/completions", json=ASKED, headers=OWN)
            assert found.status_code == 500
            assert found.json()["error"]["type"] == "server_error"
            assert "the engine is gone" in found.json()["error"]["message"]
            found = await client.post("http://house/v1/chat/completions", json=chat(stream=True), headers=OWN)
            assert "the engine is gone" in found.text
            assert found.text.startswith("event: error\ndata: {")


async def test_a_limit_that_one_request_has_met_does_not_end_the_episode():
    """Else a crash of the agent, much later, would count as an end with a reward of zero."""
    async with house(num_calls=0) as home:
        home.open("k", max_tokens=200)
        conversation = home.front.conversation("k", None, is_retry=False)
        async with home.client(httpx) as client:
            url = "http://house/v1/chat/completions"
            found = await client.post(url, json=saying(role="user", content="x" * 2000), headers=OWN)
            assert found.json()["error"]["code"] == "context_length_exceeded"
            assert conversation.ended_by
            assert (await client.post(url, json=ASKED, headers=OWN)).status_code == 200
            assert not conversation.ended_by


async def test_a_retry_of_what_was_refused_gets_no_earlier_answer(monkeypatch: pytest.MonkeyPatch):
    async with house(num_calls=0) as home:
        session = home.open("k")
        async with home.client(httpx) as client:

            async def ask(**headers: str) -> httpx.Response:
                return await client.post("http://house/v1/chat/completions", json=ASKED, headers=OWN | headers)

            first = await ask()
            monkeypatch.setattr("headrace.serve.conversation.MOST_AT_ONCE", 0)
            assert (await ask()).status_code == 429
            monkeypatch.setattr("headrace.serve.conversation.MOST_AT_ONCE", 256)
            retried = await ask(**{"x-stainless-retry-count": "1"})
            assert retried.json()["id"] != first.json()["id"]
            assert (await ask(**{"x-stainless-retry-count": "2"})).json()["id"] == retried.json()["id"]
        assert len(session.trajectory.turns) == 2


async def test_a_remote_agent_that_is_gone_gets_no_episode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.serve.front_desk.LOOK_S", 0.05)
    desk, gone = FrontDesk("tiny", 100, "secret"), asyncio.Event()

    async def is_gone() -> bool:
        return gone.is_set()

    async def is_here() -> bool:
        return False

    pulling = asyncio.create_task(desk.pull("secret", is_gone))
    await asyncio.sleep(0.01)
    gone.set()
    offering = asyncio.create_task(desk.offer({"id": "e"}))
    with pytest.raises(Exception, match="no episode is waiting"):
        await pulling
    assert not offering.done()
    assert (await desk.pull("secret", is_here))["id"] == "e"
    await offering

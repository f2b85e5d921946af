"""smolagents: it sends calls back as prose, so that each turn begins a branch."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from served import BASE_URL, House, assert_trained_once, chat_policy, house
from smolagents import OpenAIModel, Tool, ToolCallingAgent


class Add(Tool):
    name = "add"
    description = "Add two numbers."
    inputs = {"a": {"type": "integer", "description": "?"}, "b": {"type": "integer", "description": "?"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, a: int, b: int) -> str:
        return str(a + b)


class Bridge(httpx.BaseTransport):
    """Lets a client that blocks, in a thread, ask an application of this event loop."""

    def __init__(self, home: House) -> None:
        self._client, self._loop = home.client(httpx), asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            return await self._client.send(
                httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            )

        found = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(60)
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
async def test_every_turn_is_trained_once_though_each_is_a_branch(architecture: str):
    async with house(chat_policy(architecture)) as home:
        home.open("k")
        options = {"http_client": httpx.Client(transport=Bridge(home)), "max_retries": 0}
        model = OpenAIModel("m", api_base=BASE_URL, api_key="k", client_kwargs=options, max_tokens=60)
        agent = ToolCallingAgent([Add()], model, max_steps=3, verbosity_level=0)
        await asyncio.to_thread(agent.run, "Go on.")
        num_turns = len(home.orders)
        assert num_turns >= 3
        assert_trained_once(home, num_turns=num_turns, num_branches=num_turns - 1)

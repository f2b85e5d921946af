"""The openai client, chat completions: plain and streamed, a loop of tool calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest
from served import ADD, BASE_URL, House, add, assert_trained_once, chat_policy, house

TOOLS: Any = [{"type": "function", "function": ADD}]


def client(home: House, key: str = "k", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=BASE_URL, api_key=key, http_client=home.client(), **options)


async def streamed(ai: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    """A message, put together from its deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage = None
    async for chunk in await ai.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["tool_calls"] += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
    assert usage is not None
    return message


async def play(home: House, ai: openai.AsyncOpenAI, *, stream: bool, most: int = 8) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "Add until I say stop."}]
    for _ in range(most):
        if stream:
            message = await streamed(ai, messages)
        else:
            answer = await ai.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            message = answer.choices[0].message.model_dump()
        messages.append(message)
        if not message["tool_calls"]:
            break
        for call in message["tool_calls"]:
            said = add(call["function"]["arguments"])
            messages.append({"role": "tool", "content": said, "tool_call_id": call["id"]})
    return messages


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_of_tool_calls_is_one_line_of_tokens(architecture: str, stream: bool):
    async with house(chat_policy(architecture)) as home:
        session = home.open("k")
        messages = await play(home, client(home), stream=stream)
        assert [m["role"] for m in messages] == ["user", *["assistant", "tool"] * 3, "assistant"]
        assert_trained_once(home, num_turns=4)
        assert [turn.replies for turn in session.trajectory.turns[:3]] == [(m["content"],) for m in messages[2:7:2]]

"""The openai client, responses: plain and streamed, a loop of tool calls."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from served import ADD, BASE_URL, House, add, assert_trained_once, chat_policy, house

TOOLS: Any = [{"type": "function", "strict": False, **ADD}]


def client(home: House, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=BASE_URL, api_key=key, http_client=home.client(), max_retries=0)


async def respond(ai: openai.AsyncOpenAI, how: str, **asked: Any) -> Any:
    if how == "streamed":
        async with ai.responses.stream(model="m", tools=TOOLS, instructions="Add.", **asked) as stream:
            kinds = [event.type async for event in stream]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            return await stream.get_final_response()
    return await ai.responses.create(model="m", tools=TOOLS, instructions="Add.", **asked)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("how", ["plain", "streamed", "by id"])
async def test_a_loop_of_tool_calls_is_one_line_of_tokens(architecture: str, how: str):
    async with house(chat_policy(architecture)) as home:
        home.open("k")
        ai, items, last = client(home), list[Any]([{"role": "user", "content": "Go on until I say stop."}]), None
        for _ in range(4):
            known = {"previous_response_id": last.id} if last is not None and how == "by id" else {}
            last = await respond(ai, how, input=items, **known)
            calls = [item for item in last.output if item.type == "function_call"]
            outputs = [
                {"type": "function_call_output", "call_id": call.call_id, "output": add(call.arguments)}
                for call in calls
            ]
            items = outputs if how == "by id" else [*items, *(item.model_dump() for item in last.output), *outputs]
        assert last.output_text
        assert last.usage.output_tokens > 0
        assert_trained_once(home, num_turns=4)


async def test_a_response_of_another_session_is_not_found():
    async with house(num_calls=0) as home:
        home.open("k")
        home.open("other")
        found = await client(home).responses.create(model="m", input="Hm?")
        with pytest.raises(openai.BadRequestError) as caught:
            await client(home, "other").responses.create(model="m", input="And?", previous_response_id=found.id)
        assert caught.value.code == "previous_response_not_found"
        assert_trained_once(home, num_turns=1)

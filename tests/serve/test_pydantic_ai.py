"""pydantic-ai: it writes arguments anew, and ends with a tool call of its own if the output has a type."""

from __future__ import annotations

import openai
import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from served import BASE_URL, House, assert_trained_once, chat_policy, house


def model(home: House) -> OpenAIChatModel:
    ai = openai.AsyncOpenAI(base_url=BASE_URL, api_key="k", http_client=home.client())
    return OpenAIChatModel("m", provider=OpenAIProvider(openai_client=ai))


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
async def test_a_loop_of_tool_calls_is_one_line_of_tokens(architecture: str):
    async with house(chat_policy(architecture)) as home:
        home.open("k")
        agent = Agent(model(home), tools=[add], instructions="Add.")
        assert (await agent.run("Go on.")).output
        assert_trained_once(home, num_turns=4)


async def test_a_streamed_run():
    async with house() as home:
        home.open("k")
        agent = Agent(model(home), tools=[add], instructions="Add.")
        async with agent.run_stream("Go on.") as result:
            assert await result.get_output()
        assert_trained_once(home, num_turns=4)

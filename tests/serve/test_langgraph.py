"""langchain's agent, a graph of langgraph: it writes arguments anew and drops thinking."""

from __future__ import annotations

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from served import BASE_URL, assert_trained_once, chat_policy, house


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("responses", [False, True])
async def test_a_loop_of_tool_calls_is_one_line_of_tokens(architecture: str, responses: bool):
    async with house(chat_policy(architecture)) as home:
        home.open("k")
        model = ChatOpenAI(
            model="m",
            base_url=BASE_URL,
            api_key="k",
            http_async_client=home.client(),
            use_responses_api=responses,
        )
        agent = create_agent(model, [add], system_prompt="Add.")
        found = await agent.ainvoke({"messages": [{"role": "user", "content": "Go on."}]})
        assert [message.type for message in found["messages"]] == ["human", *["ai", "tool"] * 3, "ai"]
        assert_trained_once(home, num_turns=4)

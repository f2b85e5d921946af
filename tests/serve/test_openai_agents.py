"""openai-agents: its own loop, plain and streamed, and an agent that is another's tool."""

from __future__ import annotations

from collections.abc import Iterator

import agents
import openai
import pytest
from served import ADD, BASE_URL, assert_trained_once, calls_then_text, chat_policy, house


@agents.function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.fixture(autouse=True)
def _no_tracing() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("how", ["plain", "streamed", "by id", "chat"])
async def test_a_loop_of_tool_calls_is_one_line_of_tokens(architecture: str, how: str):
    async with house(chat_policy(architecture)) as home:
        home.open("k")
        ai = openai.AsyncOpenAI(base_url=BASE_URL, api_key="k", http_client=home.client())
        kind = agents.OpenAIChatCompletionsModel if how == "chat" else agents.OpenAIResponsesModel
        agent = agents.Agent(name="adder", instructions="Add.", model=kind("m", ai), tools=[add])
        if how == "streamed":
            result = agents.Runner.run_streamed(agent, "Go on.")
            assert [event async for event in result.stream_events()]
        else:
            result = await agents.Runner.run(agent, "Go on.", auto_previous_response_id=how == "by id")
        assert result.final_output
        assert_trained_once(home, num_turns=4)


async def test_an_agent_that_is_another_ones_tool_is_a_root_of_its_own():
    policy = chat_policy()
    ask = {"type": "object", "properties": {"input": {"enum": ["1", "2"]}}, "required": ["input"]}
    outer = calls_then_text(policy, 1, {"name": "helper", "parameters": ask | {"additionalProperties": False}})
    inner = calls_then_text(policy, 9, ADD)
    # the first turn calls the inner agent, which calls its tool once; then both end with a text
    async with house(
        policy, script=lambda turn: outer(1) if turn == 1 else inner(1) if turn == 2 else outer(9)
    ) as home:
        session = home.open("k")
        ai = openai.AsyncOpenAI(base_url=BASE_URL, api_key="k", http_client=home.client())
        helper = agents.Agent(
            name="helper", instructions="Help.", model=agents.OpenAIResponsesModel("inner", ai), tools=[add]
        )
        tool = helper.as_tool("helper", "Helps.")
        agent = agents.Agent(
            name="boss", instructions="Ask.", model=agents.OpenAIResponsesModel("outer", ai), tools=[tool]
        )
        assert (await agents.Runner.run(agent, "Go on.")).final_output
        assert [turn.agent for turn in session.trajectory.turns] == ["outer", "inner", "inner", "outer"]
        # a root for the inner agent, and the outer one goes on from its first turn
        assert_trained_once(home, num_turns=4, num_branches=2)

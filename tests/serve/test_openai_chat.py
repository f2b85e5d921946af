"""The openai client, chat completions: plain and streamed, a loop of tool calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest
import torch
from served import ADD, BASE_URL, House, add, assert_trained_once, chat_policy, gaps, house

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
        assert [turn.state for turn in session.trajectory.turns[:4]] == [m["content"] for m in messages[0:7:2]]


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
async def test_an_edit_begins_a_branch_and_another_system_prompt_a_root(architecture: str):
    async with house(chat_policy(architecture)) as home:
        session = home.open("k")
        ai = client(home)
        messages = await play(home, ai, stream=False)
        edited = [*messages[:2], {**messages[2], "content": "99"}]
        await ai.chat.completions.create(model="m", messages=edited, tools=TOOLS)
        other: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
        await ai.chat.completions.create(model="sub", messages=other)
        assert_trained_once(home, num_turns=6, num_branches=2)
        first, edit, root = session.trajectory.turns[0], session.trajectory.segments[0], session.trajectory.segments[1]
        assert first.end - 1 <= edit.after < session.trajectory.turns[1].start  # what came before is not repeated
        assert root.after < 5  # at most the beginning that every prompt has
        assert [turn.agent for turn in session.trajectory.turns] == [*["m"] * 5, "sub"]


async def test_what_a_client_writes_otherwise_does_not_fork():
    """Arguments with other spaces, content as None or as parts, an id that was lost."""
    async with house() as home:
        home.open("k")
        ai, messages = client(home), list[Any]([{"role": "user", "content": "Add."}])
        for turn in range(3):
            answer = await ai.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            message = answer.choices[0].message.model_dump()
            (call,) = message["tool_calls"]
            said = add(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=turn)
            call["id"] = call["id"] if turn != 1 else "lost"
            message["content"] = [None, "", [{"type": "text", "text": " "}]][turn]
            del message["refusal"]
            messages += [message, {"role": "tool", "content": said, "tool_call_id": call["id"]}]
        await ai.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert_trained_once(home, num_turns=4)


async def test_several_choices_a_seed_a_stop_and_a_limit_are_honoured():
    async with house(script=lambda turn: "start: /[a-z ]{200}/\n") as home:
        home.open("k")
        ai, asked = client(home), {"model": "m", "messages": [{"role": "user", "content": "Hm?"}]}
        four = await ai.chat.completions.create(
            **asked, n=4, max_tokens=9, seed=5, extra_body={"return_token_ids": True}
        )
        texts = [choice.message.content for choice in four.choices]
        assert len(set(texts)) == 4
        assert {choice.finish_reason for choice in four.choices} == {"length"}
        assert four.usage.completion_tokens == 4 * 9 == sum(len(c.token_ids) for c in four.choices)
        again = await ai.chat.completions.create(**asked, max_tokens=9, seed=5, logprobs=True)
        assert again.choices[0].message.content == texts[0]
        assert again.usage.prompt_tokens == four.usage.prompt_tokens
        assert all(token.logprob <= 0 for token in again.choices[0].logprobs.content)
        stopped = await ai.chat.completions.create(**asked, stop=[texts[1][2:4]], max_tokens=60, seed=6)
        assert texts[1][2:4] not in stopped.choices[0].message.content
        assert stopped.choices[0].finish_reason == "stop"
        greedy = await refused(ai, **asked, temperature=0)
        assert "cannot be trained on" in greedy.message
        assert_trained_once(home, num_turns=6, num_branches=5)


async def refused(ai: openai.AsyncOpenAI, **asked: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await ai.chat.completions.create(**asked)
    return caught.value


async def test_a_schema_and_a_required_call_are_followed():
    async with house(script=lambda turn: "") as home:  # nothing else binds it
        home.open("k")
        ai, asked = client(home), {"model": "m", "messages": [{"role": "user", "content": "Hm?"}]}
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": ADD["parameters"]}}
        answer = await ai.chat.completions.create(**asked, response_format=schema)
        assert json.loads(answer.choices[0].message.content).keys() == {"a", "b"}
        named = {"type": "function", "function": {"name": "add"}}
        for choice in ("required", named):
            answer = await ai.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "add"
            assert add(call.function.arguments)
        bad = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "objec"}}}
        assert (await refused(ai, **asked, response_format=bad)).status_code == 400
        assert_trained_once(home, num_turns=3, num_branches=2)


async def test_a_retry_gets_the_answer_that_was_sampled():
    async with house() as home:
        home.open("k")
        ai, asked = client(home, max_retries=0), {"model": "m", "messages": [{"role": "user", "content": "Hm?"}]}
        first = asyncio.create_task(ai.chat.completions.create(**asked))
        again = asyncio.create_task(ai.chat.completions.create(**asked, extra_headers={"x-stainless-retry-count": "1"}))
        beside = asyncio.create_task(ai.chat.completions.create(**asked))  # a wish for another sample
        one, same, other = await asyncio.gather(first, again, beside)
        late = await ai.chat.completions.create(**asked, extra_headers={"x-stainless-retry-count": "2"})
        assert one.id == same.id
        assert len({one.id, other.id, late.id}) == 2
        assert_trained_once(home, num_turns=2, num_branches=1)


async def test_a_client_that_goes_away_leaves_its_turn():
    async with house(script=lambda turn: "start: /[a-z ]{200}/\n") as home:
        session = home.open("k")
        ai, asked = client(home, max_retries=0), {"model": "m", "messages": [{"role": "user", "content": "Hm?"}]}
        going = asyncio.create_task(ai.chat.completions.create(**asked))
        while not home.orders:
            await asyncio.sleep(0.001)
        going.cancel()
        await asyncio.wait([going])
        answer = await ai.chat.completions.create(**asked, extra_headers={"x-stainless-retry-count": "1"})
        assert len(session.trajectory.turns) == len(home.orders) == 1
        assert answer.usage.completion_tokens == np.count_nonzero(session.trajectory.sampled)


async def test_limits_end_an_agent_with_an_answer_that_is_not_tried_again():
    async with house() as home:
        home.open("turns", max_turns=2)
        home.open("tokens", max_tokens=30)
        with pytest.raises(openai.APIStatusError) as turns:
            await play(home, client(home, "turns"), stream=False)
        assert turns.value.status_code == 410
        with pytest.raises(openai.BadRequestError) as tokens:
            await play(home, client(home, "tokens"), stream=False)
        assert tokens.value.code == "context_length_exceeded"
        assert len(home.sessions[0].trajectory.turns) == 2
        assert_trained_once(home, num_turns=len(home.orders))


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe"])
async def test_a_weight_update_in_mid_episode_is_seen_in_spans_alone(architecture: str):
    """What the new weights sample has their bits, to the last; what the old ones sampled has not."""
    async with house(chat_policy(architecture), on_update="recompute") as home:
        session, ai = home.open("k"), client(home)
        messages = await play(home, ai, stream=False, most=2)

        def update() -> None:
            with torch.no_grad():
                for parameter in home.policy.model.parameters():
                    parameter.mul_(1.01)
            home.engine.weights_changed(1)

        await home.device.run(update)
        while messages[-1]["role"] == "tool":
            answer = await ai.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            messages.append(answer.choices[0].message.model_dump())
            for call in messages[-1]["tool_calls"] or ():
                said = add(call["function"]["arguments"])
                messages.append({"role": "tool", "content": said, "tool_call_id": call["id"]})
        t = session.trajectory
        assert [span.version for span in t.spans] == [0, 0, 1, 1]
        assert not t.segments
        old = np.concatenate([np.full(span.end - span.start, span.version == 0) for span in t.spans])
        found = gaps(home.policy, [t])
        assert found[~old].max() == 0.0
        assert found[old].max() > 0.0


async def test_turns_that_are_truncated_in_different_ways_are_trained_together():
    async with house(script=lambda turn: "") as home:
        home.open("plain")
        home.open("mixed")
        asked = {"model": "m", "max_tokens": 9}
        for key, options in (("plain", [{}, {}]), ("mixed", [{}, {"top_p": 0.5, "temperature": 0.3}, {}])):
            ai, messages = client(home, key), list[Any]([{"role": "user", "content": "Hm?"}])
            for option in options:
                answer = await ai.chat.completions.create(**asked, messages=messages, **option)
                messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
        assert_trained_once(home, num_turns=5)

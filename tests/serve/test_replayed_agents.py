"""An agent that is run again after a restart gets the answers that were sampled before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
from served import ADD, House, add, assert_trained_once, chat_policy, house

from headrace.serve.conversation import Conversation
from headrace.types import Trajectory

TOOLS: Any = [{"type": "function", "function": ADD}]


async def play(client: httpx2.AsyncClient, key: str, first: str = "Add until I say stop.") -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": first}]
    while True:
        asked = {"model": "m", "messages": messages, "tools": TOOLS}
        reply = await client.post("/chat/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return messages
        for call in message["tool_calls"]:
            said = add(call["function"]["arguments"])
            messages.append({"role": "tool", "content": said, "tool_call_id": call["id"]})


def continued(home: House, known: Trajectory, turns: int) -> Conversation:
    """A session of a second attempt, which knows the first `turns` turns of another one."""
    end = known.turns[turns - 1].end
    session = home.open("again")
    session.order = replace(session.order, prompt=replace(session.order.prompt, id="k"), serial=0)
    kept = {name: getattr(known, name)[:end] for name in ("token_ids", "sampled", "logprobs")}
    spans = tuple(span for span in known.spans if span.end <= end)
    assert known.replay is not None
    supports = known.replay.supports[: int(np.count_nonzero(kept["sampled"]))]
    replay = replace(known.replay.of(supports, None), routes=known.replay.routes)
    session.trajectory = replace(known, **kept, spans=spans, turns=known.turns[:turns], replay=replay)
    conversation = Conversation(session)
    home.front.admit("again", conversation)
    return conversation


async def test_no_turn_is_sampled_twice_and_the_rest_is_that_of_an_unbroken_run():
    async with house(chat_policy()) as home:
        whole = home.open("k")
        chat = await play(home.client(), "k")
        home.orders.clear()
        conversation = continued(home, whole.trajectory, 2)
        assert await play(home.client(), "again") == chat
        assert [order.turn for order in home.orders] == [3, 4]
        assert not conversation.unclaimed
        again = conversation.session.trajectory
        np.testing.assert_array_equal(again.token_ids, whole.trajectory.token_ids)
        assert again.logprobs.tobytes() == whole.trajectory.logprobs.tobytes()
        del home.sessions[0]
        home.orders = [*home.orders, *home.orders]
        assert_trained_once(home, num_turns=4)


async def test_an_agent_that_asks_otherwise_leaves_turns_that_nobody_claims():
    async with house(chat_policy()) as home:
        whole = home.open("k")
        await play(home.client(), "k")
        conversation = continued(home, whole.trajectory, 2)
        await play(home.client(), "again", "What is the time?")
        assert len(conversation.unclaimed) == 2

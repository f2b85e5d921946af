"""A model that is served with one key: conversations are sessions, found again by what they hold."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import numpy as np
import pytest
from served import House, add, house

from headrace.episode.session import Session
from headrace.serve import front_desk
from headrace.serve.conversation import Conversation, Limits
from headrace.serve.front_desk import Visitors
from headrace.types import Order, Prompt, Sampling

OWN = {"Authorization": "Bearer k"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def serve(home: House) -> list[Session]:
    """Let visitors in; returns the sessions that they open."""
    numbers, sessions = itertools.count(), list[Session]()

    def open() -> Conversation:
        prompt = Prompt(id=f"visit-{next(numbers)}", text="", token_ids=np.empty(0, np.int32))
        sampling = Sampling(max_new_tokens=60)
        order = Order(serial=0, prompt=prompt, samplings=(sampling,), indices=(0,), counted=False)
        sessions.append(Session(home.desk, order, 0))
        return Conversation(sessions[-1], Limits())

    home.front = Visitors("tiny", home.policy.max_context, "k", open)
    return sessions


async def say(home: House, messages: list[Any], **options: Any) -> Any:
    async with home.client(httpx) as client:
        asked = {"model": "m", "messages": messages, "tools": TOOLS, **options}
        found = await client.post("http://house/v1/chat/completions", json=asked, headers=OWN)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]


async def test_a_conversation_goes_on_in_its_session_and_others_do_not():
    async with house() as home:
        sessions = serve(home)
        chats: list[list[Any]] = [[{"role": "user", "content": f"I am {i}."}] for i in range(3)]
        for _, chat in itertools.product(range(2), chats):
            chat.append(await say(home, chat))
            (call,) = chat[-1]["tool_calls"]
            said = add(call["function"]["arguments"])
            chat.append({"role": "tool", "content": said, "tool_call_id": call["id"]})
        assert [len(session.trajectory.turns) for session in sessions] == [2, 2, 2]
        assert not any(session.trajectory.segments for session in sessions)


async def test_a_seed_repeats_an_answer_and_without_one_answers_differ():
    async with house(script=lambda turn: "start: /[a-z ]{40}/\n") as home:
        serve(home)
        seeded = [await say(home, [{"role": "user", "content": "Hm?"}], seed=7, max_tokens=12) for _ in range(2)]
        others = [await say(home, [{"role": "user", "content": "Hm?"}], max_tokens=12) for _ in range(4)]
        assert seeded[0]["content"] == seeded[1]["content"]
        assert len({message["content"] for message in others}) > 1
        greedy = [await say(home, [{"role": "user", "content": "Hm?"}], temperature=0, max_tokens=12) for _ in range(2)]
        assert greedy[0]["content"] == greedy[1]["content"]


async def test_old_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(front_desk, "MOST_VISITS", 2)
    async with house(num_calls=0) as home:
        sessions = serve(home)
        chats = [[{"role": "user", "content": f"I am {i}."}] for i in range(4)]
        answers = [await say(home, chat) for chat in chats]
        await say(home, [*chats[3], answers[3], {"role": "user", "content": "And?"}])
        assert len(sessions) == 4
        await say(home, [*chats[0], answers[0], {"role": "user", "content": "And?"}])  # from its text alone
        assert len(sessions) == 5

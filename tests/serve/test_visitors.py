"""A model that is served with one key: conversations are sessions, found again by what they hold."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest
from served import House, add, house

from headrace.serve import front_desk
from headrace.serve.front_desk import Visitors
from headrace.types import Sampling

OWN = {"Authorization": "Bearer k"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def serve(home: House) -> Visitors:
    """Let visitors in."""
    at, sampling = ("127.0.0.1", 0), Sampling(max_new_tokens=60)
    home.front = visitors = Visitors("tiny", "k", at, sampling, home.desk, lambda base_url: None)
    return visitors


def num_sessions(home: House) -> int:
    return len({order.prompt.id for order in home.orders})


async def say(home: House, messages: list[Any], **options: Any) -> Any:
    async with home.client(httpx) as client:
        asked = {"model": "m", "messages": messages, "tools": TOOLS, **options}
        found = await client.post("http://house/v1/chat/completions", json=asked, headers=OWN)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]


async def test_a_conversation_goes_on_in_its_session_and_others_do_not():
    async with house() as home:
        visitors = serve(home)
        chats: list[list[Any]] = [[{"role": "user", "content": f"I am {i}."}] for i in range(3)]
        for _, chat in itertools.product(range(2), chats):
            chat.append(await say(home, chat))
            (call,) = chat[-1]["tool_calls"]
            said = add(call["function"]["arguments"])
            chat.append({"role": "tool", "content": said, "tool_call_id": call["id"]})
        sessions = [visit.session for visit in visitors._visits.values()]
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
        serve(home)
        chats = [[{"role": "user", "content": f"I am {i}."}] for i in range(4)]
        answers = [await say(home, chat) for chat in chats]
        await say(home, [*chats[3], answers[3], {"role": "user", "content": "And?"}])
        assert num_sessions(home) == 4
        await say(home, [*chats[0], answers[0], {"role": "user", "content": "And?"}])  # from its text alone
        assert num_sessions(home) == 5


async def test_equal_requests_are_conversations_of_their_own():
    """Else one of them would grow for ever, with every health check."""
    async with house(num_calls=0) as home:
        visitors = serve(home)
        for _ in range(3):
            await say(home, [{"role": "user", "content": "Hm?"}])
        assert [len(visit.session.trajectory.turns) for visit in visitors._visits.values()] == [1, 1, 1]


async def test_as_many_conversations_are_kept_as_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(front_desk, "MOST_VISITS", 8)
    async with house(num_calls=0) as home:
        visitors = serve(home)
        for i in range(10):
            await say(home, [{"role": "user", "content": f"I am {i}."}])
            assert len(visitors._visits) == min(i + 1, 8)

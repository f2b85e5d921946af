"""The sessions of serve.py: who asks with the id of a session's prompt talks to it, until its chat is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from serve_clients import TURNS

from headrace.episode.chat import Message
from headrace.episode.session import Desk, Session
from headrace.serve.conversation import Conversation
from headrace.serve.front_desk import FrontDesk
from headrace.types import Example, Outcome, Prompt, Sampling


class Clients:
    """Leads episodes by what clients ask for, as the agents of a run do."""

    def __init__(self, desk: Desk, on_note: Callable[[str], None]) -> None:
        self.desk, self._on_note = desk, on_note
        self._front, self._open = FrontDesk("real", desk.max_context), AsyncExitStack()

    async def prepare(self) -> None:
        """Tell the port."""
        self.desk.chat.prove()
        await self._open.enter_async_context(self._front.listening("127.0.0.1", 0))
        self._on_note(self._front.base_url.rpartition(":")[2].partition("/")[0])

    async def play(self, session: Session) -> Outcome:
        self._front.admit(session.order.prompt.id, Conversation(session))
        while len(session.trajectory.turns) < TURNS:
            await asyncio.sleep(0.5)
        return session.outcome({}, reward_follows=True)

    async def worked(self, prompt: Prompt, chat: Sequence[Message]) -> Example:
        raise NotImplementedError

    async def close(self) -> None:
        await self._open.aclose()


def refusal(sampling: Sampling) -> str:
    """The engine can sample in any way."""
    return ""

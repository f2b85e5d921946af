"""The endpoint of a run: agents that are trained, or visitors of a model that is served."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.episode.chat import Message
from headrace.episode.session import Desk, Session
from headrace.errors import ConfigError
from headrace.network import own_address
from headrace.reward.pool import JudgePool
from headrace.reward.worker import Setup
from headrace.serve.agent import AgentEpisode, Agents, is_function
from headrace.serve.conversation import Conversation, Limits
from headrace.serve.front_desk import FrontDesk, Visitors
from headrace.types import Example, Order, Prompt, Sampling
from headrace.user_code import load_optional

KEY = "HEADRACE_KEY"  # in the environment: what remote agents say
DAY_S = 86_400.0


def listen(front: FrontDesk, host: str, port: int) -> Any:
    """Serve `front` from now on. Returns the listener, to be closed."""
    app = load_optional("headrace.serve.starlette_app", "starlette", "serve").application(front)
    listener = load_optional("headrace.serve.uvicorn_server", "uvicorn", "serve").Listener(app, host, port)
    shown = own_address() if host in ("0.0.0.0", "::") else host
    front.listens(f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.port}/v1")
    listener.start()
    return listener


class Endpoint:
    """The agents of a training run and the endpoint that they talk to; asked like a `Player`."""

    def __init__(self, config: Config, desk: Desk, on_note: Callable[[str], None]) -> None:
        section, self._desk, self._on_note = config.episode, desk, on_note
        host, _, port = section.listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"episode.listen = '{section.listen}': expected host:port, such as 127.0.0.1:8001")
        self._at, self._listener = (host.strip("[]"), int(port)), None
        self._key = (os.environ.get(KEY) or secrets.token_urlsafe(24)) if section.agent == "remote" else ""
        self._front = FrontDesk(os.path.basename(config.model.path), desk.max_context, self._key)
        hosts = []
        if is_function(section.agent):
            limit_s = section.max_s + section.timeout_s if section.max_s else DAY_S
            setup = Setup(function=section.agent, timeout_s=limit_s, setting="episode.agent")
            hosts = [JudgePool(setup, num_workers=1, retries=0) for _ in range(section.workers)]
        self._agents = Agents(section, desk, self._front, hosts, bool(config.reward.function))

    async def prepare(self) -> None:
        """Raises if the agent cannot be loaded, or nothing can be served."""
        self._listener = listen(self._front, *self._at)
        if self._key:
            key = f"the key in {KEY}" if os.environ.get(KEY) else f"the key {self._key}"
            self._on_note(f"remote agents pull episodes at {self._front.base_url[:-3]}/episodes with {key}")
        await self._agents.prepare()

    async def close(self) -> None:
        await self._agents.close()
        if self._listener is not None:
            await self._listener.close()

    def open(self, order: Order, i: int) -> AgentEpisode:
        return self._agents.open(order, i)

    async def worked(self, prompt: Prompt, chat: Sequence[Message]) -> Example:
        """The tokens of a worked chat, with the tools in the field `tools`, and which of them are answers."""
        first = next((i for i, message in enumerate(chat) if message.get("role") == "assistant"), len(chat))
        history = list(chat[:first]) or list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        ids, learned = self._desk.chat.worked(history, chat[first:], prompt.fields.get("tools"))
        return np.array(ids, np.int32), np.array(learned, np.bool_)


async def serve_visitors(
    desk: Desk, sampling: Sampling, model: str, at: tuple[str, int], key: str, on_ready: Callable[[str], None]
) -> None:
    """Let everybody with `key` talk to the model, until this is cancelled. Nothing is booked."""
    desk.chat.prove()
    numbers, sampling = itertools.count(), replace(sampling, max_new_tokens=desk.max_context)

    def open() -> Conversation:
        prompt = Prompt(id=f"visit-{next(numbers)}", text="", token_ids=np.empty(0, np.int32))
        order = Order(serial=0, prompt=prompt, samplings=(sampling,), indices=(0,), counted=False)
        return Conversation(Session(desk, order, 0), Limits())

    front = Visitors(model, desk.max_context, key, open)
    listener = listen(front, *at)
    on_ready(front.base_url)
    try:
        await listener.wait()
    finally:
        await listener.close()

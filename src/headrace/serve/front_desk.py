"""Who may ask: every session has a key, and what belongs to one is not found with another's."""

import asyncio
import hmac
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.episode.session import Desk, Session
from headrace.network import own_address
from headrace.reward.function import read_verdict
from headrace.serve.ask import Ask, RefusedError
from headrace.serve.conversation import Conversation, IsGone, Parts, digest
from headrace.types import Order, Prompt, Sampling
from headrace.user_code import load_optional

MOST_REMEMBERED = 10_000  # keys of sessions that are over
MOST_VISITS = 256  # conversations of a served model that are kept
MOST_TURNS = 1024  # of a served conversation: what goes on from it after that is another one
PULL_S = 30.0  # that a remote agent waits for an episode
LOOK_S = 1.0  # after which it is looked whether it still waits


class FrontDesk:
    """The sessions of a run. `key` is the remote agents', with which they ask for episodes."""

    def __init__(self, model: str, max_context: int, key: str = "") -> None:
        self.model, self.max_context, self.base_url = model, max_context, ""
        self._key = key
        self._admitted: dict[str, Conversation] = {}
        self._over: deque[str] = deque(maxlen=MOST_REMEMBERED)
        self._offers: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[None]] | None] = asyncio.Queue()

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Serves clients, which find it at `base_url`. After that, remote agents get no more episodes."""
        app = load_optional("headrace.serve.starlette_app", "starlette", "serve").application(self)
        server = load_optional("headrace.serve.uvicorn_server", "uvicorn", "serve")
        async with server.listening(app, host, port) as taken:
            shown = own_address() if host in ("0.0.0.0", "::") else host
            self.base_url = f"http://{f'[{shown}]' if ':' in shown else shown}:{taken}/v1"
            yield
            self._offers.put_nowait(None)

    def admit(self, key: str, conversation: Conversation) -> None:
        self._admitted[digest(key)] = conversation

    def dismiss(self, key: str) -> None:
        self._admitted.pop(digest(key), None)
        self._over.append(digest(key))

    def check(self, key: str) -> None:
        if not self._is_own(key):
            self._of(key)

    def conversation(self, key: str, ask: Ask, *, is_retry: bool) -> Conversation:
        return self._of(key)

    def _is_own(self, key: str) -> bool:
        return bool(self._key) and hmac.compare_digest(key.encode(), self._key.encode())

    def _of(self, key: str) -> Conversation:
        known = digest(key)
        if known in self._admitted:
            return self._admitted[known]
        if known in self._over:
            raise RefusedError("the episode is over", status=410, code="episode_over")
        raise RefusedError("this key is not known", status=401, code="invalid_api_key")

    def reward(self, key: str, id: str, body: Mapping[str, Any]) -> None:
        conversation = self._of(key)
        if id != conversation.id:
            raise RefusedError("this key is of another episode", status=404)
        if (parts := parts_of(body)) is None:
            raise RefusedError("reward must be a finite number or an object of them", param="reward")
        if not conversation.reward.done():
            conversation.reward.set_result(parts)

    async def offer(self, episode: Mapping[str, Any]) -> None:
        """Returns when a remote agent has taken the episode."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.put_nowait((episode, taken))
        await taken

    async def pull(self, key: str, is_gone: IsGone) -> dict[str, Any]:
        """An episode for a remote agent, as soon as the run starts one. Who is gone gets none."""
        if not self._is_own(key):
            raise RefusedError("this key is not known", status=401, code="invalid_api_key")
        for _ in range(int(PULL_S / LOOK_S)):
            offered: Any = ()
            with suppress(TimeoutError):
                offered = await asyncio.wait_for(self._offers.get(), LOOK_S)
            gone = await is_gone()
            if offered is None or (offered and gone):
                self._offers.put_nowait(offered)  # for those that wait too
            if offered is None:
                raise RefusedError("the run is over", status=410, code="run_over")
            if gone:
                break
            if offered and not offered[1].done():  # it may have been given up
                offered[1].set_result(None)
                return {**offered[0], "base_url": self.base_url}
        raise RefusedError("no episode is waiting", status=503, after_s=1)


class Visitors(FrontDesk):
    """A model that is served with one key: each conversation is a session, opened when it begins. Nothing is booked.

    `on_ready` gets the endpoint's address.
    """

    def __init__(
        self, model: str, key: str, at: tuple[str, int], sampling: Sampling, desk: Desk, on_ready: Callable[[str], None]
    ) -> None:
        super().__init__(model, desk.max_context, key)
        self._at, self._on_ready, self._open = at, on_ready, AsyncExitStack()
        self.close = self._open.aclose
        self._desk, self._sampling = desk, replace(sampling, max_new_tokens=desk.max_context)
        self._visits: dict[str, Conversation] = {}  # the latest last
        self._numbers = itertools.count()

    async def prepare(self) -> None:
        self._desk.chat.prove()
        await self._open.enter_async_context(self.listening(*self._at))
        self._on_ready(self.base_url)

    def conversation(self, key: str, ask: Ask, *, is_retry: bool) -> Conversation:
        known = (visit for visit in reversed(self._visits.values()) if visit.knows(ask, is_retry=is_retry))
        found = next((visit for visit in known if len(visit.session.trajectory.turns) < MOST_TURNS), None)
        if found is None:
            prompt = Prompt(id=f"visit-{next(self._numbers)}", text="", token_ids=np.empty(0, np.int32))
            order = Order(serial=0, prompt=prompt, samplings=(self._sampling,), indices=(0,), counted=False)
            found = Conversation(Session(self._desk, order, 0), fresh_seeds=True)
        self._visits.pop(found.id, None)
        self._visits[found.id] = found
        idle = [visit for visit in self._visits.values() if visit.is_idle and visit is not found]
        for visit in idle[: max(0, len(self._visits) - MOST_VISITS)]:
            del self._visits[visit.id]
            self._desk.forget(visit.session.id)
        return found

    async def pull(self, key: str, is_gone: IsGone) -> dict[str, Any]:
        raise RefusedError("this model is not being trained: there are no episodes", status=404)


def parts_of(said: Any) -> Parts | None:
    """The reward in what an agent said, a number or a mapping of names to numbers. None if there is none."""
    score = read_verdict(said.get("reward") if isinstance(said, Mapping) else None, "agent")
    return None if score.failure is not None else dict(score.parts)

"""Who may ask: every session has a key, and what belongs to one is not found with another's."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.serve.ask import Ask, RefusedError
from headrace.serve.conversation import Conversation

MOST_REMEMBERED = 10_000  # keys of sessions that are over
MOST_VISITS = 256  # conversations of a served model that are kept
PULL_S = 30.0  # that a remote agent waits for an episode
Parts = dict[str, float]


@dataclass(eq=False)
class Seat:
    """A session at the endpoint; `reward` is what its agent reports."""

    id: str
    conversation: Conversation
    reward: asyncio.Future[Parts] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FrontDesk:
    """The sessions of a run. `key` is the remote agents', with which they ask for episodes."""

    def __init__(self, model: str, max_context: int, key: str = "") -> None:
        self.model, self.max_context, self.base_url = model, max_context, ""
        self._key = key
        self._seats: dict[bytes, Seat] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._offers: deque[tuple[Mapping[str, Any], asyncio.Future[None]]] = deque()
        self._offered, self._closed = asyncio.Event(), False

    def listens(self, base_url: str) -> None:
        """Where agents find it."""
        self.base_url = base_url

    def admit(self, key: str, seat: Seat) -> None:
        self._seats[_digest(key)] = seat

    def dismiss(self, key: str) -> None:
        self._seats.pop(_digest(key), None)
        self._over[_digest(key)] = None
        while len(self._over) > MOST_REMEMBERED:
            self._over.popitem(last=False)

    def close(self) -> None:
        """The run is over: remote agents get no more episodes."""
        self._closed = True
        self._offered.set()

    def check(self, key: str) -> None:
        """Raises if nobody has this key."""
        if not (self._key and hmac.compare_digest(key.encode(), self._key.encode())):
            self._seat(key)

    def prepared(self, ask: Ask) -> Ask:
        return ask

    def conversation(self, key: str, ask: Ask) -> Conversation:
        return self._seat(key).conversation

    def _seat(self, key: str) -> Seat:
        digest = _digest(key)
        if digest in self._over:
            raise RefusedError("the episode is over", status=410, code="episode_over")
        if digest not in self._seats:
            raise RefusedError("this key is not known", status=401, code="invalid_api_key")
        return self._seats[digest]

    def reward(self, key: str, id: str, body: Mapping[str, Any]) -> None:
        """An agent reports the reward of its episode."""
        seat = self._seat(key)
        if id != seat.id:
            raise RefusedError("this key is of another episode", status=404)
        parts = parts_of(body.get("reward"))
        if parts is None:
            raise RefusedError("reward must be a finite number, or an object of them", param="reward")
        if not seat.reward.done():
            seat.reward.set_result(parts)

    async def offer(self, episode: Mapping[str, Any]) -> None:
        """Returns when a remote agent has taken the episode."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.append((episode, taken))
        self._offered.set()
        await taken

    async def pull(self, key: str) -> dict[str, Any]:
        """An episode for a remote agent, as soon as the run starts one."""
        if not self._key or not hmac.compare_digest(key.encode(), self._key.encode()):
            raise RefusedError("this key is not known", status=401, code="invalid_api_key")
        deadline = asyncio.get_running_loop().time() + PULL_S
        while True:
            while self._offers:
                episode, taken = self._offers.popleft()
                if not taken.done():  # it may have been given up
                    taken.set_result(None)
                    return {**episode, "base_url": self.base_url}
            if self._closed:
                raise RefusedError("the run is over", status=410, code="run_over")
            self._offered.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._offered.wait()
            except TimeoutError as error:
                raise RefusedError("no episode is waiting", status=503, after_s=1) from error


class Visitors(FrontDesk):
    """A model that is served with one key: each conversation is a session, opened when it begins."""

    def __init__(self, model: str, max_context: int, key: str, open: Callable[[], Conversation]) -> None:
        super().__init__(model, max_context, key)
        self._open = open
        self._visits: OrderedDict[int, Conversation] = OrderedDict()

    def prepared(self, ask: Ask) -> Ask:
        """With a seed of its own, if the client gave none."""
        return ask if "seed" in ask.sampling else replace(ask, sampling={**ask.sampling, "seed": secrets.randbits(62)})

    def conversation(self, key: str, ask: Ask) -> Conversation:
        found = next((visit for visit in reversed(self._visits.values()) if visit.knows(ask)), None)
        if found is None:
            found = self._open()
            self._visits[id(found)] = found
        self._visits.move_to_end(id(found))
        for visit in [visit for visit in self._visits.values() if visit.is_idle][: len(self._visits) - MOST_VISITS]:
            del self._visits[id(visit)]
            visit.session.desk.forget(visit.session.id)
        return found

    async def pull(self, key: str) -> dict[str, Any]:
        raise RefusedError("this model is not being trained: there are no episodes", status=404)


def parts_of(reward: Any) -> Parts | None:
    """A reward as an agent gives it: a number, or a mapping of names to numbers. None if it is neither."""
    parts = reward if isinstance(reward, Mapping) else {"agent": reward}
    fine = all(type(n) in (int, float, bool) and math.isfinite(n) for n in parts.values())
    return {str(name): float(number) for name, number in parts.items()} if parts and fine else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()

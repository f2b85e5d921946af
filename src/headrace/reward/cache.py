"""Verdicts by content: equal answers to one prompt are judged once, also concurrent ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headrace.types import Completion, Score

MAX_VERDICTS = 500_000  # a few hundred bytes each; the oldest goes first


class VerdictCache:
    """Keeps scores in `verdicts` and calls `on_verdict` for each new one. Failures are not kept."""

    def __init__(
        self,
        identity: str,
        verdicts: dict[bytes, Score] | None = None,
        on_verdict: Callable[[bytes, Score], None] = lambda key, score: None,
        max_verdicts: int = MAX_VERDICTS,
    ) -> None:
        self._identity = identity  # of the function and its settings
        self._verdicts, self._on_verdict = {} if verdicts is None else verdicts, on_verdict
        self._max_verdicts = max_verdicts
        self._running: dict[bytes, asyncio.Task[Score]] = {}

    def __len__(self) -> int:
        return len(self._verdicts)

    def key(self, completion: Completion) -> bytes | None:
        """A digest of all that the function can see; None if the fields have no canonical JSON."""
        seen = [completion.prompt, completion.text, completion.num_tokens, str(completion.finish), completion.fields]
        try:
            text = json.dumps([self._identity, *seen], sort_keys=True, separators=(",", ":"), default=_plain)
        except (TypeError, ValueError, RecursionError):
            return None
        return hashlib.sha256(text.encode()).digest()

    async def fetch(self, completion: Completion, judge: Callable[[], Awaitable[Score]]) -> tuple[Score, bool]:
        """The score, and whether it came without a call of `judge` for this completion."""
        key = self.key(completion)
        if key is None:
            return await judge(), False
        if key in self._verdicts:
            return self._verdicts[key], True
        running = self._running.get(key)
        if running is not None:
            return await asyncio.shield(running), True
        task = asyncio.ensure_future(self._judge_once(key, judge))
        self._running[key] = task
        # all callers may be cancelled: mark an exception as retrieved
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task), False  # others may wait for it

    async def _judge_once(self, key: bytes, judge: Callable[[], Awaitable[Score]]) -> Score:
        try:
            score = await judge()
            if score.failure is None:
                self._verdicts[key] = score
                self._on_verdict(key, score)
                if len(self._verdicts) > self._max_verdicts:
                    del self._verdicts[next(iter(self._verdicts))]
            return score
        finally:
            del self._running[key]


def _plain(value: Any) -> Any:
    """Read-only mappings and numpy values as JSON types."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)

"""Trouble with rewards and filters, told while it happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from headrace.types import DropReason

NOTE_EVERY_S = 30.0
REPLACED = "replaced"
WORDS = {
    DropReason.REWARD_TIMEOUT: "{num} verdict{s} timed out after {timeout_s:g} s (reward.timeout_s)",
    DropReason.REWARD_UNAVAILABLE: "{num} verdict{s} could not be had: a service was unavailable",
    DropReason.REWARD_ERROR: "{num} verdict{s} failed",
    DropReason.FILTER_ERROR: "{num} group{s} dropped because a filter failed",
    REPLACED: "{num} worker process{es} replaced",
}


class TroubleNotes:
    """Tells the first trouble at once, then at most every 30 s how much more there was of which kind."""

    def __init__(self, on_note: Callable[[str], None], timeout_s: float) -> None:
        self._on_note, self._timeout_s = on_note, timeout_s
        self._untold: Counter[str] = Counter()
        self._detail = ""  # of the first that is not told
        self._pause: asyncio.TimerHandle | None = None
        self._told = False

    def add(self, trouble: Mapping[str, int], detail: str = "") -> None:
        """Note how much there was of each kind, a key of WORDS."""
        self._untold.update({kind: num for kind, num in trouble.items() if num})
        self._detail = self._detail or detail
        if self._pause is None:
            self._tell()

    def close(self) -> None:
        """Tell the rest."""
        self._tell()
        if self._pause is not None:
            self._pause.cancel()

    def _tell(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if not self._untold:
            return
        told, total = [], self._untold.total()
        for kind, num in self._untold.items():
            several = num > 1
            told.append(WORDS[kind].format(num=num, s="s" * several, es="es" * several, timeout_s=self._timeout_s))
        lines = self._detail.splitlines()
        detail = lines[-1] if self._told and lines else self._detail  # one traceback is enough
        self._on_note(", ".join(told) + ("; the first" * (total > 1) + f": {detail}") * bool(detail))
        self._untold.clear()
        self._detail, self._told = "", True
        self._pause = asyncio.get_running_loop().call_later(NOTE_EVERY_S, self._tell)

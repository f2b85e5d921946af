"""What the loop asks of generation, wherever the engines are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.types import EngineCounts, Prompt, Sampling, Trajectory


class Rollouts(Protocol):
    """Prompts in, trajectories out: one engine in this process, or many elsewhere."""

    on_begun: Callable[[int, int], None]  # hears of a group's serial and the version that sampled its first token

    @property
    def exact(self) -> bool:
        """Whether an answer has the same bits in any company."""
        ...

    @property
    def counts(self) -> EngineCounts:
        """What the engines did so far, all together."""
        ...

    def start(
        self,
        serial: int,
        prompt: Prompt,
        samplings: Sequence[Sampling],
        *,
        counted: bool = True,
        attempt: int = 1,
        so_far: Mapping[int, Trajectory] | None = None,
    ) -> list[asyncio.Future[Trajectory]]:
        """Queue one generation per entry of `samplings`; each future gives its trajectory."""
        ...

    def abort(self, serial: int) -> None:
        """End what is left of a group; its futures give what was sampled so far."""
        ...

    def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, what unfinished requests have sampled so far. Call it in the device thread."""
        ...

    async def drain(self) -> None:
        """Wait until every request that is under way has finished."""
        ...

    async def run(self) -> None:
        """Keep the engines going until cancelled; what fails them is raised here."""
        ...

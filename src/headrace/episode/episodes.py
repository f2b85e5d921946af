"""All episodes of a run, asked like the pool of engines: groups in, one future per answer out."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.episode.session import Session
from headrace.types import Order, Outcome, Trajectory


@dataclass(eq=False)
class Episodes:
    """`open(order, i)` makes the i-th episode of a group; `abort_requests` ends those at the engines."""

    open: Callable[[Order, int], Any]  # has a `session`, and can `play`
    abort_requests: Callable[[Sequence[int]], None]
    _running: dict[int, set[Session]] = field(default_factory=dict, init=False)  # by serial, if counted
    _tasks: set[asyncio.Task[Outcome]] = field(default_factory=set, init=False)

    def start(self, order: Order) -> list[asyncio.Task[Outcome]]:
        """An episode per sampling; those in `order.so_far` continue an earlier attempt."""
        episodes = [self.open(order, i) for i in range(len(order.samplings))]
        tasks = [asyncio.create_task(self._play(episode)) for episode in episodes]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        return tasks

    async def _play(self, episode: Any) -> Outcome:
        session: Session = episode.session
        serial, counted = session.order.serial, session.order.counted
        if counted:
            self._running.setdefault(serial, set()).add(session)
        try:
            outcome: Outcome = await episode.play()
            return outcome
        finally:
            session.desk.forget(session.id)
            if counted:
                self._running[serial].discard(session)
                if not self._running[serial]:
                    del self._running[serial]

    def abort(self, serials: Sequence[int]) -> None:
        """End the rest of these groups; their futures give what was sampled so far."""
        for serial in serials:
            for session in self._running.get(serial, ()):
                session.aborted.set()
        self.abort_requests(serials)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def under_way(self) -> dict[int, dict[int, Trajectory]]:
        """By serial and index, the finished turns of episodes that are not over."""
        return {
            serial: {s.index: s.trajectory for s in sessions if s.trajectory.turns}
            for serial, sessions in self._running.items()
        }

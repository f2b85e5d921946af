"""Reward functions on a cluster: on each of several nodes a host, and in it the pool of processes that one machine has.

A host that is lost is replaced, and what it was judging is judged again by another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from headrace.errors import RewardError, WorkerLostError
from headrace.place.device import DeviceThread
from headrace.reward.pool import JudgePool
from headrace.reward.worker import Setup
from headrace.roles import Worker
from headrace.types import Completion, Score

MOST_REPLACED = 3  # in a row, without a verdict in between


class RewardHost:
    """In a process of the cluster: `num_workers` processes that judge. They need no device."""

    def __init__(self, device: DeviceThread, setup: Setup, num_workers: int, retries: int) -> None:
        self._pool = JudgePool(setup, num_workers=num_workers, retries=retries)

    async def begin(self) -> None:
        """Start the processes."""
        await self._pool.start()

    async def judge(self, completion: Completion) -> tuple[Score, int, int]:
        """The verdict; and how many further tries and new processes there were so far."""
        score = await self._pool.run(completion)
        return score, self._pool.num_retried, self._pool.num_workers_replaced


class RewardHosts:
    """What the scorer takes for its pool. `spawn(num_workers)` gives a host with so many processes.

    `on_lost(why)` hears of every host that is lost.
    """

    def __init__(
        self,
        spawn: Callable[[int], Worker[RewardHost]],
        *,
        num_workers: int,
        num_nodes: int,
        on_lost: Callable[[str], None],
    ) -> None:
        num_hosts = max(1, min(num_workers, num_nodes))
        self._spawn, self._on_lost = spawn, on_lost
        self._shares = [len(range(i, num_workers, num_hosts)) for i in range(num_hosts)]
        self._hosts: list[Worker[RewardHost]] = []
        self._load: Counter[int] = Counter()
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._counts: dict[Worker[RewardHost], tuple[int, int]] = {}
        self._replaced = self._in_a_row = 0

    @property
    def num_retried(self) -> int:
        """Further tries after a crash or a timeout."""
        return sum(retried for retried, _ in self._counts.values())

    @property
    def num_workers_replaced(self) -> int:
        """Processes and hosts that ended or had to be ended."""
        return self._replaced + sum(replaced for _, replaced in self._counts.values())

    async def start(self) -> None:
        """Start all hosts; a function that cannot be imported is an error here."""
        self._hosts = [self._spawn(share) for share in self._shares]
        await asyncio.gather(*(host.ask(RewardHost.begin) for host in self._hosts))

    async def run(self, completion: Completion) -> Score:
        """The verdict on one completion, or why there is none."""
        plain = replace(completion, fields=dict(completion.fields))  # a read-only view does not travel
        while True:
            place = min(range(len(self._hosts)), key=lambda i: (i in self._replacing, self._load[i] / self._shares[i]))
            host = self._hosts[place]
            self._load[place] += 1
            try:
                score, *counts = await host.ask(RewardHost.judge, plain)
            except WorkerLostError as lost:
                await self._replace(place, host, lost)
                continue
            finally:
                self._load[place] -= 1
            self._counts[host] = counts[0], counts[1]
            self._in_a_row = 0
            return score

    async def close(self) -> None:
        """End the hosts; their processes end with them."""
        for task in self._replacing.values():
            task.cancel()
        for host in self._hosts:
            host.kill()

    async def _replace(self, place: int, host: Worker[RewardHost], lost: WorkerLostError) -> None:
        """Put another host in the place of a lost one; whoever comes second waits for the first."""
        if self._hosts[place] is not host:
            return
        if place not in self._replacing:
            self._replaced, self._in_a_row = self._replaced + 1, self._in_a_row + 1
            if self._in_a_row > MOST_REPLACED:
                raise RewardError(f"the hosts of reward functions are lost again and again: {lost}")
            self._on_lost(str(lost))
            self._replacing[place] = asyncio.create_task(self._begin(place))
        await asyncio.shield(self._replacing[place])

    async def _begin(self, place: int) -> None:
        try:
            host = self._spawn(self._shares[place])
            await host.ask(RewardHost.begin)
            self._hosts[place] = host
        finally:
            del self._replacing[place]

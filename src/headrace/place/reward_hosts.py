"""Reward functions on a cluster: hosts on several nodes, each with a pool of processes.

Where the file of a function asks for GPUs, each process has a host of its own, which gets them. A
host that is lost is replaced. What it was judging is judged again by another.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from headrace.config import RewardSection
from headrace.errors import RewardError, WorkerLostError
from headrace.place.device import DeviceThread
from headrace.reward.function import Setup
from headrace.reward.pool import JudgePool, pickled
from headrace.roles import Cluster, Worker
from headrace.types import Completion, Score
from headrace.user_code import gpus_said

MOST_REPLACED = 3  # hosts in a row, without a verdict in between


class RewardHost:
    """A pool of `num_workers` judging processes, in a worker of the cluster."""

    def __init__(self, device: DeviceThread, setup: Setup, num_workers: int, retries: int) -> None:
        self._pool = JudgePool(setup, num_workers=num_workers, retries=retries)

    async def begin(self) -> None:
        await self._pool.start()

    async def judge(self, blob: bytes) -> tuple[Score, int, int]:
        """A pickled completion's score, and the pool's `num_retried` and `num_workers_replaced`."""
        return await self._pool.judge(blob), self._pool.num_retried, self._pool.num_workers_replaced


class RewardHosts:
    """A `Judge` that shares out completions among hosts in workers of `cluster`."""

    def __init__(self, cluster: Cluster, section: RewardSection, on_note: Callable[[str], None], setup: Setup) -> None:
        self._cluster, self._setup, self._retries = cluster, setup, section.retries
        self._on_note, self._numbers = on_note, itertools.count()
        self._gpus = gpus_said(setup.function)
        num_hosts = max(1, section.workers if self._gpus else min(section.workers, cluster.num_nodes))
        self._shares = [len(range(i, section.workers, num_hosts)) for i in range(num_hosts)]
        self._hosts: list[asyncio.Task[Worker[RewardHost]]] = []  # done when it is ready
        self._load: Counter[int] = Counter()
        self._counts: dict[Worker[RewardHost], tuple[int, int]] = {}  # as each told last
        self.num_retried = self.num_workers_replaced = self._in_a_row = 0  # hosts count as workers, too

    async def start(self) -> None:
        self._hosts = [asyncio.create_task(self._begin(share)) for share in self._shares]
        await asyncio.gather(*self._hosts)

    async def run(self, completion: Completion) -> Score:
        blob = pickled(completion)
        if isinstance(blob, Score):
            return blob
        hosts, load, shares = self._hosts, self._load, self._shares
        while True:
            place = min(range(len(hosts)), key=lambda i: (not hosts[i].done(), load[i] / shares[i]))
            begun = self._hosts[place]
            self._load[place] += 1
            try:
                host = await asyncio.shield(begun)
                score, retried, replaced = await host.ask(RewardHost.judge, blob)
            except WorkerLostError as lost:
                if self._hosts[place] is begun:
                    self.num_workers_replaced += 1
                    self._in_a_row += 1
                    if self._in_a_row > MOST_REPLACED:
                        raise RewardError(f"the hosts of reward functions are lost again and again: {lost}") from lost
                    self._on_note(f"{lost}. What it was judging is judged again")
                    self._hosts[place] = asyncio.create_task(self._begin(self._shares[place]))
                continue
            finally:
                self._load[place] -= 1
            before = self._counts.get(host, (0, 0))
            self._counts[host] = retried, replaced
            self.num_retried += retried - before[0]
            self.num_workers_replaced += replaced - before[1]
            self._in_a_row = 0
            return score

    async def close(self) -> None:
        for begun in self._hosts:
            if not begun.cancel() and not begun.cancelled() and not begun.exception():
                begun.result().kill()

    async def _begin(self, share: int) -> Worker[RewardHost]:
        name = f"reward-{next(self._numbers)}"
        host = self._cluster.spawn(name, RewardHost, self._setup, share, self._retries, gpus=self._gpus)
        await host.ask(RewardHost.begin)
        return host

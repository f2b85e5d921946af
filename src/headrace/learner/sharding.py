"""A learner in several processes, its ranks. Each holds a part of the weights and trains on a part of every batch.

Ranks compute together: to gather a layer's weights takes all of them. So each is called as often as the others, with an
empty list if there is nothing for it. Whoever calls them cuts the work with `split`; how many passes a part takes, the
ranks agree on among themselves.

    sharding = Sharding(rank=0, num_ranks=2, host="10.0.0.1", port=29500, device=policy.device)
    learner = Learner(policy, section, ..., sharding=sharding)

The process group is the process's default one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

T = TypeVar("T")


class Sharding:
    """This process's seat among the ranks of one learner. Making it waits for the others, for `timeout_s` at most."""

    def __init__(
        self, *, rank: int, num_ranks: int, host: str, port: int, device: torch.device, timeout_s: float = 600.0
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"  # small sums are added up on the hosts, without a word to the GPUs
            torch.cuda.set_device(device.index or 0)
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        # a checkpoint is written beside the training, and needs words of its own with the other ranks
        self.writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """The sum over all ranks."""
        total = torch.from_numpy(values.astype(np.float64))
        dist.all_reduce(total)
        return total.numpy()

    def add_up_on_device(self, values: Tensor) -> Tensor:
        """The same, of what need not come to the host."""
        dist.all_reduce(values)
        return values

    def most(self, count: int) -> int:
        """The largest number that any rank gives."""
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def close(self) -> None:
        """Leave. The others can do no more either."""
        dist.destroy_process_group()


def split(items: Sequence[T], num_ranks: int, size: Callable[[T], int]) -> list[list[T]]:
    """One part for each rank, of nearly equal size: largest first, onto the lightest. Some may be empty."""
    if num_ranks == 1:
        return [list(items)]
    parts: list[list[T]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(items, key=size, reverse=True):
        lightest = loads.index(min(loads))
        parts[lightest].append(item)
        loads[lightest] += size(item)
    return parts

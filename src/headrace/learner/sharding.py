"""A learner in several processes (ranks), by FSDP2: each has a part of weights and batch.

Gathering a layer's weights is a collective of all ranks. So every rank must be called equally
often, with an empty list if there is nothing for it. The caller divides the work with `split`; the
ranks agree on the number of passes.

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
    """This process as one rank of a learner. The constructor waits for the others."""

    def __init__(
        self, *, rank: int, num_ranks: int, host: str, port: int, device: torch.device, timeout_s: float = 600.0
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"  # small sums without a GPU sync
            torch.cuda.set_device(device.index or 0)
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        # a checkpoint is written while training goes on, so it needs a process group of its own
        self.writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def add_up(self, values: np.ndarray) -> np.ndarray:
        total = torch.from_numpy(values.astype(np.float64))
        dist.all_reduce(total)
        return total.numpy()

    def add_up_on_device(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def most(self, count: int) -> int:
        """The maximum of `count` over all ranks."""
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def close(self) -> None:
        dist.destroy_process_group()


def split(items: Sequence[T], num_ranks: int, size: Callable[[T], int]) -> list[list[T]]:
    """One part per rank, of nearly equal total `size`. Some may be empty."""
    if num_ranks == 1:
        return [list(items)]
    parts: list[list[T]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(items, key=size, reverse=True):
        lightest = loads.index(min(loads))
        parts[lightest].append(item)
        loads[lightest] += size(item)
    return parts

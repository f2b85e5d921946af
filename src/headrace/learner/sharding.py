"""A learner in several processes (ranks), by FSDP2: each has a part of weights and batch.

Gathering a layer's weights is a collective of all ranks. So every rank must be called equally
often, with an empty list if there is nothing for it. The caller divides the work (`Ranks`); the
ranks agree on the number of passes.

    sharding = Sharding(rank=0, num_ranks=2, host="10.0.0.1", port=29500, device=policy.device)
    learner = Learner(policy, section, ..., sharding=sharding)

The process group is the process's default one.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


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
        url, timeout = f"tcp://{host}:{port}", timedelta(seconds=timeout_s)
        dist.init_process_group(backend, url, rank=rank, world_size=num_ranks, timeout=timeout)
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        # a checkpoint is written while training goes on, so it needs a process group of its own
        self.writers = dist.new_group(backend="gloo", timeout=timeout)

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

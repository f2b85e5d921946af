"""AdamW in one kernel over all weights: gradients in any precision, float32 masters, and the weights they round to.

Whether the step is taken at all is decided on the GPU, so nothing waits for the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW, its settings and its state, with another way to take a step."""

    def step_fused(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], factor: Tensor) -> None:
        """Update the masters (this optimizer's parameters) with gradients · factor, and round them into `weights`.

        A factor that is not finite leaves everything as it was.
        """
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        triples = zip(weights, gradients, group["params"], strict=True)
        present = [(weight, gradient, master) for weight, gradient, master in triples if gradient is not None]
        states = [self._state_of(master) for _, _, master in present]
        taken = torch.isfinite(factor)
        steps = self._count_steps(states, taken)
        numbers = torch.stack([taken, factor, group["lr"] / (1 - beta1**steps), (1 - beta2**steps).sqrt()]).float()
        rows = [(*row, s["exp_avg"], s["exp_avg_sq"]) for row, s in zip(present, states, strict=True)]
        pointers = np.array([[tensor.data_ptr() for tensor in row] for row in rows], np.int64).T
        sizes = np.array([master.numel() for _, _, master in present])
        counts = -(-sizes // BLOCK)
        owner = np.repeat(np.arange(len(rows)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = torch.from_numpy(np.concatenate([pointers.ravel(), sizes, owner, place]))
        _step[(len(owner),)](
            table.to(factor.device), numbers, len(rows), len(owner),
            group["lr"] * group["weight_decay"], beta1, beta2, group["eps"],
            WEIGHT=_KINDS[present[0][0].dtype], GRADIENT=_KINDS[present[0][1].dtype], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip

    def _state_of(self, master: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state

    def _count_steps(self, states: list[dict[str, Any]], taken: Tensor) -> Tensor:
        """All weights have taken the same steps: count once, in a tensor that their states share."""
        steps: Tensor = states[0]["step"]
        steps += taken
        for state in states[1:]:
            state["step"] = steps
        return steps


_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _step(
    table, numbers, tensors, blocks, decay, beta1, beta2, epsilon,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers) > 0:
        factor, rate, root = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
        owner = tl.load(table + 6 * tensors + tl.program_id(0))
        at = tl.load(table + 6 * tensors + blocks + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
        inside = at < tl.load(table + 5 * tensors + owner)
        weights = tl.load(table + owner).to(tl.pointer_type(WEIGHT))
        gradients = tl.load(table + tensors + owner).to(tl.pointer_type(GRADIENT))
        masters = tl.load(table + 2 * tensors + owner).to(tl.pointer_type(tl.float32))
        means = tl.load(table + 3 * tensors + owner).to(tl.pointer_type(tl.float32))
        squares = tl.load(table + 4 * tensors + owner).to(tl.pointer_type(tl.float32))
        g = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * factor
        w = tl.load(masters + at, mask=inside, other=0.0)
        mean = tl.load(means + at, mask=inside, other=0.0)
        square = tl.load(squares + at, mask=inside, other=0.0)
        mean = mean + (g - mean) * (1 - beta1)
        square = square * beta2 + g * g * (1 - beta2)
        w = w - w * decay
        w = w - rate * mean / (tl.sqrt(square) / root + epsilon)
        tl.store(means + at, mean, mask=inside)
        tl.store(squares + at, square, mask=inside)
        tl.store(masters + at, w, mask=inside)
        tl.store(weights + at, w.to(WEIGHT), mask=inside)

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

    _cut: tuple[tuple[int, ...], Tensor] | None = None

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
        sizes = tuple(master.numel() for _, _, master in present)
        blocks = self._blocks(sizes, factor.device)
        _step[(len(blocks) // 2,)](
            torch.from_numpy(np.ascontiguousarray(pointers)).to(factor.device), torch.tensor(sizes).to(factor.device),
            blocks, numbers, len(rows), len(blocks) // 2,
            group["lr"] * group["weight_decay"], beta1, beta2, group["eps"],
            WEIGHT=_KINDS[present[0][0].dtype], GRADIENT=_KINDS[present[0][1].dtype],
            EVEN=all(size % 16 == 0 for size in sizes), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip

    def _blocks(self, sizes: tuple[int, ...], device: torch.device) -> Tensor:
        """Of all blocks, first whose they are, then which of its owner's they are; made once."""
        if self._cut is None or self._cut[0] != sizes:
            counts = -(-np.array(sizes) // BLOCK)
            owner = np.repeat(np.arange(len(sizes)), counts)
            place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
            self._cut = sizes, torch.from_numpy(np.concatenate([owner, place])).to(device)
        return self._cut[1]

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
    pointers, sizes, blocks, numbers, tensors, num_blocks, decay, beta1, beta2, epsilon,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers) > 0:
        factor, rate, root = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
        owner = tl.load(blocks + tl.program_id(0))
        size = tl.load(sizes + owner)
        if EVEN:
            size = tl.multiple_of(size, 16)  # with that known, loads and stores are 16 bytes wide
        at = tl.multiple_of(tl.load(blocks + num_blocks + tl.program_id(0)) * BLOCK, BLOCK) + tl.arange(0, BLOCK)
        inside = at < size
        weights = _pointer(pointers + owner, WEIGHT)
        gradients = _pointer(pointers + tensors + owner, GRADIENT)
        masters = _pointer(pointers + 2 * tensors + owner, tl.float32)
        means = _pointer(pointers + 3 * tensors + owner, tl.float32)
        squares = _pointer(pointers + 4 * tensors + owner, tl.float32)
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


@triton.jit
def _pointer(place, KIND: tl.constexpr):
    """Tensors begin at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(place).to(tl.pointer_type(KIND)), 16)

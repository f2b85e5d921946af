"""Multi-tensor AdamW: one kernel over all weights, with float32 masters.

Whether the step is taken is decided on the GPU, so the host does not wait for the gradient's norm.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK = 8192  # elements per program in the norm
PART = 1024  # elements per program in the update, which reads and writes five tensors


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with the same settings and state; `step_fused` takes the place of `step`."""

    _cut: tuple[tuple[int, ...], Tensor] | None = None

    def step_fused(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        scale: float,
        clip: float,
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Update the masters (this optimizer's parameters), and round them into `weights`.

        All weights have one dtype, and so have all gradients; a weight without a gradient is not
        changed. Gradients are multiplied by `scale` and clipped to a norm of `clip`, unless that is
        0. Returns the norm before clipping; if it is not finite, nothing is changed. `add_up` sums
        its square over ranks.
        """
        group = self.param_groups[0]
        steps: Tensor = self.state[group["params"][0]]["step"]
        for state in self.state.values():
            state["step"] = steps  # one for all: a loaded state has a count per weight
        triples = zip(weights, gradients, group["params"], strict=True)
        states = [(w, g, m, self.state[m]) for w, g, m in triples if g is not None]
        rows = [(w, g, m, state["exp_avg"], state["exp_avg_sq"]) for w, g, m, state in states]
        device, kind = rows[0][2].device, _KINDS[rows[0][1].dtype]
        sizes = tuple(row[2].numel() for row in rows)
        blocks = self._blocks(sizes, device)
        places = np.array([[tensor.data_ptr() for tensor in column] for column in zip(*rows, strict=True)])
        table = (*torch.from_numpy(np.vstack([places, sizes])).to(device).split([5, 1]), blocks)
        # a view into a larger tensor may begin at any address
        even = all(size % 16 == 0 for size in sizes) and not (places % 16).any()
        shape = {"GRADIENT": kind, "EVEN": even, "BLOCK": BLOCK}
        squares = torch.empty(len(blocks) // 2, dtype=torch.float32, device=device)
        _square[(len(squares),)](*table, squares, len(rows), len(squares), PART=BLOCK, num_warps=8, **shape)
        total = squares.sum(dtype=torch.float64)
        norm = (total if add_up is None else add_up(total)).sqrt() * scale
        factor = scale * (clip / norm).clamp(max=1.0) if clip else norm * 0 + scale
        factor = factor + 0 * norm  # 0 * inf is NaN
        taken = torch.isfinite(factor)
        steps += taken
        beta1, beta2 = group["betas"]
        rate, root = group["lr"] / (1 - beta1**steps), (1 - beta2**steps).sqrt()
        numbers = torch.stack([taken, factor, rate, root]).float()
        decay = group["lr"] * group["weight_decay"]
        _step[(len(squares) * (BLOCK // PART),)](
            *table, numbers, len(rows), len(squares), decay, beta1, beta2, group["eps"],
            WEIGHT=_KINDS[rows[0][0].dtype], PART=PART, num_warps=4, **shape,
        )  # fmt: skip
        return norm

    def _blocks(self, sizes: tuple[int, ...], device: torch.device) -> Tensor:
        """Of each block the index of its tensor, then of each its index in the tensor. Cached."""
        if self._cut is None or self._cut[0] != sizes:
            counts = -(-np.array(sizes) // BLOCK)
            owner = np.repeat(np.arange(len(sizes)), counts)
            place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
            self._cut = sizes, torch.from_numpy(np.concatenate([owner, place])).to(device)
        return self._cut[1]


_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _place(sizes, blocks, num_blocks, EVEN: constexpr, BLOCK: constexpr, PART: constexpr):
    """This program's tensor index, its elements in that tensor, and their mask."""
    # EVEN: sizes and addresses are multiples of 16, so loads and stores are 16 bytes wide
    block, part = tl.program_id(0) // (BLOCK // PART), tl.program_id(0) % (BLOCK // PART)
    owner = tl.load(blocks + block)
    size = tl.load(sizes + owner)
    if EVEN:
        size = tl.multiple_of(size, 16)
    at = tl.multiple_of(tl.load(blocks + num_blocks + block) * BLOCK + part * PART, PART) + tl.arange(0, PART)
    return owner, at, at < size


@triton.jit
def _pointer(place, KIND: constexpr, EVEN: constexpr):
    pointer = tl.load(place).to(tl.pointer_type(KIND))
    if EVEN:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _square(
    pointers, sizes, blocks, squares, tensors, num_blocks,
    GRADIENT: constexpr, EVEN: constexpr, BLOCK: constexpr, PART: constexpr,
):  # fmt: skip
    owner, at, inside = _place(sizes, blocks, num_blocks, EVEN, BLOCK, PART)
    gradients = _pointer(pointers + tensors + owner, GRADIENT, EVEN)
    g = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _step(
    pointers, sizes, blocks, numbers, tensors, num_blocks, decay, beta1, beta2, epsilon,
    WEIGHT: constexpr, GRADIENT: constexpr, EVEN: constexpr, BLOCK: constexpr, PART: constexpr,
):  # fmt: skip
    if tl.load(numbers) > 0:
        factor, rate, root = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
        owner, at, inside = _place(sizes, blocks, num_blocks, EVEN, BLOCK, PART)
        weights = _pointer(pointers + owner, WEIGHT, EVEN)
        gradients = _pointer(pointers + tensors + owner, GRADIENT, EVEN)
        masters = _pointer(pointers + 2 * tensors + owner, tl.float32, EVEN)
        means = _pointer(pointers + 3 * tensors + owner, tl.float32, EVEN)
        squares = _pointer(pointers + 4 * tensors + owner, tl.float32, EVEN)
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

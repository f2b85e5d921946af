"""One attention function for training and decoding, registered with `transformers` as `headrace`.

Every forward pass of the policy, in the engine and in the learner, has its tokens in one row
`[1, T]` (packed sequences) and a *plan* that knows which of them belong together. The model
definition is that of `transformers`; only the plan differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from headrace import kernels
from headrace.policy.exact import RectangleAttention
from headrace.policy.family import attend_rectangle
from headrace.roles import AttentionPlan

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.attention import QUERIES, Blocks, attention_gradient, block_attention, block_tokens

NAME = "headrace"


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, scaling: float, plan: AttentionPlan, **how: Any
) -> tuple[Tensor, None]:
    q_THD, k_TJD, v_TJD = (x[0].transpose(0, 1) for x in (query, key, value))
    window = how.get("sliding_window") or 0
    return plan.attend(module.layer_idx, q_THD, k_TJD, v_TJD, scaling, window)[None], None


# Without a mask function beside it, `transformers` builds no masks: the plan alone decides.
AttentionInterface.register(NAME, _attention)


class _Regroup(torch.autograd.Function):
    """The rows `index` of `x`. With its inverse `back` the backward pass is a gather, not a scatter-add.

    Rows of `x` that `index` does not name are in `unused`, and get a gradient of zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, unused: Tensor) -> Tensor:
        ctx.save_for_backward(back, unused)
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back, unused = ctx.saved_tensors
        gathered = grad[back]
        gathered[unused] = 0
        return gathered, None, None, None


@dataclass(frozen=True, slots=True)
class _Rectangles:
    """Packed sequences, regrouped by similar length into padded rectangles, one after the other.

    Example:
        lengths [5, 3, 5] become shapes [(2, 5), (1, 3)]: the sequences 0, 2 and then 1
    """

    shapes: list[tuple[int, int]]  # (sequences, longest) of each rectangle
    pad: Tensor  # [P] the token of the row at each place; padding repeats one
    unpad: Tensor  # [T] the place of each token of the row
    padding: Tensor  # which of the P places are padding

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> _Rectangles:
        """Lengths within a quarter of each other share a rectangle: few calls, little padding."""
        starts = np.concatenate([[0], np.cumsum(lengths)])
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        shapes: list[tuple[int, int]] = []
        pads: list[np.ndarray] = []
        for i in order:
            count, longest = shapes[-1] if shapes else (0, 0)
            if lengths[i] < 0.75 * longest or not shapes:
                count, longest = 0, lengths[i]
                shapes.append((0, longest))
            shapes[-1] = (count + 1, longest)
            pads.append(starts[i] + np.minimum(np.arange(longest), lengths[i] - 1))
        pad = np.concatenate(pads)
        first = np.concatenate([[True], pad[1:] != pad[:-1]])
        unpad = np.empty(sum(lengths), np.int64)
        unpad[pad[first]] = np.flatnonzero(first)
        arrays = (pad, unpad, np.flatnonzero(~first))
        return cls(shapes, *(torch.from_numpy(x).to(device) for x in arrays))


class PackedPlan:
    """Packed sequences, each attending only to its own past: training and scoring."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = lengths
        self.longest = max(lengths)
        self.positions = torch.cat([torch.arange(n) for n in lengths]).to(device)[None]  # [1, T]
        self._device = device
        self._cut: dict[int, Blocks] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        window = window if window < self.longest else 0
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
            packed: Any = _Packed.apply
            return packed(q_THD, k_TJD, v_TJD, self, scale, window)  # type: ignore[no-any-return]
        return self._attend_rectangles(attend_rectangle, q_THD, k_TJD, v_TJD, scale, window)

    def attend_exact(self, layer: int, *given: Any) -> Tensor:
        """Batch-invariant, with the bits that decoding computes."""
        return self._attend_rectangles(RectangleAttention.apply, *given)

    def _attend_rectangles(self, attend: Any, *given: Any) -> Tensor:
        *qkv, scale, window = given
        if min(self.lengths) == self.longest:
            shape = len(self.lengths), self.longest
            return attend(*qkv, shape, scale, window)  # type: ignore[no-any-return]
        r = self._rectangles
        regroup: Any = _Regroup.apply
        q, k, v = (regroup(x, r.pad, r.unpad, r.padding[:0]) for x in qkv)
        sizes = [count * longest for count, longest in r.shapes]
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), r.shapes, strict=True)
        outs = [attend(*part, scale, window) for part in parts]
        return regroup(torch.cat(outs), r.unpad, r.pad, r.padding)  # type: ignore[no-any-return]

    @cached_property
    def _rectangles(self) -> _Rectangles:
        return _Rectangles.of(self.lengths, self._device)

    def blocks(self, tokens: int) -> Blocks:
        if tokens not in self._cut:
            lengths, starts = self.lengths, [0, *np.cumsum(self.lengths)[:-1].tolist()]
            self._cut[tokens] = Blocks.of([0] * len(lengths), lengths, starts, tokens, self._device)
        return self._cut[tokens]


class _Packed(torch.autograd.Function):
    """Packed attention on a GPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: PackedPlan, scale: float, window: int) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        blocks = plan.blocks(block_tokens(q.shape[1], k.shape[1], q.dtype))
        out, log_sums = block_attention(q, k, v, None, blocks, scale=scale, window=window)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.rest = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale, window = ctx.rest
        q, k, v, out, log_sums = ctx.saved_tensors
        blocks = plan.blocks(QUERIES)
        grads = attention_gradient(grad.contiguous(), q, k, v, out, log_sums, blocks, scale=scale, window=window)
        return *grads, None, None, None

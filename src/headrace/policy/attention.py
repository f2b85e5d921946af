"""One attention function for training and decoding, registered with `transformers` as `headrace`.

Every forward pass of the policy, in the engine and in the learner, has its tokens in one row
`[1, T]` (packed sequences) and a *plan* that knows which of them belong together. The model
definition is that of `transformers`; only the plan differs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headrace.errors import ModelError
from headrace.kernels import attention
from headrace.policy.exact import RectangleAttention
from headrace.policy.family import attend_rectangle
from headrace.roles import AttentionPlan

NAME = "headrace"
# what models ask of an attention function, as `transformers` names it, and ours does not compute
NOT_COMPUTED = {"softcap": "caps its attention scores (softcap)", "s_aux": "has attention sinks"}


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, scaling: float, plan: AttentionPlan, **how: Any
) -> tuple[Tensor, None]:
    for key_word, does in NOT_COMPUTED.items():
        if how.get(key_word) is not None:  # a comparison in bfloat16 may be too coarse to notice
            raise ModelError(f"{type(module).__name__} {does}, which Headrace's attention does not compute")
    q_THD, k_TJD, v_TJD = (x[0].transpose(0, 1) for x in (query, key, value))
    window = how.get("sliding_window") or 0
    return plan.attend(module.layer_idx, q_THD, k_TJD, v_TJD, scaling, window)[None], None


# Without a mask function beside it, `transformers` builds no masks: the plan alone decides.
AttentionInterface.register(NAME, _attention)


class PackedPlan:
    """Packed sequences, each attending only to its own past: training and scoring.

    They may have prefixes in common, which are there once: runs of tokens, in depth-first order.
    Run i has `lengths[i]` tokens and goes on after the token `after[i]` of the row (-1: it is a
    root). What sees a token, and is not of its own run, lies after that run without a gap.

    Example:
        a prompt of 3 tokens with two answers of 2: PackedPlan([5, 2], device, after=[-1, 2])
    """

    def __init__(self, lengths: list[int], device: torch.device, after: list[int] | None = None) -> None:
        self.lengths, self.after = lengths, after or [-1] * len(lengths)
        self._device = device
        stops = np.cumsum(lengths)
        rows = np.arange(stops[-1])
        path, self._paths = rows[:0], list[np.ndarray]()  # from a root to the end of each run
        for run, parent in zip(np.split(rows, stops[:-1]), self.after, strict=True):  # a parent lies on the last path
            path = np.concatenate([path[: np.searchsorted(path, parent, side="right")], run])
            self._paths.append(path)
        self.longest = max(map(len, self._paths))
        self._depths = [len(path) - n for path, n in zip(self._paths, lengths, strict=True)]
        positions = rows - np.repeat(stops - lengths - self._depths, lengths)
        self.positions = torch.from_numpy(positions).to(device)[None]  # [1, T]
        rows[stops - lengths] = np.array(self.after) + 1
        self._previous = torch.from_numpy(rows - 1).to(device)
        self._cut: dict[int, attention.Blocks] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int, exact: bool = False
    ) -> Tensor:
        """If `exact`, batch-invariant, with the bits that decoding computes."""
        if exact:
            return self._attend_rectangles(RectangleAttention.apply, q_THD, k_TJD, v_TJD, scale, window)
        window = window if window < self.longest else 0
        if q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16):
            packed: Any = _Packed.apply
            return packed(q_THD, k_TJD, v_TJD, self, scale, window)  # type: ignore[no-any-return]
        return self._attend_rectangles(attend_rectangle, q_THD, k_TJD, v_TJD, scale, window)

    def _attend_rectangles(self, attend: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        if min(self.lengths) == self.longest:
            return attend(q, k, v, (len(self.lengths), self.longest), *how)  # type: ignore[no-any-return]
        shapes, (pad, keys, unpad) = self._rectangles
        sizes = [count * longest for count, longest, _ in shapes]
        seen = [count * (depth + longest) for count, longest, depth in shapes]
        parts = zip(_rows(q, pad).split(sizes), _rows(k, keys).split(seen), _rows(v, keys).split(seen), strict=True)
        outs = [attend(*part, shape[:2], *how) for part, shape in zip(parts, shapes, strict=True)]
        return _rows(torch.cat(outs), unpad)

    @cached_property
    def _rectangles(self) -> tuple[list[tuple[int, int, int]], list[Tensor]]:
        """Runs, regrouped into padded rectangles, one after the other: (runs, longest, tokens before them) of each.

        And the token of the row at each place, where padding repeats one; the same with the tokens
        before each run; and the place of each token of the row. Lengths within a quarter of each
        other share a rectangle: few calls, little padding.

        Example:
            lengths [5, 3, 5] of roots become (2, 5, 0) and (1, 3, 0): the runs 0, 2 and then 1
        """
        shapes, pads, keys = list[tuple[int, int, int]](), list[np.ndarray](), list[np.ndarray]()
        runs = zip(self._depths, self.lengths, self._paths, strict=True)
        for depth, length, path in sorted(runs, key=lambda run: (run[0], -run[1])):
            if not shapes or shapes[-1][2] != depth or length < 0.75 * shapes[-1][1]:
                shapes.append((0, length, depth))
            count, longest, _ = shapes[-1]
            shapes[-1] = (count + 1, longest, depth)
            keys.append(path[np.minimum(np.arange(depth + longest), len(path) - 1)])
            pads.append(keys[-1][depth:])
        pad, unpad = np.concatenate(pads), np.empty(sum(self.lengths), np.int64)
        unpad[pad[::-1]] = np.arange(len(pad))[::-1]  # the first of several places is written last
        return shapes, [torch.from_numpy(x).to(self._device) for x in (pad, np.concatenate(keys), unpad)]

    @property
    def num_pairs(self) -> float:
        """Of a token and one that it sees."""
        return sum(n * (depth + (n + 1) / 2) for n, depth in zip(self.lengths, self._depths, strict=True))

    def before(self, hidden_TE: Tensor, at: Tensor) -> Tensor:
        """The hidden states of the tokens before those at `at`: what predicts them."""
        return _rows(hidden_TE, self._previous[at])

    def blocks(self, tokens: int) -> attention.Blocks:
        if tokens not in self._cut:
            sizes = list(map(len, self._paths))
            parts = zip(self._depths, sizes, [0, *np.cumsum(sizes).tolist()], strict=False)
            self._cut[tokens] = attention.Blocks.of(parts, tokens, self._device, self._tree)
        return self._cut[tokens]

    @cached_property
    def _tree(self) -> attention.Tree | None:
        if max(self.after) < 0:
            return None
        stops = np.cumsum(self.lengths)
        starts, ends = stops - self.lengths, np.repeat(stops, self.lengths)
        for i in reversed(range(len(stops))):  # what goes on after a run lies behind it
            path = self._paths[i][: self._depths[i]]
            ends[path] = np.maximum(ends[path], ends[starts[i]])
        arrays = np.concatenate(self._paths), ends, self.positions[0].cpu().numpy()
        return attention.Tree(*(torch.from_numpy(x.astype(np.int32)).to(self._device) for x in arrays))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` of `x`, some perhaps often: their gradients are added in one order, which indexing does not."""
    return F.embedding(index, x.flatten(1)).unflatten(1, x.shape[1:])  # type: ignore[no-any-return]


class _Packed(torch.autograd.Function):
    """Packed attention on a GPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: PackedPlan, scale: float, window: int) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        blocks = plan.blocks(attention.block_tokens(q.shape[1], k.shape[1], q.dtype))
        out, log_sums = attention.block_attention(q, k, v, None, blocks, scale=scale, window=window)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.rest = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale, window = ctx.rest
        given = grad.contiguous(), ctx.saved_tensors, plan.blocks(attention.QUERIES)
        return *attention.attention_gradient(*given, scale=scale, window=window), None, None, None

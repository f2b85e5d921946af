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
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headrace import kernels
from headrace.policy.exact import RectangleAttention
from headrace.policy.family import attend_rectangle
from headrace.roles import AttentionPlan

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.attention import QUERIES, Blocks, Tree, attention_gradient, block_attention, block_tokens

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
        self.positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)[None]  # [1, T]
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

    def before(self, hidden_TE: Tensor, at: Tensor) -> Tensor:
        """The hidden states of the tokens before those at `at`: what predicts them."""
        return hidden_TE[at - 1]

    def blocks(self, tokens: int) -> Blocks:
        if tokens not in self._cut:
            self._cut[tokens] = self._blocks(tokens)
        return self._cut[tokens]

    def _blocks(self, tokens: int) -> Blocks:
        lengths, starts = self.lengths, [0, *np.cumsum(self.lengths)[:-1].tolist()]
        return Blocks.of([0] * len(lengths), lengths, starts, tokens, self._device)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of a tree that begin at one depth, padded to one length, with the keys of their paths."""

    shape: tuple[int, int]  # (runs, longest)
    queries: Tensor  # [runs * longest] rows; padding repeats one
    keys: Tensor  # [runs * (depth + longest)]


class TreePlan(PackedPlan):
    """Sequences whose common prefixes are there once: runs of tokens, in depth-first order.

    Run i has `lengths[i]` tokens and goes on after the token `after[i]` of the row (-1: it is a root).
    What sees a token, and is not of its own run, lies after that run without a gap.

    Example:
        a prompt of 3 tokens with two answers of 2: TreePlan([5, 2], [-1, 2], device)
    """

    def __init__(self, lengths: list[int], after: list[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        ends = np.cumsum(lengths)
        rows = np.arange(ends[-1])
        self._after, self._paths = after, list[np.ndarray]()  # [depth and length] of each run
        previous = rows - 1
        for end, length, parent in zip(ends.tolist(), lengths, after, strict=True):
            run = int(np.searchsorted(ends, parent, side="right"))
            past = self._paths[run][: len(self._paths[run]) - int(ends[run]) + parent + 1] if parent >= 0 else rows[:0]
            self._paths.append(np.concatenate([past, rows[end - length : end]]))
            previous[end - length] = parent
        self._depths = [len(path) - length for path, length in zip(self._paths, lengths, strict=True)]
        self.longest = max(map(len, self._paths))
        positions = np.concatenate([np.arange(d, d + n) for d, n in zip(self._depths, lengths, strict=True)])
        self.positions = torch.from_numpy(positions).to(device)[None]
        self._previous = torch.from_numpy(previous).to(device)

    def before(self, hidden_TE: Tensor, at: Tensor) -> Tensor:
        return _rows(hidden_TE, self._previous[at])

    def _attend_rectangles(self, attend: Any, *given: Any) -> Tensor:
        q, k, v, scale, window = given
        parts = [
            attend(_rows(q, r.queries), _rows(k, r.keys), _rows(v, r.keys), r.shape, scale, window) for r in self._runs
        ]
        return _rows(torch.cat(parts), self._places)

    @cached_property
    def _runs(self) -> list[_Runs]:
        """Runs of one depth, and of lengths within a quarter of each other, are computed together."""
        order = sorted(range(len(self.lengths)), key=lambda i: (self._depths[i], -self.lengths[i]))
        together: list[list[int]] = []
        for i in order:
            first = together[-1][0] if together else i
            if not together or self._depths[i] != self._depths[first] or self.lengths[i] < 0.75 * self.lengths[first]:
                together.append([])
            together[-1].append(i)
        found = []
        for runs in together:
            longest = self.lengths[runs[0]]
            paths = [np.pad(p := self._paths[i], (0, longest - self.lengths[i]), constant_values=p[-1]) for i in runs]
            keys = np.stack(paths)
            rows = keys[:, keys.shape[1] - longest :].ravel(), keys.ravel()
            found.append(_Runs((len(runs), longest), *(torch.from_numpy(x).to(self._device) for x in rows)))
        return found

    @cached_property
    def _places(self) -> Tensor:
        """Where each token lies among the queries of `_runs`."""
        queries = torch.cat([r.queries for r in self._runs]).cpu().numpy()
        first = np.concatenate([[True], queries[1:] != queries[:-1]])
        places = np.empty(int(queries.max()) + 1, np.int64)
        places[queries[first]] = np.flatnonzero(first)
        return torch.from_numpy(places).to(self._device)

    def _blocks(self, tokens: int) -> Blocks:
        sizes = [len(path) for path in self._paths]
        sources = [0, *np.cumsum(sizes)[:-1].tolist()]
        return Blocks.of(self._depths, sizes, sources, tokens, self._device, self._tree)

    @cached_property
    def _tree(self) -> Tree:
        stops = np.cumsum(self.lengths)
        starts, ends = stops - self.lengths, np.repeat(stops, self.lengths)
        for i in reversed(range(len(stops))):  # what goes on after a run lies behind it
            path = self._paths[i][: self._depths[i]]
            ends[path] = np.maximum(ends[path], ends[starts[i]])
        arrays = np.concatenate(self._paths), ends, self.positions[0].cpu().numpy()
        return Tree(*(torch.from_numpy(x.astype(np.int32)).to(self._device) for x in arrays))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` of `x`, some perhaps often: their gradients are added in one order, which indexing does not."""
    found: Tensor = F.embedding(index, x.flatten(1)).unflatten(1, x.shape[1:])
    return found


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

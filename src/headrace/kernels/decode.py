"""Decode attention: one query per sequence against its cache, which lies in pages.

The keys of a sequence are read in segments of SEGMENT tokens, each by a program of its own, and the segments' results
are put together in order. Few long sequences therefore fill the GPU as well as many short ones. Segments begin at
fixed places, so a sequence's result does not depend on which others are in the batch.

n sequences, H query heads, J key/value heads, D head size, P pages of PAGE tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 512
TILE = 64


def decode_attention(
    q_nHD: Tensor,
    keys_PJTD: Tensor,
    values_PJTD: Tensor,
    tables: Tensor,
    lengths_n: Tensor,
    *,
    scale: float,
    window: int,
    longest: int,
) -> Tensor:
    """Attention `[n, H, D]` of each query to the first `lengths_n` tokens of its sequence, the query's own included.

    `tables [n, most pages]` names the pages of each sequence in order; no length is above `longest`.
    """
    n, num_heads, head_size = q_nHD.shape
    num_kv_heads, page = keys_PJTD.shape[1:3]
    num_segments = -(-longest // SEGMENT)
    out = torch.empty_like(q_nHD)
    partial = sums = out
    if num_segments > 1:
        partial = torch.empty(n, num_heads, num_segments, head_size, dtype=torch.float32, device=out.device)
        sums = torch.empty(n, num_heads, num_segments, 2, dtype=torch.float32, device=out.device)
    shape: dict[str, Any] = {"H": num_heads, "D": head_size, "DP": triton.next_power_of_2(head_size)}
    _segment[(n, num_kv_heads, num_segments)](
        q_nHD, keys_PJTD, values_PJTD, tables, lengths_n, out, partial, sums,
        scale, window, keys_PJTD.stride(0), keys_PJTD.stride(1), tables.stride(0), num_segments,
        J=num_kv_heads, PAGE=page, TILE=TILE, SEGMENT=SEGMENT, ALONE=num_segments == 1, **shape,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_segments > 1:
        _join[(n, num_heads)](
            partial, sums, lengths_n, out, window, num_segments, SEGMENT=SEGMENT, **shape, num_warps=1
        )
    return out


@triton.jit
def _segment(
    Q, K, V, tables, lengths, out, partial, sums, scale, window, page_stride, head_stride, table_stride, num_segments,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    SEGMENT: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    row, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = length - window if window > 0 else 0
    start = segment * SEGMENT
    end = tl.minimum(length, start + SEGMENT)
    if (start < length) & (end > first):
        G: tl.constexpr = H // J
        g, d, t = tl.arange(0, 16), tl.arange(0, DP), tl.arange(0, TILE)
        heads = head * G + g
        at = heads[:, None] * D + d[None, :]
        inside = (g < G)[:, None] & (d < D)[None, :]
        q = tl.load(Q + row * H * D + at, mask=inside, other=0.0)
        highest = tl.full([16], float("-inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, DP], tl.float32)
        for s in range(start, end, TILE):
            if s + TILE > first:
                page = tl.load(tables + row * table_stride + s // PAGE).to(tl.int64)
                base = page * page_stride + head * head_stride + (s % PAGE) * D
                seen = (s + t < end) & (s + t >= first)
                there = seen[:, None] & (d < D)[None, :]
                k = tl.load(K + base + t[:, None] * D + d[None, :], mask=there, other=0.0)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                higher = tl.maximum(highest, tl.max(scores, 1))
                shrink = tl.exp2(highest - higher)
                p = tl.exp2(scores - higher[:, None])
                total = total * shrink + tl.sum(p, 1)
                v = tl.load(V + base + t[:, None] * D + d[None, :], mask=there, other=0.0)
                acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
                highest = higher
        if ALONE:
            tl.store(out + row * H * D + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            place = (row * H + heads) * num_segments + segment
            tl.store(partial + place[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(sums + place * 2, highest, mask=g < G)
            tl.store(sums + place * 2 + 1, total, mask=g < G)


@triton.jit
def _join(
    partial, sums, lengths, out, window, num_segments, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0) if window > 0 else 0
    d = tl.arange(0, DP)
    highest, total = float("-inf"), 0.0
    acc = tl.zeros([DP], tl.float32)
    for segment in range(first // SEGMENT, tl.cdiv(length, SEGMENT)):
        place = (row * H + head) * num_segments + segment
        theirs, sum = tl.load(sums + place * 2), tl.load(sums + place * 2 + 1)
        higher = tl.maximum(highest, theirs)
        mine, yours = tl.exp2(highest - higher), tl.exp2(theirs - higher)
        acc = acc * mine + tl.load(partial + place * D + d, mask=d < D, other=0.0) * yours
        total = total * mine + sum * yours
        highest = higher
    tl.store(out + (row * H + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)

"""Batch-invariant attention: a token gets the same bits in decode, prefill and training.

Keys are read in tiles of TILE tokens, tiles are summed into segments of SEGMENT tokens, and
segments are joined in order. In decode each segment has a program of its own (split-KV, as in flash
decoding), so few long sequences fill the GPU as well as many short ones. In prefill and training a
block of queries loops over all segments. Both compute the same bits: segments begin at fixed
positions, masked keys add exact zeros, sums over a tile are matrix products (whose order does not
depend on the layout of the program), and floating-point contraction (fused multiply-add) is off.

n sequences, T tokens, H query heads, J key/value heads, D head size, P pages of PAGE tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634
SEGMENT = 512
TILE = 64
BLOCK = 128  # query rows of one program: tokens times query heads per key/value head (GQA)


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
    """Paged decode attention `[n, H, D]` over the first `lengths_n` tokens of each sequence.

    `tables [n, max pages]` are the page tables of the sequences; `longest` is an upper bound of
    `lengths_n`.
    """
    n, num_heads, head_size = q_nHD.shape
    num_kv_heads, page = keys_PJTD.shape[1:3]
    num_segments = -(-longest // SEGMENT)
    out = torch.empty_like(q_nHD)
    partial = sums = out
    if num_segments > 1:
        partial = torch.empty(n, num_heads, num_segments, head_size, dtype=torch.float32, device=out.device)
        sums = torch.empty(n, num_heads, num_segments, 2, dtype=torch.float32, device=out.device)
    shape: dict[str, Any] = {"H": num_heads, "D": head_size, "DP": padded_size(head_size)}
    group = max(16, triton.next_power_of_2(num_heads // num_kv_heads))  # tl.dot needs 16 rows
    _decode[(n, num_kv_heads, num_segments)](
        q_nHD, keys_PJTD, values_PJTD, tables, lengths_n, out, partial, sums,
        scale * LOG2E, window, keys_PJTD.stride(0), keys_PJTD.stride(1), tables.stride(0), num_segments,
        J=num_kv_heads, GP=group, PAGE=page, TILE=TILE, SEGMENT=SEGMENT, ALONE=num_segments == 1, **shape,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    if num_segments > 1:
        _join[(n, num_heads)](
            partial, sums, lengths_n, out, window, num_segments, SEGMENT=SEGMENT, **shape,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Blocks:
    """Parts of sequences in blocks. A row is (first token, its position, num tokens, source, end).

    `source` is where the sequence begins among the keys, or its row in the page tables; `end` is
    the position where the part ends.

    Example:
        two whole sequences of 5 and 3 tokens, 4 tokens per block:
        Blocks(table=tensor([[4, 4, 1, 0, 5], [0, 0, 4, 0, 5], [5, 0, 3, 5, 3]]), tokens=4)
    """

    table: Tensor  # [blocks, 5] int32
    tokens: int

    @classmethod
    def of(
        cls, starts: Sequence[int], ends: Sequence[int], sources: Sequence[int], tokens: int, device: torch.device
    ) -> Blocks:
        """Blocks of packed parts, from positions `starts` to `ends`, with `tokens` per block."""
        rows, first = [], 0
        for start, end, source in zip(starts, ends, sources, strict=True):
            at = np.arange(start, end, tokens)
            same = np.ones_like(at)
            rows.append(np.stack([first + at - start, at, np.minimum(tokens, end - at), source * same, end * same], 1))
            first += end - start
        table = np.concatenate(rows)
        table = table[np.argsort(-table[:, 1], kind="stable")]  # longest context first
        return cls(torch.from_numpy(table.astype(np.int32)).to(device), tokens)


def padded_size(head_size: int) -> int:
    """The power of two, at least 16, that tl.dot needs."""
    return max(16, int(triton.next_power_of_2(head_size)))


def block_tokens(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> int:
    """Tokens per block of query rows; fewer in float32, to fit into shared memory."""
    rows = BLOCK if dtype.itemsize == 2 else BLOCK // 4
    return max(1, rows // int(triton.next_power_of_2(num_heads // num_kv_heads)))


def block_attention(
    q_THD: Tensor, keys: Tensor, values: Tensor, tables: Tensor | None, blocks: Blocks, *, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention `[T, H, D]` of packed tokens, and its log-sum-exp `[H, T]`.

    Keys and values are packed `[T, J, D]` (with strides), or in pages `[P, J, PAGE, D]` with
    `tables`.
    """
    tokens, num_heads, head_size = q_THD.shape
    num_kv_heads = keys.shape[1]
    out = torch.empty(tokens, num_heads, head_size, dtype=q_THD.dtype, device=q_THD.device)
    log_sums = torch.empty(num_heads, tokens, dtype=torch.float32, device=q_THD.device)
    paged = tables is not None
    page, token_stride = (keys.shape[2], keys.stride(2)) if paged else (1, keys.stride(0))
    assert q_THD.stride(2) == keys.stride(-1) == values.stride(-1) == 1
    assert keys.stride() == values.stride()
    group = num_heads // num_kv_heads
    padded = triton.next_power_of_2(group)
    warps, stages = (8, 3) if q_THD.dtype.itemsize == 2 else (4, 1)
    _blocks[(len(blocks.table), num_kv_heads)](
        q_THD, keys, values, tables if tables is not None else q_THD, blocks.table, out, log_sums, tokens,
        scale * LOG2E, window, q_THD.stride(0), q_THD.stride(1), keys.stride(0), token_stride,
        keys.stride(1), tables.stride(0) if tables is not None else 0,
        H=num_heads, G=group, GP=padded, M=max(16, blocks.tokens * padded),
        D=head_size, DP=padded_size(head_size), PAGE=page, TILE=TILE, SEGMENT=SEGMENT, PAGED=paged,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out, log_sums


@triton.jit
def _sum_segment(
    q, K, V, table, base, token_stride, page_stride, start, end, first, last, scale,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys `start` to `end`; query m of `q` sees `first[m]` to `last[m]`."""
    d, t = tl.arange(0, DP), tl.arange(0, TILE)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    ones = tl.full([TILE, 16], 1.0, K.dtype.element_ty)
    for s in range(start, end, TILE):
        if PAGED:
            place = base + tl.load(table + s // PAGE).to(tl.int64) * page_stride + s % PAGE * token_stride
        else:
            place = base + tl.cast(s, tl.int64) * token_stride
        at = s + t
        there = (at < end)[:, None] & (d < D)[None, :]
        k = tl.load(K + place + t[:, None] * token_stride + d[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((at[None, :] < last[:, None]) & (at[None, :] >= first[:, None]), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # all keys so far were masked
        shrink = tl.exp2(highest - level)
        v = tl.load(V + place + t[:, None] * token_stride + d[None, :], mask=there, other=0.0)
        p = tl.exp2(scores - level[:, None]).to(v.dtype)
        total = total * shrink + tl.max(tl.dot(p, ones, input_precision="ieee"), 1)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        highest = higher
    return acc, total, highest


@triton.jit
def _join_sums(total, highest, their_total, theirs):
    """Join the sums of two neighbouring segments. Returns the factors of their outputs, too."""
    higher = tl.maximum(highest, theirs)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    mine, yours = tl.exp2(highest - level), tl.exp2(theirs - level)
    return mine, yours, total * mine + their_total * yours, higher


@triton.jit
def _decode(
    Q, K, V, tables, lengths, out, partial, sums, scale, window, page_stride, head_stride, table_stride, num_segments,
    H: tl.constexpr, J: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    row, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    seen_from = tl.maximum(length - window, 0) if window > 0 else 0
    start = segment * SEGMENT
    end = tl.minimum(length, start + SEGMENT)
    if (start < length) & (end > seen_from):
        G: tl.constexpr = H // J
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        heads = head * G + g
        at = heads[:, None] * D + d[None, :]
        inside = (g < G)[:, None] & (d < D)[None, :]
        q = tl.load(Q + row * H * D + at, mask=inside, other=0.0)
        begin = tl.maximum(start, seen_from // TILE * TILE)
        acc, total, highest = _sum_segment(
            q, K, V, tables + row * table_stride, (head * head_stride).to(tl.int64), D, page_stride, begin, end,
            tl.zeros([GP], tl.int32) + seen_from, tl.zeros([GP], tl.int32) + length, scale,
            GP, D, DP, PAGE, TILE, True,
        )  # fmt: skip
        if ALONE:
            tl.store(out + row * H * D + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            place = (row * H + heads).to(tl.int64) * num_segments + segment
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
        place = (row * H + head).to(tl.int64) * num_segments + segment
        more = tl.load(partial + place * D + d, mask=d < D, other=0.0)
        mine, yours, total, highest = _join_sums(
            total, highest, tl.load(sums + place * 2 + 1), tl.load(sums + place * 2)
        )
        acc = acc * mine + more * yours
    tl.store(out + (row * H + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _blocks(
    Q, K, V, tables, blocks, out, log_sums, num_tokens, scale, window, q_token_stride, q_head_stride,
    page_stride, token_stride, head_stride, table_stride,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) * 5, tl.program_id(1)
    token, position, count, source = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    m, d = tl.arange(0, M), tl.arange(0, DP)
    heads = head * G + m % GP
    valid = (m // GP < count) & (m % GP < G)
    inside = valid[:, None] & (d < D)[None, :]
    tokens = (token + m // GP).to(tl.int64)
    q = tl.load(
        Q + tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + d[None, :], mask=inside, other=0.0
    )
    last = tl.where(valid, position + m // GP + 1, 0)
    first = tl.maximum(last - window, 0) if window > 0 else last * 0
    end_of_all = position + count
    begin_of_all = tl.maximum(position + 1 - window, 0) // TILE * TILE if window > 0 else 0
    base = (head * head_stride).to(tl.int64)
    table = tables
    if PAGED:
        table = tables + source * table_stride
    else:
        base += source.to(tl.int64) * token_stride
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for segment in range(begin_of_all // SEGMENT, tl.cdiv(end_of_all, SEGMENT)):
        begin = tl.maximum(segment * SEGMENT, begin_of_all)
        end = tl.minimum(end_of_all, segment * SEGMENT + SEGMENT)
        more, their_total, theirs = _sum_segment(
            q, K, V, table, base, token_stride, page_stride, begin, end, first, last, scale,
            M, D, DP, PAGE, TILE, PAGED,
        )  # fmt: skip
        mine, yours, total, highest = _join_sums(total, highest, their_total, theirs)
        acc = acc * mine[:, None] + more * yours[:, None]
    at = tokens[:, None] * H * D + heads[:, None] * D + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    natural = (highest + tl.log2(total)) * 0.6931471805599453
    tl.store(log_sums + heads.to(tl.int64) * num_tokens + tokens, natural, mask=valid)

"""Batch-invariant attention: a token gets the same bits in decode, prefill and training.

Keys are read in tiles of TILE tokens, tiles are summed into segments of SEGMENT tokens, and
segments are joined in order. In decode each segment has a program of its own (split-KV, as in flash
decoding), so few long sequences fill the GPU as well as many short ones. In prefill and training a
block of queries loops over all segments. Both compute the same bits: segments begin at fixed
positions, masked keys add exact zeros, sums over a tile are matrix products (whose order does not
depend on the layout of the program), and floating-point contraction (fused multiply-add) is off.

The gradient is deterministic: every sum has one order, no atomics. One pass over blocks of queries
is for their gradient, one over blocks of keys for those of keys and values.

Sequences with common prefixes may form a `Tree`. A tile of keys then has the same positions as in
each sequence alone, and so the same bits; only where its keys lie is looked up.

n sequences, T tokens, H query heads, J key/value heads, D head size, P pages of PAGE tokens.
`pulls` are the row sums of grad * out, called delta in FlashAttention.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from headrace.kernels.block import await_last, early

LOG2E = 1.4426950408889634
SEGMENT = 256
TILE = 64
BLOCK = 128  # query rows of one program: tokens times query heads per key/value head (GQA)
QUERIES, KEYS = 64, 64  # tokens of a block in the two passes of the gradient


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, *, scale: float, window: int, longest: int
) -> Tensor:
    """Attention `[n, H, D]` of `q [n, H, D]` over the first `lengths [n]` tokens of each sequence.

    Keys and values are in pages `[P, J, PAGE, D]`, of which `tables [n, max pages]` lists those of
    each sequence; `longest` is an upper bound of `lengths`.
    """
    n, num_heads, head_size = q.shape
    num_kv_heads, page = keys.shape[1:3]
    num_segments = -(-longest // SEGMENT)
    out = torch.empty_like(q)
    partial = sums = out
    if num_segments > 1:
        partial = torch.empty(n, num_heads, num_segments, head_size, dtype=torch.float32, device=out.device)
        sums = torch.empty(n, num_heads, num_segments, 2, dtype=torch.float32, device=out.device)
    shape: dict[str, Any] = {"H": num_heads, "D": head_size, "DP": padded_size(head_size)}
    group = max(16, triton.next_power_of_2(num_heads // num_kv_heads))  # tl.dot needs 16 rows
    _decode[(n, num_kv_heads, num_segments)](
        q, keys, values, tables, lengths, out, partial, sums,
        scale * LOG2E, window, keys.stride(0), keys.stride(1), tables.stride(0), num_segments,
        J=num_kv_heads, GP=group, PAGE=page, TILE=TILE, SEGMENT=SEGMENT, ALONE=num_segments == 1, **shape,
        num_warps=4, num_stages=2, enable_fp_fusion=False, **early(n),
    )  # fmt: skip
    if num_segments > 1:
        _join[(n, num_heads)](
            partial, sums, lengths, out, window, num_segments, SEGMENT=SEGMENT, **shape,
            num_warps=1, enable_fp_fusion=False, **early(n),
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class Tree:
    """Runs of tokens that go on after tokens of other runs, in depth-first order.

    Example:
        a run of 3 tokens, and one of 2 that goes on after its second token:
        Tree(paths=tensor([0, 1, 2, 0, 1, 3, 4]), ends=tensor([5, 5, 3, 5, 5]), positions=tensor([0, 1, 2, 2, 3]))
    """

    paths: Tensor  # int32, the tokens from the root to the end of each run
    ends: Tensor  # [T] int32: token t is seen by the tokens from t to ends[t]
    positions: Tensor  # [T] int32


@dataclass(frozen=True, slots=True)
class Blocks:
    """Parts of sequences in blocks. A row is (first token, its position, num tokens, source, end).

    `source` is where the sequence begins among the keys, or its row in the page tables, or where
    its path begins in those of the `tree`; `end` is the position where the part ends.

    Example:
        two whole sequences of 5 and 3 tokens, 4 tokens per block:
        Blocks(table=tensor([[4, 4, 1, 0, 5], [0, 0, 4, 0, 5], [5, 0, 3, 5, 3]]), tokens=4)
    """

    table: Tensor  # [blocks, 5] int32
    tokens: int
    tree: Tree | None = None

    @classmethod
    def of(
        cls, parts: Iterable[tuple[int, int, int]], tokens: int, device: torch.device, tree: Tree | None = None
    ) -> "Blocks":
        """Blocks of packed parts (from position, to position, source), with `tokens` per block."""
        rows, first = [], 0
        for start, end, source in parts:
            at = np.arange(start, end, tokens)
            columns = first + at - start, at, np.minimum(tokens, end - at), source, end
            rows.append(np.stack(np.broadcast_arrays(*columns), 1))
            first += end - start
        table = np.concatenate(rows)
        table = table[np.argsort(-table[:, 1], kind="stable")]  # longest context first
        return cls(torch.from_numpy(table.astype(np.int32)).to(device), tokens, tree)


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

    Keys and values are packed `[T, J, D]` (with strides), or in pages `[P, J, PAGE, D]` of
    `tables`.
    """
    if blocks.tree is not None:  # pages of one token
        keys, values, tables = keys[:, :, None], values[:, :, None], blocks.tree.paths
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


def attention_gradient(
    grad_THD: Tensor, saved: Sequence[Tensor], blocks: Blocks, *, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, `saved` with the results of `block_attention`.

    `blocks` are of QUERIES tokens, of whole sequences.
    """
    q_THD, k_TJD, v_TJD, out_THD, log_sums_HT = saved
    tokens, num_heads, head_size = q_THD.shape
    num_kv_heads = k_TJD.shape[1]
    grad_q, grad_k, grad_v = torch.empty_like(q_THD), torch.empty_like(k_TJD), torch.empty_like(v_TJD)
    pulls = torch.empty_like(log_sums_HT)
    shape = {"H": num_heads, "J": num_kv_heads, "D": head_size, "DP": padded_size(head_size)}
    shape |= {"M": QUERIES, "N": KEYS, "WINDOW": window > 0, "TREE": blocks.tree is not None}
    tree = blocks.tree or Tree(blocks.table, blocks.table, blocks.table)
    _of_queries[(len(blocks.table), num_heads)](
        grad_THD, q_THD, k_TJD, v_TJD, out_THD, log_sums_HT, pulls, grad_q, blocks.table, tree.paths, tokens,
        scale, scale * LOG2E, window, **shape, num_warps=4, num_stages=2,
    )  # fmt: skip
    _of_keys[(len(blocks.table), num_kv_heads)](
        grad_THD, q_THD, k_TJD, v_TJD, log_sums_HT, pulls, grad_k, grad_v, blocks.table, tree.ends, tree.positions,
        tokens, scale, scale * LOG2E, window, **shape, num_warps=4, num_stages=1,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


@triton.jit
def _part(block):
    """First token, its position, number of tokens, and source of a row of `Blocks`."""
    return tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)


@triton.jit
def _nothing(M: constexpr, DP: constexpr):
    """Output, sum and maximum of no keys."""
    return tl.zeros([M, DP], tl.float32), tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32)


@triton.jit
def _add_tile(
    acc, total, highest, q, K, V, table, base, token_stride, page_stride, s, end, first, last,
    scale, D: constexpr, DP: constexpr, PAGE: constexpr, TILE: constexpr, PAGED: constexpr, MASKED: constexpr,
):  # fmt: skip
    """Online softmax over TILE keys from `s`; MASKED: up to `end`, query m sees `first[m]` to `last[m]`."""
    d, t = tl.arange(0, DP), tl.arange(0, TILE)
    at = s + t
    ahead = t[:, None] * token_stride
    if PAGED:
        if PAGE == 1:
            place = base
            ahead = tl.load(table + at, mask=at < end, other=0).to(tl.int64)[:, None] * page_stride
        else:
            page = tl.load(table + s // PAGE).to(tl.int64)
            place = base + page * page_stride + s % PAGE * token_stride
    else:
        place = base + tl.cast(s, tl.int64) * token_stride
    there = (at < end)[:, None] & (d < D)[None, :] if MASKED or D < DP else None
    other = 0.0 if MASKED or D < DP else None
    k = tl.load(K + place + ahead + d[None, :], mask=there, other=other)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = (at[None, :] < last[:, None]) & (at[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher  # of no key -inf
    shrink = tl.exp2(highest - level)
    v = tl.load(V + place + ahead + d[None, :], mask=there, other=other)
    p = tl.exp2(scores - level[:, None]).to(v.dtype)
    ones = tl.full([TILE, 16], 1.0, v.dtype)
    total = total * shrink + tl.max(tl.dot(p, ones, input_precision="ieee"), 1)
    return acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee"), total, higher


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
    H: constexpr, J: constexpr, GP: constexpr, D: constexpr, DP: constexpr, PAGE: constexpr,
    TILE: constexpr, SEGMENT: constexpr, ALONE: constexpr, EARLY: constexpr,
):  # fmt: skip
    await_last(EARLY)
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
        first, last = tl.zeros([GP], tl.int32) + seen_from, tl.zeros([GP], tl.int32) + length
        table, base = tables + row * table_stride, (head * head_stride).to(tl.int64)
        acc, total, highest = _nothing(GP, DP)
        for s in range(begin, end, TILE):
            acc, total, highest = _add_tile(
                acc, total, highest, q, K, V, table, base, D, page_stride, s, end, first, last,
                scale, D, DP, PAGE, TILE, True, True,
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
    partial, sums, lengths, out, window, num_segments, H: constexpr, D: constexpr, DP: constexpr,
    SEGMENT: constexpr, EARLY: constexpr,
):  # fmt: skip
    await_last(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    first = tl.maximum(length - window, 0) if window > 0 else 0
    d = tl.arange(0, DP)
    highest, total = float("-inf"), 0.0
    acc = tl.zeros([DP], tl.float32)
    for segment in range(first // SEGMENT, tl.cdiv(length, SEGMENT)):
        place = (row * H + head).to(tl.int64) * num_segments + segment
        more = tl.load(partial + place * D + d, mask=d < D, other=0.0)
        theirs, their_total = tl.load(sums + place * 2), tl.load(sums + place * 2 + 1)
        mine, yours, total, highest = _join_sums(total, highest, their_total, theirs)
        acc = acc * mine + more * yours
    tl.store(out + (row * H + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _blocks(
    Q, K, V, tables, blocks, out, log_sums, num_tokens, scale, window, q_token_stride, q_head_stride,
    page_stride, token_stride, head_stride, table_stride,
    H: constexpr, G: constexpr, GP: constexpr, M: constexpr, D: constexpr, DP: constexpr,
    PAGE: constexpr, TILE: constexpr, SEGMENT: constexpr, PAGED: constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) * 5, tl.program_id(1)
    token, position, count, source = _part(block)
    m, d = tl.arange(0, M), tl.arange(0, DP)
    heads = head * G + m % GP
    valid = (m // GP < count) & (m % GP < G)
    inside = valid[:, None] & (d < D)[None, :]
    tokens = (token + m // GP).to(tl.int64)
    asking = tokens[:, None] * q_token_stride + heads[:, None] * q_head_stride + d[None, :]
    q = tl.load(Q + asking, mask=inside, other=0.0)
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
    acc, total, highest = _nothing(M, DP)
    more, their_total, theirs = _nothing(M, DP)
    clear = begin_of_all if window > 0 else (position + 1) // TILE * TILE  # all see all before it
    for masked in tl.static_range(2):
        # one loop over all segments: its loads never pause
        for s in range(clear if masked else begin_of_all, end_of_all if masked else clear, TILE):
            more, their_total, theirs = _add_tile(
                more, their_total, theirs, q, K, V, table, base, token_stride, page_stride, s,
                end_of_all, first, last, scale, D, DP, PAGE, TILE, PAGED, masked,
            )  # fmt: skip
            if (s + TILE) % SEGMENT == 0:
                mine, yours, total, highest = _join_sums(total, highest, their_total, theirs)
                acc = acc * mine[:, None] + more * yours[:, None]
                more, their_total, theirs = _nothing(M, DP)
    mine, yours, total, highest = _join_sums(total, highest, their_total, theirs)
    acc = acc * mine[:, None] + more * yours[:, None]
    at = tokens[:, None] * H * D + heads[:, None] * D + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    natural = (highest + tl.log2(total)) * 0.6931471805599453
    tl.store(log_sums + heads.to(tl.int64) * num_tokens + tokens, natural, mask=valid)


@triton.jit
def _of_queries(
    grad, Q, K, V, out, log_sums, pulls, grad_q, blocks, paths, num_tokens, scale, scale2, window,
    H: constexpr, J: constexpr, D: constexpr, DP: constexpr, M: constexpr, N: constexpr,
    WINDOW: constexpr, TREE: constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) * 5, tl.program_id(1)
    token, position, count, source = _part(block)
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
    inside = (m < count)[:, None] & (d < D)[None, :]
    at = ((token + m)[:, None].to(tl.int64) * H + head) * D + d[None, :]
    q = tl.load(Q + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0)
    o = tl.load(out + at, mask=inside, other=0.0)
    pull = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    row = head.to(tl.int64) * num_tokens + token + m
    tl.store(pulls + row, pull, mask=m < count)
    level = tl.load(log_sums + row, mask=m < count, other=0.0) * 1.4426950408889634
    acc = tl.zeros([M, DP], tl.float32)
    first = tl.maximum(position + 1 - window, 0) // N * N if WINDOW else 0
    kv_head = head // (H // J)
    own = position // N * N  # without a window, all queries of the block see the keys before it
    for masked in tl.static_range(2):
        end = position + count if masked else own
        for s in range(own if masked else first, end, N):
            there = (s + n < end)[:, None] & (d < D)[None, :]
            place = source + s + n
            if TREE:
                place = tl.load(paths + place, mask=s + n < end, other=0)
            key = (place[:, None].to(tl.int64) * J + kv_head) * D + d[None, :]
            k = tl.load(K + key, mask=there, other=0.0)
            v = tl.load(V + key, mask=there, other=0.0)
            p = tl.exp2(tl.dot(q, tl.trans(k)) * scale2 - level[:, None])
            if masked or WINDOW:
                ago = (position + m)[:, None] - (s + n)[None, :]
                p = tl.where((ago >= 0) & (ago < window) if WINDOW else ago >= 0, p, 0.0)
            change = p * (tl.dot(g, tl.trans(v)) - pull[:, None])
            acc = tl.dot(change.to(k.dtype), k, acc)
    tl.store(grad_q + at, (acc * scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _of_keys(
    grad, Q, K, V, log_sums, pulls, grad_k, grad_v, blocks, ends, positions, num_tokens, scale, scale2, window,
    H: constexpr, J: constexpr, D: constexpr, DP: constexpr, M: constexpr, N: constexpr,
    WINDOW: constexpr, TREE: constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) * 5, tl.program_id(1)
    token, position, count, source = _part(block)
    length = tl.load(block + 4)
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
    inside = (n < count)[:, None] & (d < D)[None, :]
    at = ((token + n)[:, None].to(tl.int64) * J + head) * D + d[None, :]
    k = tl.load(K + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    of_k, of_v = tl.zeros([N, DP], tl.float32), tl.zeros([N, DP], tl.float32)
    end = tl.minimum(position + count - 1 + window, length) if WINDOW else length
    if TREE:  # what sees a key lies after it, up to its end: places in the row take the part of positions
        depth = tl.load(positions + token + n, mask=n < count, other=0)
        last = tl.load(ends + token + n, mask=n < count, other=0)
        position, source, end = token, token * 0, tl.max(last, 0)
    # queries beyond the end are zeros and add nothing
    for group in range(H // J):
        asking = head * (H // J) + group
        for s in range(position // M * M, end, M):
            there = (s + m < end)[:, None] & (d < D)[None, :]
            query = ((source + s + m)[:, None].to(tl.int64) * H + asking) * D + d[None, :]
            q = tl.load(Q + query, mask=there, other=0.0)
            g = tl.load(grad + query, mask=there, other=0.0)
            row = asking.to(tl.int64) * num_tokens + source + s + m
            level = tl.load(log_sums + row, mask=s + m < end, other=0.0) * 1.4426950408889634
            pull = tl.load(pulls + row, mask=s + m < end, other=0.0)
            ago = (s + m)[None, :] - (position + n)[:, None]
            seen = ago >= 0
            if TREE:
                seen &= (s + m)[None, :] < last[:, None]
                ago = tl.load(positions + s + m, mask=s + m < end, other=0)[None, :] - depth[:, None]
            if WINDOW:
                seen &= ago < window
            p = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q)) * scale2 - level[None, :]), 0.0)
            of_v = tl.dot(p.to(g.dtype), g, of_v)
            change = p * (tl.dot(v, tl.trans(g)) - pull[None, :])
            of_k = tl.dot(change.to(q.dtype), q, of_k)
    tl.store(grad_k + at, (of_k * scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + at, of_v.to(grad_v.dtype.element_ty), mask=inside)

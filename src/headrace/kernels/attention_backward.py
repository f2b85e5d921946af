"""The gradient of packed causal attention. Deterministic: every sum has one order, no atomics.

T tokens, H query heads, J key/value heads, D head size. Two passes: one over blocks of queries for
their gradient, one over blocks of keys for those of keys and values, looping over the query heads
of the group (GQA). `pulls` are the row sums of grad * out, called delta in FlashAttention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention import LOG2E, Blocks, padded_size

QUERIES, KEYS = 64, 64  # tokens of a block in either pass


def attention_gradient(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TJD: Tensor,
    v_TJD: Tensor,
    out_THD: Tensor,
    log_sums_HT: Tensor,
    blocks: Blocks,
    *,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. `blocks` are of QUERIES tokens, of whole sequences."""
    tokens, num_heads, head_size = q_THD.shape
    num_kv_heads = k_TJD.shape[1]
    grad_q, grad_k, grad_v = torch.empty_like(q_THD), torch.empty_like(k_TJD), torch.empty_like(v_TJD)
    pulls = torch.empty_like(log_sums_HT)
    shape = {"H": num_heads, "J": num_kv_heads, "D": head_size, "DP": padded_size(head_size), "WINDOW": window > 0}
    _of_queries[(len(blocks.table), num_heads)](
        grad_THD, q_THD, k_TJD, v_TJD, out_THD, log_sums_HT, pulls, grad_q, blocks.table, tokens,
        scale, scale * LOG2E, window, M=QUERIES, N=KEYS, **shape, num_warps=4, num_stages=2,
    )  # fmt: skip
    _of_keys[(len(blocks.table), num_kv_heads)](
        grad_THD, q_THD, k_TJD, v_TJD, log_sums_HT, pulls, grad_k, grad_v, blocks.table, tokens,
        scale, scale * LOG2E, window, M=QUERIES, N=KEYS, **shape, num_warps=4, num_stages=1,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


@triton.jit
def _of_queries(
    grad, Q, K, V, out, log_sums, pulls, grad_q, blocks, num_tokens, scale, scale2, window,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) * 5, tl.program_id(1)
    token, position, count, source = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    m, d = tl.arange(0, M), tl.arange(0, DP)
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
    own = position // N * N  # without a window, all queries of the block see the keys before it
    acc = _through_keys(
        acc, q, g, K, V, level, pull, position, source, head // (H // J), first, own, scale2, window,
        J, D, DP, M, N, WINDOW, WINDOW,
    )  # fmt: skip
    acc = _through_keys(
        acc, q, g, K, V, level, pull, position, source, head // (H // J), own, position + count, scale2, window,
        J, D, DP, M, N, True, WINDOW,
    )  # fmt: skip
    tl.store(grad_q + at, (acc * scale).to(grad_q.dtype.element_ty), mask=inside)


@triton.jit
def _through_keys(
    acc, q, g, K, V, level, pull, position, source, head, first, end, scale2, window,
    J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Add the gradient of keys `first` to `end`; without MASKED, all of them are visible."""
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
    for s in range(first, end, N):
        there = (s + n < end)[:, None] & (d < D)[None, :]
        key = ((source + s + n)[:, None].to(tl.int64) * J + head) * D + d[None, :]
        k = tl.load(K + key, mask=there, other=0.0)
        v = tl.load(V + key, mask=there, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale2 - level[:, None])
        if MASKED:
            ago = (position + m)[:, None] - (s + n)[None, :]
            p = tl.where((ago >= 0) & (ago < window) if WINDOW else ago >= 0, p, 0.0)
        change = p * (tl.dot(g, tl.trans(v)) - pull[:, None])
        acc = tl.dot(change.to(k.dtype), k, acc)
    return acc


@triton.jit
def _of_keys(
    grad, Q, K, V, log_sums, pulls, grad_k, grad_v, blocks, num_tokens, scale, scale2, window,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) * 5, tl.program_id(1)
    token, position, count, source = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    length = tl.load(block + 4)
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
    inside = (n < count)[:, None] & (d < D)[None, :]
    at = ((token + n)[:, None].to(tl.int64) * J + head) * D + d[None, :]
    k = tl.load(K + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    of_k, of_v = tl.zeros([N, DP], tl.float32), tl.zeros([N, DP], tl.float32)
    end = tl.minimum(position + count - 1 + window, length) if WINDOW else length
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
            seen = (ago >= 0) & (ago < window) if WINDOW else ago >= 0
            p = tl.where(seen, tl.exp2(tl.dot(k, tl.trans(q)) * scale2 - level[None, :]), 0.0)
            of_v = tl.dot(p.to(g.dtype), g, of_v)
            change = p * (tl.dot(v, tl.trans(g)) - pull[None, :])
            of_k = tl.dot(change.to(q.dtype), q, of_k)
    tl.store(grad_k + at, (of_k * scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + at, of_v.to(grad_v.dtype.element_ty), mask=inside)

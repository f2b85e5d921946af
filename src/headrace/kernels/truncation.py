"""Top-k, top-p and min-p without sorting: a radix search for the smallest kept logit.

The bits of a float, with negative ones inverted, are an unsigned integer of the same order. The
largest limit that keeps enough tokens (top-k) or enough probability (top-p) is built from its
highest bit down, with one pass over the row per bit; bfloat16 needs sixteen. Tokens equal to the
last kept one are kept.

n rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


def truncated(logits_nV: Tensor, temperatures_n: Tensor, top_k_n: Tensor, top_p_n: Tensor, min_p_n: Tensor) -> Tensor:
    """Set excluded logits to -inf: by top-k (0 is off), then top-p (1 is off), then min-p."""
    n, vocab = logits_nV.shape
    out = torch.empty_like(logits_nV)
    _truncate[(n,)](
        logits_nV, out, temperatures_n, top_k_n, top_p_n, min_p_n, vocab,
        LOWEST=16 if logits_nV.dtype == torch.bfloat16 else 0, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _ordered(x):
    """A float32 as an integer from 0 to 2^32 - 1 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _above(row, vocab, limit, peak, rate, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number (COUNT) or total relative probability of the tokens at or above `limit`."""
    total = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.full([BLOCK], 1.0, tl.float32) if COUNT else tl.exp((x - peak) * rate)
        stays = (_ordered(x) >= limit) & (at < vocab)
        total += tl.sum(tl.where(stays, weight, 0.0), 0)
    return total


@triton.jit
def _largest(row, vocab, wanted, peak, rate, COUNT: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    """The largest limit for which `_above` is at least `wanted`."""
    limit = tl.full([], 0, tl.int64)
    for bit in range(0, 32 - LOWEST):
        higher = limit + (tl.full([], 2147483648, tl.int64) >> bit)
        enough = _above(row, vocab, higher, peak, rate, COUNT, BLOCK) >= wanted
        limit = tl.where(enough, higher, limit)
    return limit


@triton.jit
def _truncate(logits, out, temperatures, top_k, top_p, min_p, vocab, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * vocab
    temperature = tl.load(temperatures + program)
    rate = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    peak = -float("inf")
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x, 0))
    limit = tl.full([], 0, tl.int64)
    k, p = tl.load(top_k + program), tl.load(top_p + program)
    if k > 0:
        limit = _largest(row, vocab, tl.minimum(k, vocab).to(tl.float32), peak, rate, True, LOWEST, BLOCK)
    if p < 1.0:
        wanted = p * _above(row, vocab, limit, peak, rate, False, BLOCK)
        limit = tl.maximum(limit, _largest(row, vocab, wanted, peak, rate, False, LOWEST, BLOCK))
    least = tl.load(min_p + program)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        x = value.to(tl.float32)
        stays = (_ordered(x) >= limit) & (tl.exp((x - peak) * rate) >= least) & (x > -float("inf"))
        tl.store(out + program * vocab + at, tl.where(stays, x, -float("inf")).to(value.dtype), mask=at < vocab)

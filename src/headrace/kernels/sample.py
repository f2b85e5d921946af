"""Sampling without leaving the GPU: one token per row, by inverting the cumulative distribution at a given number.

Two passes. The first reads the logits once and keeps the sum of each block; the second finds the block, then the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def draw_tokens(logits_nV: Tensor, uniforms_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens `[n]` and their log-probs `[n]` under softmax(logits / temperature).

    `uniforms_n` are float64 in (0, 1).
    """
    n, vocab = logits_nV.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty(n, num_blocks, dtype=torch.float32, device=logits_nV.device)
    sums = torch.empty_like(peaks)
    tokens = torch.empty(n, dtype=torch.int64, device=logits_nV.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits_nV.device)
    _sum_blocks[(n, num_blocks)](logits_nV, peaks, sums, temperatures_n, vocab, num_blocks, BLOCK=BLOCK, num_warps=8)
    _pick[(n,)](
        logits_nV, peaks, sums, uniforms_n, tokens, logprobs, temperatures_n, vocab, num_blocks,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _sum_blocks(logits, peaks, sums, temperatures, vocab, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rate = 1.0 / tl.load(temperatures + row)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * rate
    peak = tl.max(x, 0)
    tl.store(peaks + row * num_blocks + block, peak)
    tl.store(sums + row * num_blocks + block, tl.sum(tl.exp(x - peak), 0))


@triton.jit
def _pick(
    logits,
    peaks,
    sums,
    uniforms,
    tokens,
    logprobs,
    temperatures,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rate = 1.0 / tl.load(temperatures + row)
    b = tl.arange(0, BLOCKS)
    own_peaks = tl.load(peaks + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    own_sums = tl.load(sums + row * num_blocks + b, mask=b < num_blocks, other=0.0)
    peak = tl.max(own_peaks, 0)
    # float64, because a float32 sum over 150,000 tokens would move rare tokens' probabilities
    masses = (own_sums * tl.exp(own_peaks - peak)).to(tl.float64)
    total = tl.sum(masses, 0)
    target = tl.load(uniforms + row) * total
    block = tl.minimum(tl.sum((tl.cumsum(masses, 0) < target).to(tl.int32), 0), num_blocks - 1)
    before = tl.sum(tl.where(b < block, masses, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * rate
    reached = tl.cumsum(tl.exp(x - peak).to(tl.float64), 0) + before
    token = tl.minimum(block * BLOCK + tl.sum((reached < target).to(tl.int32), 0), vocab - 1)
    chosen = tl.load(logits + row * vocab + token).to(tl.float32) * rate
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - peak - tl.log(total.to(tl.float32)))

"""Softmax over the vocabulary: sampling, log-probs of given tokens, and their gradient.

The first pass reads the logits once and keeps the maximum and the sum of each block of BLOCK
tokens; the second combines the blocks of a row. Sampling and scoring share both passes, so the
log-prob of a sampled token is bit-identical to its score from the same logits. n rows, V
vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def draw_tokens(logits_nV: Tensor, uniforms_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Sample tokens `[n]` by inverse CDF at `uniforms_n` (float64), and their log-probs `[n]`.

    The distribution is softmax(logits / temperature); a temperature of 0 is greedy, with a log-prob
    of 0.
    """
    n, vocab = logits_nV.shape
    peaks, sums = _sum_up(logits_nV, temperatures_n)
    tokens = torch.empty(n, dtype=torch.int64, device=logits_nV.device)
    logprobs = torch.empty(n, dtype=torch.float32, device=logits_nV.device)
    num_blocks = peaks.shape[1]
    _draw[(n,)](
        logits_nV, peaks, sums, uniforms_n, tokens, logprobs, temperatures_n, vocab, num_blocks,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logprobs


def token_logprobs(logits_nV: Tensor, tokens_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs `[n]` of given tokens, and the rows' log-sum-exp `[n]`."""
    n, vocab = logits_nV.shape
    peaks, sums = _sum_up(logits_nV, temperatures_n)
    logprobs, log_sums = torch.empty_like(peaks[:, 0]), torch.empty_like(peaks[:, 0])
    num_blocks = peaks.shape[1]
    _score[(n,)](
        logits_nV, peaks, sums, tokens_n, logprobs, log_sums, temperatures_n, vocab, num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return logprobs, log_sums


def logits_gradient(
    logits_nV: Tensor, tokens_n: Tensor, log_sums_n: Tensor, grads_n: Tensor, temperatures_n: Tensor
) -> Tensor:
    """The gradient of `token_logprobs`, times `grads_n`, written in place of the logits."""
    n, vocab = logits_nV.shape
    _gradient[(n, triton.cdiv(vocab, BLOCK))](
        logits_nV, tokens_n, log_sums_n, grads_n, temperatures_n, vocab, BLOCK=BLOCK, num_warps=8
    )
    return logits_nV


def _sum_up(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    n, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty(n, num_blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(peaks)
    _sum_blocks[(n, num_blocks)](
        logits, peaks, sums, temperatures, vocab, num_blocks, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
    )
    return peaks, sums


@triton.jit
def _rate(temperatures, row):
    """1 / temperature; 1 for a temperature of 0, because the greedy token does not depend on it."""
    temperature = tl.load(temperatures + row)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _sum_blocks(logits, peaks, sums, temperatures, vocab, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = x * _rate(temperatures, row)
    peak = tl.max(x, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)  # all tokens of the block are excluded
    tl.store(peaks + row * num_blocks + block, peak)
    tl.store(sums + row * num_blocks + block, tl.sum(tl.exp(x - level), 0))


@triton.jit
def _masses(peaks, sums, row, num_blocks, b):
    """A row's maximum, and the sum of each block relative to it.

    In float64: a float32 sum over 150,000 tokens would change the probability of rare tokens.
    """
    own_peaks = tl.load(peaks + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    own_sums = tl.load(sums + row * num_blocks + b, mask=b < num_blocks, other=0.0)
    peak = tl.max(own_peaks, 0)
    return peak, own_peaks, (own_sums * tl.exp(own_peaks - peak)).to(tl.float64)


@triton.jit
def _draw(
    logits, peaks, sums, uniforms, tokens, logprobs, temperatures, vocab, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rate = _rate(temperatures, row)
    b = tl.arange(0, BLOCKS)
    peak, own_peaks, masses = _masses(peaks, sums, row, num_blocks, b)
    total = tl.sum(masses, 0)
    greedy = tl.load(temperatures + row) == 0
    target = tl.load(uniforms + row) * total
    drawn = tl.minimum(tl.sum((tl.cumsum(masses, 0) < target).to(tl.int32), 0), num_blocks - 1)
    block = tl.where(greedy, tl.argmax(own_peaks, 0), drawn)
    before = tl.sum(tl.where(b < block, masses, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * rate
    reached = tl.cumsum(tl.exp(x - peak).to(tl.float64), 0) + before
    within = tl.sum((reached < target).to(tl.int32), 0)
    # a block's mass and the sum of its tokens differ by rounding: that must not select an excluded
    # token
    place, possible = tl.arange(0, BLOCK), x > float("-inf")
    within = tl.minimum(within, tl.max(tl.where(possible, place, 0), 0))
    within = tl.maximum(within, tl.min(tl.where(possible, place, BLOCK - 1), 0))
    within = tl.where(greedy, tl.argmax(x, 0), within)
    token = tl.minimum(block * BLOCK + within, vocab - 1)
    chosen = tl.load(logits + row * vocab + token).to(tl.float32) * rate
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(greedy, 0.0, chosen - peak - tl.log(total.to(tl.float32))))


@triton.jit
def _score(logits, peaks, sums, tokens, logprobs, log_sums, temperatures, vocab, num_blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, _, masses = _masses(peaks, sums, row, num_blocks, tl.arange(0, BLOCKS))
    total = tl.sum(masses, 0)
    chosen = tl.load(logits + row * vocab + tl.load(tokens + row)).to(tl.float32) * _rate(temperatures, row)
    tl.store(logprobs + row, chosen - peak - tl.log(total.to(tl.float32)))
    tl.store(log_sums + row, peak + tl.log(total.to(tl.float32)))


@triton.jit
def _gradient(logits, tokens, log_sums, grads, temperatures, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rate = _rate(temperatures, row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(logits + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32) * rate
    probability = tl.exp(x - tl.load(log_sums + row))
    chosen = tl.where(at == tl.load(tokens + row), 1.0, 0.0)
    found = (chosen - probability) * (tl.load(grads + row) * rate)
    tl.store(logits + row * vocab + at, found.to(logits.dtype.element_ty), mask=inside)

"""Softmax over the vocabulary: sampling, log-probs of given tokens, their gradient; truncation.

The first pass reads the logits once and keeps the maximum and the sum of each block of BLOCK
tokens; the second combines the blocks of a row. Sampling and scoring share both passes, so the
log-prob of a sampled token is bit-identical to its score from the same logits. n rows, V
vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

BLOCK = 4096


def draw_tokens(logits_nV: Tensor, uniforms_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Sample tokens `[n]` by inverse CDF at `uniforms_n` (float64), and their log-probs `[n]`.

    A temperature of 0 is greedy, with a log-prob of 0.
    """
    return _in_two_passes(_draw, logits_nV, uniforms_n, torch.int64, temperatures_n, BLOCK=BLOCK)


def token_logprobs(logits_nV: Tensor, tokens_n: Tensor, temperatures_n: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs `[n]` of given tokens, and the rows' log-sum-exp `[n]`."""
    return _in_two_passes(_score, logits_nV, tokens_n, torch.float32, temperatures_n)


def logits_gradient(
    logits_nV: Tensor, tokens_n: Tensor, log_sums_n: Tensor, grads_n: Tensor, temperatures_n: Tensor
) -> Tensor:
    """The gradient of `token_logprobs`, times `grads_n`, written in place of the logits."""
    n, vocab = logits_nV.shape
    _gradient[(n, triton.cdiv(vocab, BLOCK))](
        logits_nV, tokens_n, log_sums_n, grads_n, temperatures_n, vocab, BLOCK=BLOCK, num_warps=8
    )
    return logits_nV


def truncated(logits_nV: Tensor, temperatures_n: Tensor, top_k_n: Tensor, top_p_n: Tensor, min_p_n: Tensor) -> Tensor:
    """Set excluded logits to -inf: by top-k (0 is off), then top-p (1 is off), then min-p.

    Instead of sorting, a radix search finds the smallest kept logit. The bits of a float, with
    negative ones inverted, are an unsigned integer of the same order. The largest limit that keeps
    enough tokens (top-k) or enough probability (top-p) is built from its highest bit down, with one
    pass over the row per bit; bfloat16 needs sixteen. Tokens equal to the last kept one are kept.
    """
    n, vocab = logits_nV.shape
    out = torch.empty_like(logits_nV)
    _truncate[(n,)](
        logits_nV, out, temperatures_n, top_k_n, top_p_n, min_p_n, vocab,
        LOWEST=16 if logits_nV.dtype == torch.bfloat16 else 0, BLOCK=2 * BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _in_two_passes(
    second: Any, logits: Tensor, given_n: Tensor, dtype: torch.dtype, temperatures: Tensor, **sizes: int
) -> tuple[Tensor, Tensor]:
    """What the `second` pass finds for each row and its given number: in `dtype` and float32."""
    n, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    peaks = torch.empty(n, num_blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(peaks)
    found, more = (torch.empty(n, dtype=kind, device=logits.device) for kind in (dtype, peaks.dtype))
    rest, how = (temperatures, vocab, num_blocks), {"num_warps": 8, "enable_fp_fusion": False}
    _sum_blocks[(n, num_blocks)](logits, peaks, sums, *rest, BLOCK=BLOCK, **how)
    sizes["BLOCKS"] = triton.next_power_of_2(num_blocks)
    second[(n,)](logits, peaks, sums, given_n, found, more, *rest, **sizes, **how)
    return found, more


@triton.jit
def _rate(temperatures, row):
    """1 / temperature; 1 for a temperature of 0, because the greedy token does not depend on it."""
    temperature = tl.load(temperatures + row)
    return 1.0 / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _sum_blocks(logits, peaks, sums, temperatures, vocab, num_blocks, BLOCK: constexpr):
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
    """A row's maximum, and the sum of each block relative to it."""
    # in float64: a float32 sum over 150,000 tokens would change the probability of rare tokens
    own_peaks = tl.load(peaks + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    own_sums = tl.load(sums + row * num_blocks + b, mask=b < num_blocks, other=0.0)
    peak = tl.max(own_peaks, 0)
    return peak, own_peaks, (own_sums * tl.exp(own_peaks - peak)).to(tl.float64)


@triton.jit
def _draw(
    logits, peaks, sums, uniforms, tokens, logprobs, temperatures, vocab, num_blocks,
    BLOCK: constexpr, BLOCKS: constexpr,
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
    # a block's mass and the sum of its tokens differ by rounding: never select an excluded token
    place, possible = tl.arange(0, BLOCK), x > float("-inf")
    within = tl.minimum(within, tl.max(tl.where(possible, place, 0), 0))
    within = tl.maximum(within, tl.min(tl.where(possible, place, BLOCK - 1), 0))
    within = tl.where(greedy, tl.argmax(x, 0), within)
    token = tl.minimum(block * BLOCK + within, vocab - 1)
    chosen = tl.load(logits + row * vocab + token).to(tl.float32) * rate
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(greedy, 0.0, chosen - peak - tl.log(total.to(tl.float32))))


@triton.jit
def _score(logits, peaks, sums, tokens, logprobs, log_sums, temperatures, vocab, num_blocks, BLOCKS: constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, _, masses = _masses(peaks, sums, row, num_blocks, tl.arange(0, BLOCKS))
    total = tl.sum(masses, 0)
    chosen = tl.load(logits + row * vocab + tl.load(tokens + row)).to(tl.float32) * _rate(temperatures, row)
    tl.store(logprobs + row, chosen - peak - tl.log(total.to(tl.float32)))
    tl.store(log_sums + row, peak + tl.log(total.to(tl.float32)))


@triton.jit
def _gradient(logits, tokens, log_sums, grads, temperatures, vocab, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    rate = _rate(temperatures, row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(logits + row * vocab + at, mask=inside, other=float("-inf")).to(tl.float32) * rate
    probability = tl.exp(x - tl.load(log_sums + row))
    chosen = tl.where(at == tl.load(tokens + row), 1.0, 0.0)
    found = (chosen - probability) * (tl.load(grads + row) * rate)
    tl.store(logits + row * vocab + at, found.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _ordered(x):
    """A float32 as an integer from 0 to 2^32 - 1 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _above(row, vocab, limit, peak, rate, COUNT: constexpr, BLOCK: constexpr):
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
def _largest(row, vocab, wanted, peak, rate, COUNT: constexpr, LOWEST: constexpr, BLOCK: constexpr):
    """The largest limit for which `_above` is at least `wanted`."""
    limit = tl.full([], 0, tl.int64)
    for bit in range(0, 32 - LOWEST):
        higher = limit + (tl.full([], 2147483648, tl.int64) >> bit)
        enough = _above(row, vocab, higher, peak, rate, COUNT, BLOCK) >= wanted
        limit = tl.where(enough, higher, limit)
    return limit


@triton.jit
def _truncate(logits, out, temperatures, top_k, top_p, min_p, vocab, LOWEST: constexpr, BLOCK: constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * vocab
    rate = _rate(temperatures, program)
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

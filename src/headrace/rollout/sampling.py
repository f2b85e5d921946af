"""From logits to a token, its log-prob and its support (the tokens that top-k, top-p, min-p leave).

What a request samples depends only on its seed, its position and its logits, because each token's
uniform number comes from a counter-based hash. Order and size of the batch do not matter. n
requests, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace import kernels
from headrace.types import Sampling

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.softmax import draw_tokens, truncated

MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in (0, 1) for each (seed, position): the splitmix64 finaliser over both."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * MIX[2]
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * MIX[0]
        x = (x ^ (x >> np.uint64(27))) * MIX[1]
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def request_seed(*parts: int) -> int:
    """A 64-bit seed from run seed, group serial and sample index; neighbours are unrelated."""
    seed = np.random.SeedSequence(parts).generate_state(2, np.uint32)
    return int(seed[0]) << 32 | int(seed[1])


@dataclass(frozen=True, slots=True)
class Draw:
    """A token for each of n requests; `allowed` is None if no request truncates."""

    tokens: Tensor  # [n]
    logprobs: Tensor  # [n] of the distribution sampled from
    allowed: Tensor | None  # [n, V]


def draw(logits_nV: Tensor, samplings: list[Sampling], uniforms_n: npt.NDArray[np.float64]) -> Draw:
    """Sample a token per row by inverse CDF at `uniforms_n`; a temperature of 0 is greedy."""
    device, uniforms = logits_nV.device, torch.from_numpy(uniforms_n).to(logits_nV.device)
    kinds = {id(s): s for s in samplings}.values()  # few different ones, and an id is fast
    truncates = any(s.truncates for s in kinds)
    if logits_nV.is_cuda and kernels.AVAILABLE:
        return _draw_on_gpu(logits_nV, samplings, uniforms, truncates)
    logits = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    if any(s.temperature not in (0.0, 1.0) for s in kinds):
        logits = logits / torch.tensor([s.temperature or 1.0 for s in samplings])[:, None]
    allowed = _allowed(logits, samplings) if truncates else None
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    logprobs = torch.log_softmax(logits, dim=-1)
    # in float64: a float32 sum over 150,000 tokens would change the probability of rare tokens
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None]).squeeze(1)
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # NaN logits: the log-prob is NaN
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if any(s.temperature == 0.0 for s in kinds):
        greedy = torch.tensor([s.temperature == 0.0 for s in samplings], device=device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        chosen = torch.where(greedy, 0.0, chosen)
    return Draw(tokens, chosen, allowed)


def _draw_on_gpu(logits: Tensor, samplings: list[Sampling], uniforms: Tensor, truncates: bool) -> Draw:
    temperatures = torch.tensor([s.temperature for s in samplings], device=logits.device)
    logits, allowed = logits.contiguous(), None
    if truncates:
        columns = zip(*((s.top_k, s.top_p, s.min_p) for s in samplings), strict=True)
        limits = [torch.tensor(column, device=logits.device) for column in columns]
        logits = truncated(logits, temperatures, *limits)
        allowed = torch.isfinite(logits)
    return Draw(*draw_tokens(logits, uniforms, temperatures), allowed)


def _allowed(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """Tokens left by top-k, then top-p, then min-p: the order of `transformers` and vLLM."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocab = logits.shape[1]
    top_k = column([s.top_k or vocab for s in samplings])
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(vocab, device=logits.device)[None] < top_k
    probs = torch.softmax(sorted_logits.masked_fill(~keep, float("-inf")), dim=-1)
    # a token stays if those before it hold less than top_p, so the most likely one always stays;
    # a top_p of 1 excludes nothing, although rounding may bring the sum to 1 before the last token
    top_p = column([s.top_p if s.top_p < 1.0 else 2.0 for s in samplings])
    keep &= (probs.cumsum(dim=-1, dtype=torch.float64) - probs) < top_p
    keep &= probs >= column([s.min_p for s in samplings]) * probs[:, :1]
    return torch.zeros_like(keep).scatter_(1, order, keep)

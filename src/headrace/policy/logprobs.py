"""Log-probs of chosen tokens, without ever holding a [tokens, vocabulary] float32 tensor.

N chosen tokens, V vocabulary, E hidden size. The head is applied to a chunk of tokens at a time,
and again in the backward pass, so memory stays at one chunk whatever N is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace import kernels

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.kernels.softmax import logits_gradient, token_logprobs

CHUNK_ELEMENTS = 2**24  # of one chunk's float32 logits: 64 MiB

Linear = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that could be sampled at each of N positions: `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Tensor
    offsets: Tensor  # [N + 1]

    def forbidden(self, start: int, end: int, vocab: int) -> Tensor:
        """Mask `[end - start, V]` of the tokens outside the support."""
        first, last = int(self.offsets[start]), int(self.offsets[end])
        counts = self.offsets[start + 1 : end + 1] - self.offsets[start:end]
        rows = torch.repeat_interleave(torch.arange(end - start, device=self.ids.device), counts)
        mask = torch.ones(end - start, vocab, dtype=torch.bool, device=self.ids.device)
        mask[rows, self.ids[first:last].long()] = False
        return mask


def chosen_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    chosen_N: Tensor,
    temperature: float,
    support: Support | None = None,
    linear: Linear = F.linear,
) -> tuple[Tensor, Tensor]:
    """Log-probs `[N]` of `chosen_N` under softmax(hidden · weightᵀ / temperature).

    Over `support` and over all tokens; without a support the two are one tensor.
    """
    given: tuple[Any, ...] = hidden_NE, weight_VE, chosen_N, temperature, support
    if hidden_NE.is_cuda and kernels.AVAILABLE:
        found = _FusedLogprobs.apply(*given)  # type: ignore[no-untyped-call]
    else:
        chunk = max(1, CHUNK_ELEMENTS // weight_VE.shape[0])
        found = _ChosenLogprobs.apply(*given, chunk, linear)  # type: ignore[no-untyped-call]
    return found[0], found[-1]


def _chunk_logprobs(logits: Tensor, temperature: float, support: Support | None, rows: slice) -> list[Tensor]:
    """Log-probs `[rows, V]`: over the support if there is one, and over all tokens."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits.div_(temperature)
    return [torch.log_softmax(kind, dim=-1) for kind in _over_support_and_all(logits, support, rows)]


class _ChosenLogprobs(torch.autograd.Function):
    """`[2, N]`, over the support and over all tokens, or `[1, N]` without a support."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight, chosen)
        ctx.rest = temperature, support, chunk, linear = rest
        precise = torch.promote_types(hidden.dtype, torch.float32)
        found = hidden.new_empty(1 if support is None else 2, len(chosen), dtype=precise)
        for start in range(0, len(chosen), chunk):
            rows = slice(start, start + chunk)
            kinds = _chunk_logprobs(linear(hidden[rows], weight), temperature, support, rows)
            for row, logprobs in zip(found, kinds, strict=True):
                row[rows] = logprobs.gather(1, chosen[rows, None]).squeeze(1)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, chosen = ctx.saved_tensors
        temperature, support, chunk, _ = ctx.rest
        precise = torch.promote_types(weight.dtype, torch.float32)  # for a sum of chunks
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=precise)
        for start in range(0, len(chosen), chunk):
            rows = slice(start, start + chunk)
            pulls = grad[:, rows] / temperature
            # d log p[chosen] / d logits = onehot(chosen) - softmax
            kinds = _chunk_logprobs(F.linear(hidden[rows], weight), temperature, support, rows)
            parts = [kind.exp_().mul_(-pull[:, None]) for kind, pull in zip(kinds, pulls, strict=True)]
            of_logits = parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
            of_logits[torch.arange(len(of_logits), device=chosen.device), chosen[rows]] += pulls.sum(0)
            of_logits = of_logits.to(hidden.dtype)
            torch.mm(of_logits, weight, out=grad_hidden[rows])
            if precise is weight.dtype:
                grad_weight.addmm_(of_logits.t(), hidden[rows])
            else:
                grad_weight += of_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class _FusedLogprobs(torch.autograd.Function):
    """The same on a GPU, in the precision of the weights and with the kernels of sampling.

    Logits that fit in one chunk are kept for the backward pass: it makes their gradient in place.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chosen: Tensor, temperature: float, support: Support | None
    ) -> Tensor:
        temperatures = torch.full(chosen.shape, temperature, dtype=torch.float32, device=hidden.device)
        found = torch.empty(1 if support is None else 2, len(chosen), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(found)
        chunks = _row_chunks(hidden, weight, 16 if support is None else 64)
        logits = None
        for rows in chunks:
            logits = F.linear(hidden[rows], weight)
            for kind, values in enumerate(_over_support_and_all(logits, support, rows)):
                found[kind, rows], log_sums[kind, rows] = token_logprobs(values, chosen[rows], temperatures[rows])
        ctx.save_for_backward(hidden, weight, chosen, temperatures, log_sums)
        ctx.support, ctx.logits = support, logits if len(chunks) == 1 else None
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, chosen, temperatures, log_sums = ctx.saved_tensors
        kept, ctx.logits = ctx.logits, None
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for rows in _row_chunks(hidden, weight, 16 if ctx.support is None else 64):
            logits = kept if kept is not None else F.linear(hidden[rows], weight)
            of_logits = None
            for kind, values in enumerate(_over_support_and_all(logits, ctx.support, rows)):
                inputs = (chosen[rows], log_sums[kind, rows], grad[kind, rows].contiguous(), temperatures[rows])
                part = logits_gradient(values, *inputs)
                of_logits = part if of_logits is None else of_logits.add_(part)
            assert of_logits is not None
            torch.mm(of_logits, weight, out=grad_hidden[rows])
            if kept is not None:
                grad_weight = of_logits.t() @ hidden
            else:  # a sum of many chunks: not in half precision
                part = (of_logits.t() @ hidden[rows]).float()
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def _over_support_and_all(logits: Tensor, support: Support | None, rows: slice) -> list[Tensor]:
    if support is None:
        return [logits]
    forbidden = support.forbidden(rows.start, rows.start + len(logits), logits.shape[1])
    return [logits.masked_fill(forbidden, float("-inf")), logits]


def _row_chunks(hidden: Tensor, weight: Tensor, share: int) -> list[slice]:
    """Rows whose logits take at most 1/`share` of the GPU's memory."""
    most_bytes = torch.cuda.get_device_properties(hidden.device).total_memory // share
    size = max(1, most_bytes // (len(weight) * weight.element_size()))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]

"""The key/value arena: one row of cache per running sequence, rows 0..n-1 always in use.

R rows, J key/value heads, C token capacity, D head size. Because the rows in use are the first n, a decode step reads
the cache in place, as a plain slice, and never gathers it. Keys lie transposed, `[R, J, D, C]`: a query meets them in
half the time (32 µs against 95 µs for 128 rows of 38 tokens on two cores).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.policy import exact_cpu

GROWTH_TOKENS = 64


class Arena:
    """Keys and values of every layer. It grows, in rows and in length, as far as the running sequences need."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype,
        device: torch.device,
        granule_tokens: int = 8,
    ) -> None:
        self._granule_tokens = granule_tokens  # the capacity is a multiple of it
        self.num_rows = 0
        self.capacity = 0
        self.keys = [torch.empty(0, num_heads, key_size, 0, dtype=dtype, device=device)] * num_layers
        self.values = [torch.empty(0, num_heads, 0, value_size, dtype=dtype, device=device)] * num_layers

    def reserve(self, num_rows: int, num_tokens: int, *, most_tokens: int = 0, budget_tokens: int = 2**62) -> None:
        """Make room for so many sequences of this length; none in use will grow beyond `most_tokens`.

        Rows and length that only earlier sequences needed are given up when they do not fit the budget.
        """
        if num_rows <= self.num_rows and num_tokens <= self.capacity:
            return
        most_tokens = max(num_tokens, most_tokens)
        rows, capacity = max(num_rows, self.num_rows), self.capacity
        if num_tokens > capacity:
            capacity = self._in_granules(min(most_tokens, max(num_tokens, 2 * capacity, GROWTH_TOKENS)))
        if rows * capacity > budget_tokens:
            rows, capacity = num_rows, min(capacity, self._in_granules(most_tokens))
        kept_rows, kept_tokens = min(rows, self.num_rows), min(capacity, self.capacity)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            # zeros, not empty: masked places are multiplied by a probability of zero, and 0 * NaN is NaN
            self.keys[layer] = keys.new_zeros(rows, *keys.shape[1:3], capacity)
            self.keys[layer][:kept_rows, ..., :kept_tokens] = keys[:kept_rows, ..., :kept_tokens]
            self.values[layer] = values.new_zeros(rows, values.shape[1], capacity, values.shape[3])
            self.values[layer][:kept_rows, :, :kept_tokens] = values[:kept_rows, :, :kept_tokens]
        self.num_rows, self.capacity = rows, capacity

    def copy(self, other: Arena, source: int, start: int, end: int, num_tokens: int) -> None:
        """Copy the first tokens of row `source` of an arena (this or another) into rows `start` to `end` of this."""
        for mine, theirs in zip(self.keys, other.keys, strict=True):
            mine[start:end, ..., :num_tokens] = theirs[source, ..., :num_tokens]
        for mine, theirs in zip(self.values, other.values, strict=True):
            mine[start:end, :, :num_tokens] = theirs[source, :, :num_tokens]

    def _in_granules(self, num_tokens: int) -> int:
        return -(-num_tokens // self._granule_tokens) * self._granule_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of the sequence in `row`.

    Example:
        Chunk(row=3, start=0, end=128)
    """

    row: int
    start: int
    end: int


class PrefillPlan:
    """Chunks of prompts laid end to end; each sees the part of its row that is already cached, and its own past."""

    def __init__(self, arena: Arena, chunks: list[Chunk], device: torch.device) -> None:
        self.arena, self.chunks = arena, chunks
        self.positions = torch.cat([torch.arange(c.start, c.end) for c in chunks]).to(device)[None]

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """Write the chunk's keys and values, then attend to the row."""
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        sizes = [c.end - c.start for c in self.chunks]
        outs = []
        for c, q, k, v in zip(self.chunks, *(x.split(sizes) for x in (q_THD, k_TJD, v_TJD)), strict=True):
            keys[c.row, ..., c.start : c.end] = k.permute(1, 2, 0)
            values[c.row, :, c.start : c.end] = v.transpose(0, 1)
            mask = None
            if c.start or (window and c.end > window):
                ago = torch.arange(c.start, c.end, device=q.device)[:, None] - torch.arange(c.end, device=q.device)
                mask = (ago >= 0) & (ago < window) if window else ago >= 0
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys[None, c.row, ..., : c.end].transpose(2, 3),
                values[None, c.row, :, : c.end],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def attend_exact(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int
    ) -> Tensor:
        """The same, with the bits of any other way to cut the prompt."""
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        sizes = [c.end - c.start for c in self.chunks]
        outs = []
        for c, q, k, v in zip(self.chunks, *(x.split(sizes) for x in (q_THD * scale, k_TJD, v_TJD)), strict=True):
            keys[c.row, ..., c.start : c.end] = k.permute(1, 2, 0)
            values[c.row, :, c.start : c.end] = v.transpose(0, 1)
            grouped = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1)  # [J, T, H / J, D]
            group = grouped.shape[2]
            out = exact_cpu.attend_causal(grouped.flatten(1, 2), keys[c.row], values[c.row], c.start, group, window)
            outs.append(out.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2))
        return torch.cat(outs)


class DecodePlan:
    """One new token for each of the rows 0..n-1."""

    def __init__(self, arena: Arena, positions_n: Tensor, longest: int, equal: bool) -> None:
        self.arena, self.longest = arena, longest
        self.positions = positions_n[None]
        self._rows = torch.arange(len(positions_n), device=positions_n.device)
        self._at = positions_n
        self._equal = equal
        self._masks: dict[int, Tensor | None] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """Write each row's key and value, then attend to the row; grouped query heads share one read of the cache."""
        n = len(self._rows)
        keys, values = self._write(layer, k_TJD, v_TJD, self.longest)
        grouped = q_THD.unflatten(1, (k_TJD.shape[1], -1)).flatten(0, 1)  # [n * J, H / J, D]
        mask = self._mask(window, grouped, k_TJD.shape[1])
        out = _weigh(grouped, keys, values, mask, scale).unflatten(0, (n, -1)).flatten(1, 2)
        assert isinstance(out, Tensor)
        return out

    def attend_exact(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int
    ) -> Tensor:
        """The same, with the bits of a prefill or of training."""
        num_heads = k_TJD.shape[1]
        keys, values = self._write(layer, k_TJD, v_TJD, exact_cpu.tiled(self.longest))
        grouped = (q_THD * scale).unflatten(1, (num_heads, -1)).flatten(0, 1)
        if window not in self._masks:
            mask = exact_cpu.unseen(self._at, keys.shape[2], window, q_THD.dtype)
            self._masks[window] = mask.repeat_interleave(num_heads, 0)[:, None]
        mask_or_none = self._masks[window]
        assert mask_or_none is not None
        out = exact_cpu.attend(grouped, keys, values, mask_or_none).unflatten(0, (-1, num_heads)).flatten(1, 2)
        assert isinstance(out, Tensor)
        return out

    def _write(self, layer: int, k_TJD: Tensor, v_TJD: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; the first `length` of all, `[n * J, D, length]` and `[n * J, length, D]`."""
        n = len(self._rows)
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        if self._equal:
            keys[:n, ..., self.longest - 1], values[:n, :, self.longest - 1] = k_TJD, v_TJD
        else:
            keys[self._rows, ..., self._at], values[self._rows, :, self._at] = k_TJD, v_TJD
        return keys[:n, ..., :length].flatten(0, 1), values[:n, :, :length].flatten(0, 1)

    def _mask(self, window: int, grouped: Tensor, num_heads: int) -> Tensor | None:
        """-inf for places beyond a row's end or before its window; shared by all layers with the same window."""
        if window not in self._masks:
            mask = None
            if not self._equal or 0 < window < self.longest:
                ago = self._at[:, None] - torch.arange(self.longest, device=self._at.device)
                hidden = (ago < 0) | (ago >= window) if window else ago < 0
                mask = grouped.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
                mask = mask[:, None, None].expand(-1, num_heads, grouped.shape[1], -1).flatten(0, 1)
            self._masks[window] = mask
        return self._masks[window]


class VerifyPlan:
    """Several new tokens for each of the rows 0..n-1: its newest, and drafts of what may follow.

    Refused drafts leave their keys and values behind, beyond the row's end: no mask lets them be seen, and the tokens
    that come there overwrite them. m is the most tokens of a row; attention is computed for all rows as if they had m.
    """

    def __init__(
        self, arena: Arena, at_T: Tensor, which_T: Tensor, ahead_T: Tensor, *, num_rows: int, width: int, longest: int
    ) -> None:
        self.arena, self.longest = arena, longest
        self.positions = at_T[None]
        self._at, self._which, self._ahead = at_T, which_T, ahead_T
        self._shape = num_rows, width
        self._masks: dict[int, Tensor] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """Write all keys and values, then attend to the rows."""
        n, num_heads = self._shape[0], k_TJD.shape[1]
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        keys[self._which, ..., self._at], values[self._which, :, self._at] = k_TJD, v_TJD
        keys, values = keys[:n, ..., : self.longest].flatten(0, 1), values[:n, :, : self.longest].flatten(0, 1)
        q = q_THD.new_zeros(*self._shape, *q_THD.shape[1:])
        q[self._which, self._ahead] = q_THD
        q = q.unflatten(2, (num_heads, -1)).transpose(1, 2).flatten(0, 1)  # [n * J, m, H / J, D]
        out = _weigh(q.flatten(1, 2), keys, values, self._mask(window, q, num_heads), scale)
        out = out.unflatten(1, q.shape[1:3]).unflatten(0, (n, num_heads)).transpose(1, 2).flatten(2, 3)
        return out[self._which, self._ahead]  # type: ignore[no-any-return]

    def _mask(self, window: int, q: Tensor, num_heads: int) -> Tensor:
        """-inf for places after a token or before its window. Where a row has no token, anything visible will do."""
        if window not in self._masks:
            at = self._at.new_zeros(self._shape)
            at[self._which, self._ahead] = self._at
            ago = at[..., None] - torch.arange(self.longest, device=at.device)  # [n, m, longest]
            hidden = (ago < 0) | (ago >= window) if window else ago < 0
            mask = q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, :, None].expand(-1, num_heads, -1, q.shape[2], -1)
            self._masks[window] = mask.flatten(2, 3).flatten(0, 1)
        return self._masks[window]


def _weigh(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of `q [B, Q, D]` over `keys [B, D, C]` and `values [B, C, D]`."""
    start = q.new_empty(1, 1, 1) if mask is None else mask
    scores = torch.baddbmm(start, q, keys, beta=0 if mask is None else 1, alpha=scale)
    precise = torch.promote_types(scores.dtype, torch.float32)
    probs = torch.softmax(scores, dim=-1, dtype=precise).to(scores.dtype)
    return torch.bmm(probs, values)

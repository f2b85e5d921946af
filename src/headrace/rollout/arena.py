"""The KV cache on a CPU: one row per running sequence, rows 0..n-1 always in use.

R rows, J key/value heads, C token capacity, D head size. Because the rows in use are the first n, a
decode step reads the cache in place, as a slice, without a gather. Keys are transposed, `[R, J, D,
C]`, which makes decode attention three times faster (32 µs against 95 µs for 128 rows of 38 tokens
on two cores).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.policy import exact_cpu
from headrace.policy.policy import Policy
from headrace.types import IntArray, RouteArray

GROWTH_TOKENS = 64


class Arena:
    """Keys and values of every layer. Rows and length grow as the running sequences need."""

    def __init__(self, policy: Policy) -> None:
        self._granule_tokens = exact_cpu.TILE if policy.exact else 8  # `capacity` is a multiple of it
        self.num_rows = self.capacity = 0
        num_heads, empty = policy.num_kv_heads, torch.empty(0, dtype=policy.dtype, device=policy.device)
        self.keys = [empty.new_empty(0, num_heads, policy.head_size, 0)] * policy.num_layers
        self.values = [empty.new_empty(0, num_heads, 0, policy.value_size)] * policy.num_layers

    def reserve(self, num_rows: int, num_tokens: int, *, most_tokens: int = 0, budget_tokens: int = 2**62) -> None:
        """Make room for `num_rows` of `num_tokens`; no row in use will exceed `most_tokens`.

        Rows and length that only earlier sequences needed are freed if `budget_tokens` is exceeded.
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
            # not `empty`: masked positions are multiplied by zero, and 0 * NaN is NaN
            self.keys[layer] = keys.new_zeros(rows, *keys.shape[1:3], capacity)
            self.keys[layer][:kept_rows, ..., :kept_tokens] = keys[:kept_rows, ..., :kept_tokens]
            self.values[layer] = values.new_zeros(rows, values.shape[1], capacity, values.shape[3])
            self.values[layer][:kept_rows, :, :kept_tokens] = values[:kept_rows, :, :kept_tokens]
        self.num_rows, self.capacity = rows, capacity

    def copy(self, other: Arena, source: int, start: int, end: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` of row `source` of `other` into rows `start` to `end`."""
        for mine, theirs in zip(self.keys, other.keys, strict=True):
            mine[start:end, ..., :num_tokens] = theirs[source, ..., :num_tokens]
        for mine, theirs in zip(self.values, other.values, strict=True):
            mine[start:end, :, :num_tokens] = theirs[source, :, :num_tokens]

    def _in_granules(self, num_tokens: int) -> int:
        return -(-num_tokens // self._granule_tokens) * self._granule_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of `sequence`, whose cache is in `row`."""

    row: int
    start: int
    end: int
    sequence: IntArray
    known: RouteArray | None = None  # experts of its first tokens, if these are to be kept

    @property
    def size(self) -> int:
        return self.end - self.start


class PrefillPlan:
    """Packed chunks of prompts. A token attends to what is cached of its prompt, and to its past."""

    def __init__(self, arena: Arena, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.arena, self.chunks = arena, chunks
        self.positions = torch.cat([torch.arange(c.start, c.end) for c in chunks]).to(device)[None]

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        outs = []
        for c, q, keys, values in self._write(layer, q_THD, k_TJD, v_TJD):
            mask = None
            if c.start or (window and c.end > window):
                at = torch.arange(c.end, device=q.device)
                ago = at[c.start :, None] - at
                mask = (ago >= 0) & (ago < window) if window else ago >= 0
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys[None, ..., : c.end].transpose(2, 3),
                values[None, :, : c.end],
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
        """Batch-invariant: the same bits however the prompt is cut into chunks."""
        outs = []
        for c, q, keys, values in self._write(layer, q_THD * scale, k_TJD, v_TJD):
            grouped = q.unflatten(1, (len(keys), -1)).transpose(0, 1)  # [J, T, H / J, D]
            group, q = grouped.shape[2], grouped.flatten(1, 2)
            out = exact_cpu.attend_causal(q, keys, values, c.start, group, window)
            outs.append(out.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2))
        return torch.cat(outs)

    def _write(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor
    ) -> Iterator[tuple[Chunk, Tensor, Tensor, Tensor]]:
        """Store each chunk's keys and values; yields its queries, and the cache of its row."""
        sizes = [c.size for c in self.chunks]
        parts = [x.split(sizes) for x in (q_THD, k_TJD, v_TJD)]
        for c, q, k, v in zip(self.chunks, *parts, strict=True):
            keys, values = self.arena.keys[layer][c.row], self.arena.values[layer][c.row]
            keys[..., c.start : c.end] = k.permute(1, 2, 0)
            values[:, c.start : c.end] = v.transpose(0, 1)
            yield c, q, keys, values


class DecodePlan:
    """One new token for each of the rows 0..n-1; grouped query heads (GQA) share a read."""

    def __init__(self, arena: Arena, positions_n: Tensor, longest: int, equal: bool) -> None:
        self.arena, self.longest = arena, longest
        self.positions = positions_n[None]
        self._rows = torch.arange(len(positions_n), device=positions_n.device)
        self._at = positions_n
        self._equal = equal
        self._masks: dict[int, Tensor | None] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        n = len(self._rows)
        keys, values = self._write(layer, k_TJD, v_TJD, self.longest)
        grouped = q_THD.unflatten(1, (k_TJD.shape[1], -1)).flatten(0, 1)  # [n * J, H / J, D]
        mask = self._mask(window, grouped, k_TJD.shape[1])
        out = _weigh(grouped, keys, values, mask, scale)
        return out.unflatten(0, (n, -1)).flatten(1, 2)  # type: ignore[no-any-return]

    def attend_exact(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int
    ) -> Tensor:
        """Batch-invariant: the same bits as in prefill and training."""
        num_heads = k_TJD.shape[1]
        keys, values = self._write(layer, k_TJD, v_TJD, exact_cpu.tiled(self.longest))
        grouped = (q_THD * scale).unflatten(1, (num_heads, -1)).flatten(0, 1)
        if window not in self._masks:
            mask = exact_cpu.unseen(self._at, keys.shape[2], window, q_THD.dtype)
            self._masks[window] = mask.repeat_interleave(num_heads, 0)[:, None]
        hidden = self._masks[window]
        assert hidden is not None
        out = exact_cpu.attend(grouped, keys, values, hidden)
        return out.unflatten(0, (-1, num_heads)).flatten(1, 2)  # type: ignore[no-any-return]

    def _write(self, layer: int, k_TJD: Tensor, v_TJD: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns the first `length` of all `[n * J, D, length]`, `[n * J, length, D]`."""
        n = len(self._rows)
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        if self._equal:
            keys[:n, ..., self.longest - 1], values[:n, :, self.longest - 1] = k_TJD, v_TJD
        else:
            keys[self._rows, ..., self._at], values[self._rows, :, self._at] = k_TJD, v_TJD
        return keys[:n, ..., :length].flatten(0, 1), values[:n, :, :length].flatten(0, 1)

    def _mask(self, window: int, grouped: Tensor, num_heads: int) -> Tensor | None:
        """Shared by layers with the same window."""
        if window not in self._masks:
            mask = None
            if not self._equal or 0 < window < self.longest:
                mask = _hidden(self._at, self.longest, window, grouped)
                mask = mask[:, None, None].expand(-1, num_heads, grouped.shape[1], -1).flatten(0, 1)
            self._masks[window] = mask
        return self._masks[window]


class VerifyPlan:
    """Speculative decoding: for each of the rows 0..n-1 its newest token and its draft.

    Rejected drafts leave keys and values beyond the row's end; they are masked, and overwritten by
    the next tokens. `shape` is (n, m), m the most tokens of a row: all rows are padded to m.
    """

    def __init__(
        self, arena: Arena, at_T: Tensor, which_T: Tensor, ahead_T: Tensor, shape: tuple[int, int], longest: int
    ) -> None:
        self.arena, self._shape, self.longest = arena, shape, longest
        self.positions = at_T[None]
        self._at, self._which, self._ahead = at_T, which_T, ahead_T
        self._masks: dict[int, Tensor] = {}

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        n, num_heads = self._shape[0], k_TJD.shape[1]
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        keys[self._which, ..., self._at], values[self._which, :, self._at] = k_TJD, v_TJD
        keys = keys[:n, ..., : self.longest].flatten(0, 1)
        values = values[:n, :, : self.longest].flatten(0, 1)
        q = q_THD.new_zeros(*self._shape, *q_THD.shape[1:])
        q[self._which, self._ahead] = q_THD
        q = q.unflatten(2, (num_heads, -1)).transpose(1, 2).flatten(0, 1)  # [n * J, m, H / J, D]
        out = _weigh(q.flatten(1, 2), keys, values, self._mask(window, q, num_heads), scale)
        out = out.unflatten(1, q.shape[1:3]).unflatten(0, (n, num_heads)).transpose(1, 2).flatten(2, 3)
        return out[self._which, self._ahead]  # type: ignore[no-any-return]

    def _mask(self, window: int, q: Tensor, num_heads: int) -> Tensor:
        """Padding may attend to anything."""
        if window not in self._masks:
            at = self._at.new_zeros(self._shape)
            at[self._which, self._ahead] = self._at
            mask = _hidden(at, self.longest, window, q)  # [n, m, longest]
            mask = mask[:, None, :, None].expand(-1, num_heads, -1, q.shape[2], -1)
            self._masks[window] = mask.flatten(2, 3).flatten(0, 1)
        return self._masks[window]


def _hidden(at: Tensor, longest: int, window: int, like: Tensor) -> Tensor:
    """Mask `[*at, longest]`: -inf after position `at` and before its window."""
    ago = at[..., None] - torch.arange(longest, device=at.device)
    hidden = (ago < 0) | (ago >= window) if window else ago < 0
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _weigh(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of `q [B, Q, D]` over `keys [B, D, C]` and `values [B, C, D]`."""
    start = q.new_empty(1, 1, 1) if mask is None else mask
    scores = torch.baddbmm(start, q, keys, beta=0 if mask is None else 1, alpha=scale)
    precise = torch.promote_types(scores.dtype, torch.float32)
    probs = torch.softmax(scores, dim=-1, dtype=precise).to(scores.dtype)
    return torch.bmm(probs, values)

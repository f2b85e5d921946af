"""The cache and the decode steps on a GPU: pages, and bursts of steps replayed from CUDA graphs.

A burst is a few decode steps without a word between GPU and host: each step's tokens are drawn on the GPU and are the
next step's input. Sequences that end inside a burst run on to its end; what they sample there is thrown away.

R rows of a graph (at least the n running ones; the rest write to page 0), K steps of a burst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.block import rotate_and_store
from headrace.kernels.decode import SEGMENT, decode_attention
from headrace.kernels.sample import draw_tokens
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy
from headrace.rollout.pages import Pages

PAGE = 64
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Burst:
    """What came of a burst: `[K, n]` each."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


class DecodePlan:
    """One new token for each row of a graph."""

    def __init__(self, cache: PagedCache, tables: Tensor, lengths: Tensor, longest: int) -> None:
        self._cache, self._tables, self._lengths, self._longest = cache, tables, lengths, longest
        positions = lengths.long() - 1
        self.positions = positions[None]
        pages = tables.long().gather(1, (positions // PAGE)[:, None]).squeeze(1)
        self._slots = pages * PAGE + positions % PAGE

    def rotate_and_attend(self, attention: Any, qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, window: int) -> Tensor:
        """For models of the Llama family."""
        layer, norms, epsilon = attention.layer_idx, None, 0.0
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm.weight, attention.k_norm.weight)
            epsilon = attention.q_norm.variance_epsilon
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        num_heads = qkv.shape[1] // attention.head_dim - 2 * keys.shape[1]
        q = rotate_and_store(qkv, norms, epsilon, cos_TD, sin_TD, keys, values, self._slots, num_heads)
        return self._attend(q, layer, attention.scaling, window)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """For every other model."""
        self._cache.write(layer, self._slots, k_TJD, v_TJD)
        return self._attend(q_THD.contiguous(), layer, scale, window)

    def _attend(self, q: Tensor, layer: int, scale: float, window: int) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return decode_attention(
            q, keys, values, self._tables, self._lengths, scale=scale, window=window, longest=self._longest
        )


class PrefillPlan:
    """Whole prompts laid end to end: attention inside each, keys and values to their pages."""

    def __init__(self, cache: PagedCache, lengths: list[int], slots: Tensor) -> None:
        self._cache, self._slots = cache, slots
        self._packed = PackedPlan(lengths, slots.device)
        self.positions = self._packed.positions

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """Attention of the prompts to themselves."""
        self._cache.write(layer, self._slots, k_TJD, v_TJD)
        return self._packed.attend(layer, q_THD, k_TJD, v_TJD, scale, window)


class PagedCache:
    """Keys and values of every layer, in pages."""

    def __init__(self, policy: Policy, num_tokens: int) -> None:
        num_pages = num_tokens // PAGE + 1
        shape = (num_pages, policy.num_kv_heads, PAGE, policy.head_size)
        self.pages = Pages(num_pages)
        kind = {"dtype": policy.dtype, "device": policy.device}
        self.keys = [torch.zeros(shape, **kind) for _ in range(policy.num_layers)]
        self.values = [torch.zeros(shape, **kind) for _ in range(policy.num_layers)]

    def write(self, layer: int, slots: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> None:
        """Put keys and values in their slots (page · PAGE + place in the page)."""
        pages, places = slots // PAGE, slots % PAGE
        self.keys[layer][pages, :, places] = k_TJD
        self.values[layer][pages, :, places] = v_TJD

    def copy_page(self, source: int, target: int) -> None:
        """For a page that two sequences go on writing."""
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]


class GraphDecoder:
    """Runs bursts. Graphs are recorded when their size is first needed, and hold for the run: weights change in place."""

    def __init__(self, policy: Policy, cache: PagedCache, *, max_rows: int, max_tokens: int) -> None:
        self._policy, self._cache = policy, cache
        most_pages = -(-(max_tokens + MOST_STEPS) // PAGE)
        device = policy.device
        rows = _row_size(max_rows)
        self.tables = torch.zeros(rows, most_pages, dtype=torch.int32, device=device)
        self._lengths = torch.ones(rows, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(rows, dtype=torch.float32, device=device)
        self._noise = torch.full((MOST_STEPS, rows), 0.5, dtype=torch.float64, device=device)
        self._drawn = torch.zeros(MOST_STEPS, rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(MOST_STEPS, rows, dtype=torch.float32, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(
        self,
        tables: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        temperatures: npt.NDArray[np.float32],
        noise: npt.NDArray[np.float64],
    ) -> Burst:
        """As many steps as `noise [K, n]` has rows. The pages for all of them must be in `tables`."""
        steps, n = noise.shape
        rows = _row_size(n)
        self.tables[:rows].zero_()
        self.tables[:n, : tables.shape[1]] = _device(tables, self.tables)
        self._lengths[:rows] = 1
        self._lengths[:n] = _device(lengths.astype(np.int32), self.tables)
        self._tokens[:n] = _device(tokens, self.tables)
        self._temperatures[:n] = _device(temperatures, self.tables)
        self._noise[:steps, :n] = _device(noise, self.tables)
        self._step.zero_()
        graph = self._graph(rows, _segments(int(lengths.max()) + steps))
        for _ in range(steps):
            graph.replay()
        drawn, logprobs = self._drawn[:steps, :n].cpu(), self._logprobs[:steps, :n].cpu()
        return Burst(drawn.numpy(), logprobs.numpy())

    def _graph(self, rows: int, segments: int) -> torch.cuda.CUDAGraph:
        if (rows, segments) not in self._graphs:
            self._graphs[rows, segments] = self._record(rows, segments)
        return self._graphs[rows, segments]

    def _record(self, rows: int, segments: int) -> torch.cuda.CUDAGraph:
        state = [x.clone() for x in (self.tables, self._lengths, self._tokens, self._step)]
        self.tables.zero_()  # the rehearsal must not write into anybody's cache
        self._lengths.fill_(1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance(rows, segments)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._advance(rows, segments)
        self._pool = graph.pool()
        for x, value in zip((self.tables, self._lengths, self._tokens, self._step), state, strict=True):
            x.copy_(value)
        return graph

    def _advance(self, rows: int, segments: int) -> None:
        """One decode step of the first rows, entirely on the GPU."""
        plan = DecodePlan(self._cache, self.tables[:rows], self._lengths[:rows], segments * SEGMENT)
        hidden = self._policy.hidden(self._tokens[:rows], plan.positions, plan)
        logits = torch.nn.functional.linear(hidden, self._policy.head_weight)
        noise = self._noise[:, :rows].index_select(0, self._step)[0]
        tokens, logprobs = draw_tokens(logits, noise, self._temperatures[:rows])
        self._drawn[:, :rows].index_copy_(0, self._step, tokens[None])
        self._logprobs[:, :rows].index_copy_(0, self._step, logprobs[None])
        self._tokens[:rows] = tokens
        self._lengths[:rows] += 1
        self._step += 1


def _row_size(n: int) -> int:
    """Graph sizes: powers of two, then steps of 16 and 32."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 128 else 32
    return -(-n // step) * step


def _segments(num_tokens: int) -> int:
    return 1 << (-(-num_tokens // SEGMENT) - 1).bit_length()


def _device(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(like.device, non_blocking=True)

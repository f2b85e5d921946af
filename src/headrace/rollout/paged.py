"""The KV cache and the decode steps on a GPU: a paged cache, and bursts replayed from CUDA graphs.

A burst runs several decode steps without synchronising with the host: tokens are sampled on the GPU
and are the input of the next step. A sequence that ends inside a burst runs to its end; the tokens
beyond are discarded.

R rows of a graph (the n running ones, padded with rows that write to page 0), K steps of a burst.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.attention import SEGMENT, Blocks, block_attention, block_tokens, decode_attention
from headrace.kernels.block import Heads, rotate_and_store
from headrace.kernels.softmax import draw_tokens
from headrace.policy.policy import Policy
from headrace.policy.routes import Routes
from headrace.rollout.draft import MOST_VERIFIED
from headrace.rollout.pages import PAGE, PageTables
from headrace.rollout.rows import Burst, Ints, Rows, uniforms
from headrace.rollout.store import MOST_STEPS, Chunk, forward, sample
from headrace.types import RouteArray


@dataclass(frozen=True, slots=True)
class PagedPass:
    """A plan: writes keys and values of new tokens to their slots, then attends."""

    cache: Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer
    slots: Tensor  # [T] page * PAGE + offset in the page
    attention: Callable[..., Tensor]

    def rotate_and_attend(
        self, layer: int, qkv_TN: Tensor, heads: Heads, cos_TD: Tensor, sin_TD: Tensor, scale: float, window: int
    ) -> Tensor:
        """For models of the Llama family: queries, keys and values side by side."""
        q = rotate_and_store(qkv_TN, heads, cos_TD, sin_TD, *self.cache[layer], self.slots)
        return self.attention(q, *self.cache[layer], scale=scale, window=window)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """For all other models."""
        (keys, values), pages, offsets = self.cache[layer], self.slots // PAGE, self.slots % PAGE
        keys[pages, :, offsets], values[pages, :, offsets] = k_TJD, v_TJD
        return self.attention(q_THD.contiguous(), keys, values, scale=scale, window=window)


class PagedStore(PageTables):
    """The paged cache of an engine; the methods are those of `RowStore`.

    Rows take pages as they grow; when no page is left, a row has to be preempted. Graphs of decode
    steps are captured when first needed and stay valid: weights change in place.
    """

    most_steps = MOST_STEPS

    def __init__(self, policy: Policy, kv_tokens: int, running: Rows, max_running: int) -> None:
        super().__init__(kv_tokens)
        self._policy, self._running = policy, running
        cache_shape = self.num_pages + 1, policy.num_kv_heads, PAGE, policy.head_size
        rows = _row_size(max(max_running, MOST_VERIFIED))
        most_pages = -(-(min(policy.max_context, kv_tokens) + MOST_STEPS) // PAGE)
        with policy.device:
            self._layers = torch.zeros(policy.num_layers, 2, *cache_shape, dtype=policy.dtype)
            self._cache = [(keys, values) for keys, values in self._layers]
            self._page_table = torch.zeros(rows, most_pages, dtype=torch.int32)
            self._lengths = torch.ones(rows, dtype=torch.int32)
            self._tokens = torch.zeros(rows, dtype=torch.int64)
            self._temperatures = torch.ones(rows, dtype=torch.float32)
            self._noise = torch.full((MOST_STEPS, rows), 0.5, dtype=torch.float64)
            self._drawn = torch.zeros(MOST_STEPS, rows, dtype=torch.int64)
            self._logprobs = torch.zeros(MOST_STEPS, rows, dtype=torch.float32)
            self._routes = torch.zeros(MOST_STEPS, rows, *policy.routers.shape, dtype=policy.routers.device_dtype)
            self._logits = torch.zeros(rows, len(policy.head_weight), dtype=policy.dtype)
            self._step = torch.zeros(1, dtype=torch.int64)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def copy_page(self, source: int, targets: list[int]) -> None:
        for target in targets:  # without waiting for the device
            self._layers[:, :, target] = self._layers[:, :, source]

    def prefill(self, chunks: Sequence[Chunk], of_rows: bool = False) -> tuple[Tensor, RouteArray]:
        """Shared pages of rows are written once per row, with the same values."""
        policy, device = self._policy, self._policy.device
        pages = [self.rows[c.row] if of_rows else self._prompts[c.row][0] for c in chunks]
        table, at = self.table(pages), [np.arange(c.start, c.end) for c in chunks]
        slots = [row[x // PAGE].astype(np.int64) * PAGE + x % PAGE for x, row in zip(at, table, strict=True)]
        slots_T = torch.from_numpy(np.concatenate(slots)).to(device)
        parts = [(c.start, c.end, row) for row, c in enumerate(chunks)]
        per_block = block_tokens(policy.num_heads, policy.num_kv_heads, policy.dtype)
        blocks = Blocks.of(parts, per_block, device)
        tables = torch.from_numpy(table).to(device)

        def attention(q: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
            return block_attention(q, keys, values, tables, blocks, **how)[0]

        return forward(policy, chunks, PagedPass(self._cache, slots_T, attention))

    def decode(self, which: Ints, ahead: Ints, tokens: Ints, steps: int) -> Burst:
        """A burst, or one step where sampling needs the host. A token is a row of the graph."""
        # A layer writes the keys and values of all rows before it attends: a token sees its past.
        rows, n, padded = self._running, len(tokens), _row_size(len(tokens))
        lengths, table = rows.lengths[which] + ahead, self.table()[which]
        if rows.plain:
            noise = np.stack([uniforms(rows.states["seed"][which], lengths + k) for k in range(steps)])
            self._temperatures[:n] = self._to_device(rows.states["temperature"][which])
            self._noise[:steps, :n] = self._to_device(noise)
        self._page_table[:padded].zero_()
        self._page_table[:n, : table.shape[1]] = self._to_device(table)
        self._lengths[:padded] = 1
        self._lengths[:n] = self._to_device(lengths.astype(np.int32))
        self._tokens[:n] = self._to_device(tokens)
        self._step.zero_()
        num_segments = -(-(int(lengths.max()) + steps) // SEGMENT)
        size = padded, 1 << (num_segments - 1).bit_length()  # few sizes of graph
        if size not in self._graphs:
            self._graphs[size] = self._record(*size)
        for _ in range(steps):
            self._graphs[size].replay()
        routes = self._routes[:steps, :n].cpu().numpy().astype(self._policy.routers.dtype, copy=False)
        if not rows.plain:
            return sample(self._logits[:n], rows, which, ahead, routes[0])
        drawn, logprobs = self._drawn[:steps, :n].cpu(), self._logprobs[:steps, :n].cpu()
        return Burst(drawn.numpy(), logprobs.numpy(), np.full(n, steps), routes=routes)

    def _record(self, rows: int, segments: int) -> torch.cuda.CUDAGraph:
        inputs = (self._page_table, self._lengths, self._tokens, self._step)
        state = [x.clone() for x in inputs]
        self._page_table.zero_()  # the warm-up must not write into a sequence's pages
        self._lengths.fill_(1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance(rows, segments)
        torch.cuda.current_stream().wait_stream(side)
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # freeing another engine's graphs meanwhile would break the recording
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._advance(rows, segments)
        finally:
            if collects:
                gc.enable()
        self._pool = graph.pool()
        for x, value in zip(inputs, state, strict=True):
            x.copy_(value)
        return graph

    def _advance(self, rows: int, segments: int) -> None:
        """One decode step of the first `rows`, entirely on the GPU."""
        tables, lengths, routes = self._page_table[:rows], self._lengths[:rows], Routes()
        positions = lengths.long() - 1
        pages = tables.long().gather(1, (positions // PAGE)[:, None]).squeeze(1)
        longest = segments * SEGMENT
        attention = partial(decode_attention, tables=tables, lengths=lengths, longest=longest)
        plan = PagedPass(self._cache, pages * PAGE + positions % PAGE, attention)
        hidden = self._policy.hidden(self._tokens[:rows], positions[None], plan, routes)
        if (chosen := routes.chosen) is not None:
            self._routes[:, :rows].index_copy_(0, self._step, chosen[None])
        logits = torch.mm(hidden, self._policy.head_weight.t(), out=self._logits[:rows])
        noise = self._noise[:, :rows].index_select(0, self._step)[0]
        tokens, logprobs = draw_tokens(logits, noise, self._temperatures[:rows])
        self._drawn[:, :rows].index_copy_(0, self._step, tokens[None])
        self._logprobs[:, :rows].index_copy_(0, self._step, logprobs[None])
        self._tokens[:rows] = tokens
        self._lengths[:rows] += 1
        self._step += 1

    def _to_device(self, array: np.ndarray) -> Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self._policy.device, non_blocking=True)


def _row_size(n: int) -> int:
    """Graph sizes: powers of two, then multiples of 16 and 32."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 128 else 32
    return -(-n // step) * step

"""The KV cache and the decode steps on a GPU: a paged cache, and bursts replayed from CUDA graphs.

A burst runs several decode steps without synchronising with the host: tokens are sampled on the GPU
and are the input of the next step. A sequence that ends inside a burst runs to its end; the tokens
beyond are discarded.

R rows of a graph (the n running ones, padded with rows that write to page 0), K steps of a burst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels.attention import SEGMENT, Blocks, block_attention, block_tokens, decode_attention
from headrace.kernels.block import Heads, rotate_and_store
from headrace.kernels.softmax import draw_tokens
from headrace.policy.policy import Policy
from headrace.policy.routes import Routes
from headrace.rollout.draft import MOST_VERIFIED, Drafts
from headrace.rollout.pages import PAGE, PageTable, PageTables
from headrace.rollout.rows import Burst, Ints, Rows
from headrace.rollout.sampling import uniforms
from headrace.rollout.store import MOST_STEPS, Chunk, accepted, batches, forward, sample_cells
from headrace.types import RouteArray

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class PagedPass:
    """A plan: writes keys and values of new tokens to their slots (page * PAGE + offset), then attends."""

    def __init__(
        self, cache: PagedCache, positions_T: Tensor, slots_T: Tensor, attention: Callable[..., Tensor]
    ) -> None:
        self.positions = positions_T[None]
        self._cache, self._slots, self._attention = cache, slots_T, attention

    def rotate_and_attend(
        self, layer: int, qkv_TN: Tensor, heads: Heads, cos_TD: Tensor, sin_TD: Tensor, scale: float, window: int
    ) -> Tensor:
        """For models of the Llama family."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        q = rotate_and_store(qkv_TN, heads, cos_TD, sin_TD, keys, values, self._slots)
        return self._attention(q, keys, values, scale=scale, window=window)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """For all other models."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        pages, offsets = self._slots // PAGE, self._slots % PAGE
        keys[pages, :, offsets], values[pages, :, offsets] = k_TJD, v_TJD
        return self._attention(q_THD.contiguous(), keys, values, scale=scale, window=window)


class PagedCache:
    """Keys and values of every layer, in pages."""

    def __init__(self, policy: Policy, num_pages: int) -> None:
        shape = (num_pages + 1, policy.num_kv_heads, PAGE, policy.head_size)
        empty = torch.empty(0, dtype=policy.dtype, device=policy.device)
        self.keys = [empty.new_zeros(shape) for _ in range(policy.num_layers)]
        self.values = [empty.new_zeros(shape) for _ in range(policy.num_layers)]


class PagedStore:
    """The paged cache of an engine; the methods are those of `RowStore`.

    Rows take pages as they grow; when no page is left, a row has to be preempted.
    """

    def __init__(self, policy: Policy, kv_tokens: int, max_running: int) -> None:
        self._policy, self._tables = policy, PageTables(kv_tokens)
        self._cache = PagedCache(policy, self._tables.num_pages)
        max_rows, max_tokens = max(max_running, MOST_VERIFIED), min(policy.max_context, kv_tokens)
        self._decoder = GraphDecoder(policy, self._cache, max_rows=max_rows, max_tokens=max_tokens)

    def most_rows(self, longest: int) -> int:
        return self._tables.most_rows(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        return self._tables.has_room(num_rows=num_rows, num_prompt=num_prompt, num_requests=num_requests)

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        return self._tables.open(num_prompt, num_requests)

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, RouteArray]:
        return self._forward(chunks, [self._tables.prompt(c.row) for c in chunks])

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """The rows share the prompt's full pages; each gets its own copy of the last one."""
        source, targets = self._tables.fork(place, count, num_prompt)
        for cache in (*self._cache.keys, *self._cache.values) if targets else ():
            cache[targets] = cache[source].clone()

    def close(self, place: int) -> None:
        self._tables.close(place)

    def steps(self, rows: Rows, wanted: int) -> int:
        """Takes the pages that the next steps write to."""
        for steps in (wanted, 1) if rows.plain else (1,):
            if self._tables.grow(rows.lengths, steps):
                return steps
        return 0

    def decode(self, rows: Rows, steps: int) -> Burst:
        which = np.arange(len(rows))
        return self._run(rows, which, np.zeros_like(which), rows.last_tokens, steps)

    def fits(self, rows: Rows, drafts: Drafts) -> bool:
        """Takes the pages that the drafts write to."""
        return self._tables.reach(rows.lengths + drafts.counts + 1)

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        # A layer writes the keys and values of all rows before it attends: a token sees its past.
        which, ahead = drafts.cells
        tokens = drafts.inputs(rows.last_tokens)
        return accepted(drafts, self._run(rows, which, ahead, tokens, 1))

    def _run(self, rows: Rows, which: Ints, ahead: Ints, tokens: Ints, steps: int) -> Burst:
        """A burst, or one step where sampling needs the host.

        Each of `tokens` is a row of the graph, with the pages of row `which` and a length of its own.
        """
        tables, lengths = self._tables.table()[which], rows.lengths[which] + ahead
        if rows.plain:
            noise = np.stack([uniforms(rows.seeds[which], lengths + k) for k in range(steps)])
            return self._decoder.run(tables, lengths, tokens, rows.temperatures[which], noise)
        logits, routes = self._decoder.logits(tables, lengths, tokens)
        return sample_cells(logits, rows, which, ahead, routes)

    def remove(self, row: int, rows: Rows) -> None:
        self._tables.remove(row)

    def recompute(self, rows: Rows, budget: int) -> None:
        """Shared pages are written once per row, with the same values."""
        for chunks in batches(rows, budget):
            self._forward(chunks, [self._tables.rows[c.row] for c in chunks])

    def _forward(self, chunks: Sequence[Chunk], pages: Sequence[Sequence[int]]) -> tuple[Tensor, RouteArray]:
        """Packed chunks of prompts. A token attends to what is cached of its prompt, and to its past."""
        policy, device = self._policy, self._policy.device
        padded = np.zeros((len(pages), max(map(len, pages))), np.int32)
        for row, held in zip(padded, pages, strict=True):
            row[: len(held)] = held
        at = [np.arange(c.start, c.end) for c in chunks]
        slots = [row[x // PAGE].astype(np.int64) * PAGE + x % PAGE for x, row in zip(at, padded, strict=True)]
        positions_T, slots_T = (torch.from_numpy(np.concatenate(x)).to(device) for x in (at, slots))
        starts, ends = [c.start for c in chunks], [c.end for c in chunks]
        per_block = block_tokens(policy.num_heads, policy.num_kv_heads, policy.dtype)
        blocks = Blocks.of(starts, ends, range(len(chunks)), per_block, device)
        tables = torch.from_numpy(padded).to(device)

        def attention(*qkv: Tensor, **how: Any) -> Tensor:
            return block_attention(*qkv, tables, blocks, **how)[0]

        return forward(policy, chunks, PagedPass(self._cache, positions_T, slots_T, attention))


class GraphDecoder:
    """Runs bursts. Graphs are captured when first needed and stay valid: weights change in place."""

    def __init__(self, policy: Policy, cache: PagedCache, *, max_rows: int, max_tokens: int) -> None:
        self._policy, self._cache = policy, cache
        rows, most_pages = _row_size(max_rows), -(-(max_tokens + MOST_STEPS) // PAGE)
        shape, kind = policy.routers.shape, policy.routers.device_dtype  # of a dense model: empty
        with policy.device:
            self.tables = torch.zeros(rows, most_pages, dtype=torch.int32)
            self._lengths = torch.ones(rows, dtype=torch.int32)
            self._tokens = torch.zeros(rows, dtype=torch.int64)
            self._temperatures = torch.ones(rows, dtype=torch.float32)
            self._noise = torch.full((MOST_STEPS, rows), 0.5, dtype=torch.float64)
            self._drawn = torch.zeros(MOST_STEPS, rows, dtype=torch.int64)
            self._logprobs = torch.zeros(MOST_STEPS, rows, dtype=torch.float32)
            self._routes = torch.zeros(MOST_STEPS, rows, *shape, dtype=kind)
            self._logits = torch.zeros(rows, len(policy.head_weight), dtype=policy.dtype)
            self._step = torch.zeros(1, dtype=torch.int64)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, tables: PageTable, lengths: Ints, tokens: Ints, temperatures: Floats, noise: Doubles) -> Burst:
        """A burst of K steps, one per row of `noise [K, n]`; `tables` must hold the pages of all."""
        steps, n = noise.shape
        self._temperatures[:n] = _device(temperatures, self.tables)
        self._noise[:steps, :n] = _device(noise, self.tables)
        self._replay(tables, lengths, tokens, steps)
        drawn, logprobs = self._drawn[:steps, :n].cpu(), self._logprobs[:steps, :n].cpu()
        return Burst(drawn.numpy(), logprobs.numpy(), np.full(n, steps), routes=self._chosen(steps, n))

    def logits(self, tables: PageTable, lengths: Ints, tokens: Ints) -> tuple[Tensor, RouteArray]:
        """Logits of one step, valid until the next, and the experts behind them."""
        self._replay(tables, lengths, tokens, 1)
        return self._logits[: len(tokens)], self._chosen(1, len(tokens))[0]

    def _chosen(self, steps: int, n: int) -> RouteArray:
        return self._routes[:steps, :n].cpu().numpy().astype(self._policy.routers.dtype, copy=False)

    def _replay(self, tables: PageTable, lengths: Ints, tokens: Ints, steps: int) -> None:
        n = len(tokens)
        rows = _row_size(n)
        self.tables[:rows].zero_()
        self.tables[:n, : tables.shape[1]] = _device(tables, self.tables)
        self._lengths[:rows] = 1
        self._lengths[:n] = _device(lengths.astype(np.int32), self.tables)
        self._tokens[:n] = _device(tokens, self.tables)
        self._step.zero_()
        num_segments = -(-(int(lengths.max()) + steps) // SEGMENT)
        segments = 1 << (num_segments - 1).bit_length()  # few sizes of graph
        if (rows, segments) not in self._graphs:
            self._graphs[rows, segments] = self._record(rows, segments)
        for _ in range(steps):
            self._graphs[rows, segments].replay()

    def _record(self, rows: int, segments: int) -> torch.cuda.CUDAGraph:
        inputs = (self.tables, self._lengths, self._tokens, self._step)
        state = [x.clone() for x in inputs]
        self.tables.zero_()  # the warm-up must not write into a sequence's pages
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
        for x, value in zip(inputs, state, strict=True):
            x.copy_(value)
        return graph

    def _advance(self, rows: int, segments: int) -> None:
        """One decode step of the first `rows`, entirely on the GPU."""
        tables, lengths, routes = self.tables[:rows], self._lengths[:rows], Routes()
        positions = lengths.long() - 1
        pages = tables.long().gather(1, (positions // PAGE)[:, None]).squeeze(1)
        longest = segments * SEGMENT
        attention = partial(decode_attention, tables=tables, lengths=lengths, longest=longest)
        plan = PagedPass(self._cache, positions, pages * PAGE + positions % PAGE, attention)
        hidden = self._policy.hidden(self._tokens[:rows], plan.positions, plan, routes)
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


def _row_size(n: int) -> int:
    """Graph sizes: powers of two, then multiples of 16 and 32."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 128 else 32
    return -(-n // step) * step


def _device(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
    return pinned.to(like.device, non_blocking=True)

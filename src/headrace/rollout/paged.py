"""The KV cache and the decode steps on a GPU: a paged cache, and bursts replayed from CUDA graphs.

A burst runs several decode steps without synchronising with the host: tokens are sampled on the GPU
and are the input of the next step. A sequence that ends inside a burst runs to its end; the tokens
beyond are discarded.

R rows of a graph (the n running ones, padded with rows that write to page 0), K steps of a burst.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from headrace.rollout.arena import Chunk
from headrace.rollout.draft import MOST_VERIFIED, Drafts
from headrace.rollout.pages import PAGE, PageTable, PageTables
from headrace.rollout.rows import Burst, Ints, Rows
from headrace.rollout.sampling import uniforms
from headrace.rollout.store import MOST_STEPS, Known, accepted, batches, known_routes, sample, sample_cells, tokens_of
from headrace.types import IntArray, RouteArray

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class _WritingPlan:
    """Writes keys and values of new tokens to their slots (page * PAGE + offset), then attends."""

    _cache: PagedCache
    _slots: Tensor

    def rotate_and_attend(
        self, layer: int, qkv_TN: Tensor, heads: Heads, cos_TD: Tensor, sin_TD: Tensor, scale: float, window: int
    ) -> Tensor:
        """For models of the Llama family."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        q = rotate_and_store(qkv_TN, heads, cos_TD, sin_TD, keys, values, self._slots)
        return self._attend(q, layer, scale, window)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """For all other models."""
        self._cache.write(layer, self._slots, k_TJD, v_TJD)
        return self._attend(q_THD.contiguous(), layer, scale, window)

    def _attend(self, q: Tensor, layer: int, scale: float, window: int) -> Tensor:
        raise NotImplementedError


class PagedDecodePlan(_WritingPlan):
    """One new token for each row of a graph."""

    def __init__(self, cache: PagedCache, tables: Tensor, lengths: Tensor, longest: int) -> None:
        self._cache, self._tables, self._lengths, self._longest = cache, tables, lengths, longest
        positions = lengths.long() - 1
        self.positions = positions[None]
        pages = tables.long().gather(1, (positions // PAGE)[:, None]).squeeze(1)
        self._slots = pages * PAGE + positions % PAGE

    def _attend(self, q: Tensor, layer: int, scale: float, window: int) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return decode_attention(
            q, keys, values, self._tables, self._lengths, scale=scale, window=window, longest=self._longest
        )


class PagedPrefillPlan(_WritingPlan):
    """Packed chunks of prompts. A token attends to what is cached of its prompt, and to its past."""

    def __init__(self, cache: PagedCache, chunks: Sequence[Chunk], tables: Sequence[Ints], tokens: int) -> None:
        device = cache.keys[0].device
        at = [np.arange(c.start, c.end) for c in chunks]
        self._cache = cache
        slots = [t[part // PAGE] * PAGE + part % PAGE for part, t in zip(at, tables, strict=True)]
        self._slots = torch.from_numpy(np.concatenate(slots)).to(device)
        self.positions = torch.from_numpy(np.concatenate(at)).to(device)[None]
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        self._tables = torch.from_numpy(padded).to(device)
        starts, ends = [c.start for c in chunks], [c.end for c in chunks]
        self._blocks = Blocks.of(starts, ends, range(len(chunks)), tokens, device)

    def _attend(self, q: Tensor, layer: int, scale: float, window: int) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return block_attention(q, keys, values, self._tables, self._blocks, scale=scale, window=window)[0]


class PagedCache:
    """Keys and values of every layer, in pages."""

    def __init__(self, policy: Policy, num_pages: int) -> None:
        shape = (num_pages + 1, policy.num_kv_heads, PAGE, policy.head_size)
        nothing = torch.empty(0, dtype=policy.dtype, device=policy.device)
        self.keys = [nothing.new_zeros(shape) for _ in range(policy.num_layers)]
        self.values = [nothing.new_zeros(shape) for _ in range(policy.num_layers)]

    def write(self, layer: int, slots: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> None:
        pages, places = slots // PAGE, slots % PAGE
        self.keys[layer][pages, :, places] = k_TJD
        self.values[layer][pages, :, places] = v_TJD

    def copy_page(self, source: int, targets: list[int]) -> None:
        for cache in (*self.keys, *self.values):
            cache[targets] = cache[source].clone()


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
        """Room to start and to grow a little; `longest` does not matter."""
        return self._tables.has_room(num_rows=num_rows, num_prompt=num_prompt, num_requests=num_requests)

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        return self._tables.open(num_prompt, num_requests)

    def prefill(
        self, chunks: Sequence[Chunk], sequences: Sequence[IntArray], known: Known
    ) -> tuple[Tensor, RouteArray]:
        tables = [np.array(self._tables.prompt(c.row), np.int64) for c in chunks]
        return self._forward(chunks, sequences, tables, known)

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """The rows share the prompt's full pages; each gets its own copy of the last one."""
        source, targets = self._tables.fork(place, count, num_prompt)
        if targets:
            self._cache.copy_page(source, targets)

    def close(self, place: int) -> None:
        self._tables.close(place)

    def steps(self, rows: Rows, wanted: int) -> int:
        """Takes the pages that the next steps write to."""
        for steps in (wanted, 1) if rows.plain else (1,):
            if self._tables.grow(rows.lengths, steps):
                return steps
        return 0

    def decode(self, rows: Rows, steps: int) -> Burst:
        """A burst, or one step where sampling needs the host."""
        tables = self._tables.table()
        if rows.plain:
            noise = np.stack([uniforms(rows.seeds, rows.lengths + k) for k in range(steps)])
            return self._decoder.run(tables, rows.lengths, rows.last_tokens, rows.temperatures, noise)
        logits, routes = self._decoder.logits(tables, rows.lengths, rows.last_tokens)
        return sample(logits, rows, 0, routes)

    def fits(self, rows: Rows, drafts: Drafts) -> bool:
        """Takes the pages that the drafts write to."""
        return self._tables.reach(rows.lengths + drafts.counts + 1)

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        """Every token is a row of the graph, with its sequence's pages and its own length.

        A layer writes the keys and values of all rows before it attends, so each token sees its
        past.
        """
        which, ahead = drafts.cells
        tables, lengths = self._tables.table()[which], rows.lengths[which] + ahead
        tokens = drafts.inputs(rows.last_tokens)
        if rows.plain:
            noise = uniforms(rows.seeds[which], lengths)[None]
            temperatures = rows.temperatures[which]
            return accepted(drafts, self._decoder.run(tables, lengths, tokens, temperatures, noise))
        logits, routes = self._decoder.logits(tables, lengths, tokens)
        return accepted(drafts, sample_cells(logits, rows, which, ahead, routes))

    def remove(self, row: int, rows: Rows) -> None:
        self._tables.remove(row)

    def recompute(self, sequences: Sequence[IntArray], known: Sequence[RouteArray], budget: int) -> None:
        """Shared pages are written once per row, with the same values."""
        for batch in batches(sequences, budget):
            tables = [np.array(self._tables.rows[c.row], np.int64) for c in batch]
            parts = [sequences[c.row] for c in batch]
            self._forward(batch, parts, tables, [known[c.row] for c in batch])

    def _forward(
        self, chunks: Sequence[Chunk], sequences: Sequence[IntArray], tables: Sequence[Ints], known: Known
    ) -> tuple[Tensor, RouteArray]:
        policy, tokens = self._policy, tokens_of(chunks, sequences)
        per_block = block_tokens(policy.num_heads, policy.num_kv_heads, policy.dtype)
        plan = PagedPrefillPlan(self._cache, chunks, tables, per_block)
        ids = torch.from_numpy(tokens).to(policy.device)
        routes = known_routes(policy, chunks, known)
        hidden = policy.hidden(ids, plan.positions, plan, routes)
        ends = np.cumsum([c.end - c.start for c in chunks])
        last = hidden[torch.from_numpy(ends - 1).to(hidden.device)]
        return last, policy.routers.to_host(routes, len(tokens))


class GraphDecoder:
    """Runs bursts. Graphs are captured when first needed and stay valid: weights change in place."""

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
        routes_shape, routes_dtype = policy.routers.shape, policy.routers.device_dtype  # dense: empty
        self._routes = torch.zeros(MOST_STEPS, rows, *routes_shape, dtype=routes_dtype, device=device)
        self._logits = torch.zeros(rows, len(policy.head_weight), dtype=policy.dtype, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
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
        plan = PagedDecodePlan(self._cache, self.tables[:rows], self._lengths[:rows], segments * SEGMENT)
        routes = Routes()
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

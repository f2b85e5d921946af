"""The KV cache and the decode steps on a GPU: a paged cache, and bursts replayed from CUDA graphs.

A burst runs several decode steps without synchronising with the host: tokens are sampled on the GPU
and are the input of the next step. A sequence that ends inside a burst runs to its end; the tokens
beyond are discarded.

R rows of a graph (the n running ones, padded with rows that write to page 0), K steps of a burst.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
from headrace.rollout.rows import Burst, Ints, Rows, uniforms
from headrace.rollout.store import MOST_STEPS, Chunk, accepted, batches, forward, sample
from headrace.types import RouteArray


@dataclass(frozen=True, slots=True)
class PagedPass:
    """A plan: writes keys and values of new tokens to their slots, then attends."""

    cache: Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer
    positions: Tensor  # [1, T]
    slots: Tensor  # [T] page * PAGE + offset in the page
    attention: Callable[..., Tensor]

    def rotate_and_attend(
        self, layer: int, qkv_TN: Tensor, heads: Heads, cos_TD: Tensor, sin_TD: Tensor, scale: float, window: int
    ) -> Tensor:
        """For models of the Llama family."""
        q = rotate_and_store(qkv_TN, heads, cos_TD, sin_TD, *self.cache[layer], self.slots)
        return self.attention(q, *self.cache[layer], scale=scale, window=window)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int) -> Tensor:
        """For all other models."""
        (keys, values), pages, offsets = self.cache[layer], self.slots // PAGE, self.slots % PAGE
        keys[pages, :, offsets], values[pages, :, offsets] = k_TJD, v_TJD
        return self.attention(q_THD.contiguous(), keys, values, scale=scale, window=window)


class PagedStore:
    """The paged cache of an engine; the methods are those of `RowStore`.

    Rows take pages as they grow; when no page is left, a row has to be preempted. Graphs of decode
    steps are captured when first needed and stay valid: weights change in place.
    """

    def __init__(self, policy: Policy, kv_tokens: int, max_running: int) -> None:
        self._policy, self._tables = policy, PageTables(kv_tokens)
        cache_shape = self._tables.num_pages + 1, policy.num_kv_heads, PAGE, policy.head_size
        rows = _row_size(max(max_running, MOST_VERIFIED))
        most_pages = -(-(min(policy.max_context, kv_tokens) + MOST_STEPS) // PAGE)
        routes_shape, routes_dtype = policy.routers.shape, policy.routers.device_dtype  # dense: empty
        with policy.device:
            new_cache = partial(torch.zeros, cache_shape, dtype=policy.dtype)
            self._cache = [(new_cache(), new_cache()) for _ in range(policy.num_layers)]
            self._page_table = torch.zeros(rows, most_pages, dtype=torch.int32)
            self._lengths = torch.ones(rows, dtype=torch.int32)
            self._tokens = torch.zeros(rows, dtype=torch.int64)
            self._temperatures = torch.ones(rows, dtype=torch.float32)
            self._noise = torch.full((MOST_STEPS, rows), 0.5, dtype=torch.float64)
            self._drawn = torch.zeros(MOST_STEPS, rows, dtype=torch.int64)
            self._logprobs = torch.zeros(MOST_STEPS, rows, dtype=torch.float32)
            self._routes = torch.zeros(MOST_STEPS, rows, *routes_shape, dtype=routes_dtype)
            self._logits = torch.zeros(rows, len(policy.head_weight), dtype=policy.dtype)
            self._step = torch.zeros(1, dtype=torch.int64)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def most_rows(self, longest: int) -> int:
        return self._tables.most_rows(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        return self._tables.has_room(num_rows=num_rows, num_prompt=num_prompt, num_requests=num_requests)

    def open(self, num_prompt: int, num_requests: int, kept: list[int] | None = None, num_kept: int = 0) -> int | None:
        """The prompt shares the full pages of `kept`, and gets a copy of the last one."""
        num_full = num_kept // PAGE
        place = self._tables.open(num_prompt, num_requests, (kept or [])[:num_full])
        if place is not None and kept is not None and num_kept % PAGE:
            for cache in chain(*self._cache):
                cache[self._tables.prompt(place)[num_full]] = cache[kept[num_full]]
        return place

    def keep(self, row: int, num_tokens: int) -> list[int]:
        return self._tables.keep(row, num_tokens)

    def drop_kept(self, kept: list[int]) -> None:
        self._tables.pages.give_back(kept)

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, RouteArray]:
        return self._forward(chunks, [self._tables.prompt(c.row) for c in chunks])

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """The rows share the prompt's full pages; each gets its own copy of the last one."""
        source, targets = self._tables.fork(place, count, num_prompt)
        for cache in chain(*self._cache) if targets else ():
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

    def remove(self, row: int, rows: Rows) -> None:
        self._tables.remove(row)

    def recompute(self, rows: Rows, budget: int) -> None:
        """Shared pages are written once per row, with the same values."""
        for chunks in batches(rows, budget):
            self._forward(chunks, [self._tables.rows[c.row] for c in chunks])

    def _forward(self, chunks: Sequence[Chunk], pages: Sequence[Sequence[int]]) -> tuple[Tensor, RouteArray]:
        """Packed chunks of prompts. A token attends to what is cached of its prompt, and to its past."""
        policy, device = self._policy, self._policy.device
        table, at = self._tables.table(pages), [np.arange(c.start, c.end) for c in chunks]
        slots = [row[x // PAGE].astype(np.int64) * PAGE + x % PAGE for x, row in zip(at, table, strict=True)]
        positions_T, slots_T = (torch.from_numpy(np.concatenate(x)).to(device) for x in (at, slots))
        parts = [(c.start, c.end, row) for row, c in enumerate(chunks)]
        per_block = block_tokens(policy.num_heads, policy.num_kv_heads, policy.dtype)
        blocks = Blocks.of(parts, per_block, device)
        tables = torch.from_numpy(table).to(device)

        def attention(q: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
            return block_attention(q, keys, values, tables, blocks, **how)[0]

        return forward(policy, chunks, PagedPass(self._cache, positions_T[None], slots_T, attention))

    def _run(self, rows: Rows, which: Ints, ahead: Ints, tokens: Ints, steps: int) -> Burst:
        """A burst, or one step where sampling needs the host. A token is a row of the graph."""
        n, lengths = len(tokens), rows.lengths[which] + ahead
        if rows.plain:
            noise = np.stack([uniforms(rows.seeds[which], lengths + k) for k in range(steps)])
            self._temperatures[:n] = self._to_device(rows.temperatures[which])
            self._noise[:steps, :n] = self._to_device(noise)
        self._replay(self._tables.table()[which], lengths, tokens, steps)
        routes = self._routes[:steps, :n].cpu().numpy().astype(self._policy.routers.dtype, copy=False)
        if not rows.plain:
            return sample(self._logits[:n], rows, which, ahead, routes[0])
        drawn, logprobs = self._drawn[:steps, :n].cpu(), self._logprobs[:steps, :n].cpu()
        return Burst(drawn.numpy(), logprobs.numpy(), np.full(n, steps), routes=routes)

    def _replay(self, tables: PageTable, lengths: Ints, tokens: Ints, steps: int) -> None:
        n, rows = len(tokens), _row_size(len(tokens))
        self._page_table[:rows].zero_()
        self._page_table[:n, : tables.shape[1]] = self._to_device(tables)
        self._lengths[:rows] = 1
        self._lengths[:n] = self._to_device(lengths.astype(np.int32))
        self._tokens[:n] = self._to_device(tokens)
        self._step.zero_()
        num_segments = -(-(int(lengths.max()) + steps) // SEGMENT)
        segments = 1 << (num_segments - 1).bit_length()  # few sizes of graph
        if (rows, segments) not in self._graphs:
            self._graphs[rows, segments] = self._record(rows, segments)
        for _ in range(steps):
            self._graphs[rows, segments].replay()

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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._advance(rows, segments)
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
        slots = pages * PAGE + positions % PAGE
        plan = PagedPass(self._cache, positions[None], slots, attention)
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

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self._policy.device, non_blocking=True)


def _row_size(n: int) -> int:
    """Graph sizes: powers of two, then multiples of 16 and 32."""
    if n <= 16:
        return 1 << (n - 1).bit_length()
    step = 16 if n <= 128 else 32
    return -(-n // step) * step

"""The cache and the decode steps on a GPU: pages, and bursts of steps replayed from CUDA graphs.

A burst is a few decode steps without a word between GPU and host: each step's tokens are drawn on the GPU and are the
next step's input. Sequences that end inside a burst run on to its end; what they sample there is thrown away.

R rows of a graph (at least the n running ones; the rest write to page 0), K steps of a burst.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from headrace.rollout.pages import PAGE, PageTables
from headrace.rollout.rows import Burst, Rows
from headrace.rollout.sampling import uniforms
from headrace.rollout.store import MOST_STEPS, batches, judge, known_routes, sample, sample_cells
from headrace.types import IntArray, RouteArray


class _WritingPlan(ABC):
    """Keys and values of new tokens go to their slots first, then the queries attend."""

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
        """For every other model."""
        self._cache.write(layer, self._slots, k_TJD, v_TJD)
        return self._attend(q_THD.contiguous(), layer, scale, window)

    @abstractmethod
    def _attend(self, q: Tensor, layer: int, scale: float, window: int) -> Tensor:
        """To what is cached by now."""


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
    """Parts of prompts laid end to end; each sees what of its prompt is already cached, and its own past."""

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], tables: Sequence[npt.NDArray[np.int64]], tokens: int
    ) -> None:
        device = cache.keys[0].device
        at = [np.arange(c.start, c.end) for c in chunks]
        self._cache = cache
        self._slots = _slots(at, tables).to(device)
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
        """Put keys and values in their slots (page · PAGE + place in the page)."""
        pages, places = slots // PAGE, slots % PAGE
        self.keys[layer][pages, :, places] = k_TJD
        self.values[layer][pages, :, places] = v_TJD

    def copy_page(self, source: int, targets: list[int]) -> None:
        """For a page that several sequences go on writing."""
        for cache in (*self.keys, *self.values):
            cache[targets] = cache[source].clone()


class PagedStore:
    """The cache of an engine on a GPU. Pages are taken as sequences grow; when they run out, a row has to make room."""

    def __init__(self, policy: Policy, kv_tokens: int, max_running: int) -> None:
        self._policy, self._tables = policy, PageTables(kv_tokens)
        self._cache = PagedCache(policy, self._tables.num_pages)
        self._decoder = GraphDecoder(
            policy,
            self._cache,
            max_rows=max(max_running, MOST_VERIFIED),
            max_tokens=min(policy.max_context, kv_tokens),
        )

    def most_rows(self, longest: int) -> int:
        """By whole pages."""
        return self._tables.most_rows(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        """Room to start and to grow a little; how long the rows may become does not matter."""
        return self._tables.has_room(num_rows=num_rows, num_prompt=num_prompt, num_requests=num_requests)

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        """Pages for the prompt."""
        return self._tables.open(num_prompt, num_requests)

    def prefill(
        self, chunks: Sequence[Chunk], sequences: Sequence[IntArray], known: Sequence[RouteArray | None]
    ) -> tuple[Tensor, RouteArray]:
        """Into the prompts' pages."""
        tables = [np.array(self._tables.prompt(c.row), np.int64) for c in chunks]
        return self._forward(chunks, sequences, tables, known)

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """The rows read the prompt's full pages together; of the last one each has its own."""
        source, targets = self._tables.fork(place, count, num_prompt)
        if targets:
            self._cache.copy_page(source, targets)

    def close(self, place: int) -> None:
        """The prompt's own hold on its pages ends."""
        self._tables.close(place)

    def steps(self, rows: Rows, wanted: int) -> int:
        """Take the pages that the next steps write to."""
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
        """Take the pages that the drafted tokens write to."""
        return self._tables.reach(rows.lengths + drafts.counts + 1)

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        """Every token is a row of the graph, with the pages of its sequence and a length of its own.

        A layer writes the keys and values of all rows before any of them attends, so each finds those before it.
        """
        which, ahead = drafts.cells
        tables, lengths = self._tables.table()[which], rows.lengths[which] + ahead
        tokens = drafts.inputs(rows.last_tokens)
        if rows.plain:
            noise = uniforms(rows.seeds[which], lengths)[None]
            return judge(drafts, self._decoder.run(tables, lengths, tokens, rows.temperatures[which], noise))
        logits, routes = self._decoder.logits(tables, lengths, tokens)
        return judge(drafts, sample_cells(logits, rows, which, ahead, routes))

    def remove(self, row: int, rows: Rows) -> None:
        """Give its pages back; the last row takes its place."""
        self._tables.remove(row)

    def recompute(self, sequences: Sequence[IntArray], known: Sequence[RouteArray], budget: int) -> None:
        """In batches of about `budget` tokens. Shared pages are written once per reader, with the same values."""
        for batch in batches(sequences, budget):
            tables = [np.array(self._tables.rows[c.row], np.int64) for c in batch]
            self._forward(batch, [sequences[c.row] for c in batch], tables, [known[c.row] for c in batch])

    def _forward(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[IntArray],
        tables: Sequence[npt.NDArray[np.int64]],
        known: Sequence[RouteArray | None],
    ) -> tuple[Tensor, RouteArray]:
        tokens = np.concatenate([s[c.start : c.end] for c, s in zip(chunks, sequences, strict=True)])
        tokens_per_block = block_tokens(self._policy.num_heads, self._policy.num_kv_heads, self._policy.dtype)
        plan = PagedPrefillPlan(self._cache, chunks, tables, tokens_per_block)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._policy.device)
        routes = known_routes(self._policy, chunks, known)
        hidden = self._policy.hidden(ids, plan.positions, plan, routes)
        last = hidden[torch.from_numpy(np.cumsum([c.end - c.start for c in chunks]) - 1).to(hidden.device)]
        return last, self._policy.routers.to_host(routes, len(tokens))


class GraphDecoder:
    """Runs bursts. Graphs are recorded when first needed, and hold for the run: weights change in place."""

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
        self._routes = torch.zeros(  # without a byte for a dense model
            MOST_STEPS, rows, *policy.routers.shape, dtype=policy.routers.device_dtype, device=device
        )
        self._logits = torch.zeros(rows, len(policy.head_weight), dtype=policy.dtype, device=device)
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
        self._temperatures[:n] = _device(temperatures, self.tables)
        self._noise[:steps, :n] = _device(noise, self.tables)
        self._replay(tables, lengths, tokens, steps)
        drawn, logprobs = self._drawn[:steps, :n].cpu(), self._logprobs[:steps, :n].cpu()
        return Burst(drawn.numpy(), logprobs.numpy(), np.full(n, steps), routes=self._chosen(steps, n))

    def logits(
        self, tables: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> tuple[Tensor, RouteArray]:
        """Those of one step, valid until the next, and the experts behind them; what the graph draws is left aside."""
        self._replay(tables, lengths, tokens, 1)
        return self._logits[: len(tokens)], self._chosen(1, len(tokens))[0]

    def _chosen(self, steps: int, n: int) -> RouteArray:
        return self._routes[:steps, :n].cpu().numpy().astype(self._policy.routers.dtype, copy=False)

    def _replay(
        self,
        tables: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        steps: int,
    ) -> None:
        n = len(tokens)
        rows = _row_size(n)
        self.tables[:rows].zero_()
        self.tables[:n, : tables.shape[1]] = _device(tables, self.tables)
        self._lengths[:rows] = 1
        self._lengths[:n] = _device(lengths.astype(np.int32), self.tables)
        self._tokens[:n] = _device(tokens, self.tables)
        self._step.zero_()
        graph = self._graph(rows, _segments(int(lengths.max()) + steps))
        for _ in range(steps):
            graph.replay()

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


def _slots(positions: Sequence[npt.NDArray[np.int64]], tables: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    parts = [t[at // PAGE] * PAGE + at % PAGE for at, t in zip(positions, tables, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


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

"""The KV cache of running sequences, the decode steps that read it, and sampling from their logits.

`RowStore` gives each sequence a row and takes one step at a time; it runs everywhere. `PagedStore`
(paged.py) has the same methods for CUDA devices: a paged cache, and bursts of decode steps that do
not synchronise with the host.

L layers, R rows, J key/value heads, C token capacity, D head size. Rows are those of `Rows`: 0..n-1
are in use, so a decode step reads the cache in place, as a slice, without a gather. Keys are
transposed, `[L, R, J, D, C]`, which makes decode attention three times faster on a CPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.kernels import softmax
from headrace.policy.exact import TILE, RectangleAttention, tiled
from headrace.policy.exact import attend as attend_tiles
from headrace.policy.family import attend_rectangle, unseen
from headrace.policy.policy import Policy
from headrace.policy.routes import Routes
from headrace.roles import AttentionPlan
from headrace.rollout.rows import Burst, Ints, Rows, uniforms
from headrace.types import IntArray, RouteArray, Sampling

MOST_STEPS = 16  # of one burst; new requests and weights wait for its end
STAGING_ROWS = 8  # prompts in prefill at the same time; more of them if they are short
STAGING_TOKENS = 8192
SHORT_CHUNK = 48  # tokens: such chunks of prompts attend together, padded
GROWTH_TOKENS = 64  # rows of cache get longer by this many at least
Cache = tuple[Tensor, Tensor]  # keys [L, R, J, D, T] and values [L, R, J, T, D] of some tokens


class Arena:
    """Keys and values of every layer. Rows and length grow as the running sequences need."""

    def __init__(self, policy: Policy, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._tile = TILE if policy.exact else 8  # `capacity` is a multiple of it
        self.num_rows = self.capacity = 0
        empty = partial(torch.empty, dtype=policy.dtype, device=policy.device)
        self.keys = empty(policy.num_layers, 0, policy.num_kv_heads, policy.head_size, 0)
        self.values = empty(policy.num_layers, 0, policy.num_kv_heads, 0, policy.value_size)

    def reserve(self, num_rows: int, num_tokens: int, most_tokens: int = 0) -> None:
        """Make room for `num_rows` of `num_tokens`; no row in use will exceed `most_tokens`."""
        if num_rows <= self.num_rows and num_tokens <= self.capacity:
            return
        most_tokens = max(num_tokens, most_tokens)
        rows, capacity = self.num_rows, self.capacity
        if num_tokens > capacity:
            wanted = min(most_tokens, max(num_tokens, 2 * capacity, GROWTH_TOKENS))
            capacity = tiled(max(wanted, capacity + capacity // 8), self._tile)  # next turns are longer
        if num_rows > rows:  # each growth copies all
            rows = max(num_rows, min(rows + rows // 4, self._budget_tokens // capacity))
        if rows * capacity > self._budget_tokens:  # free what only earlier sequences needed
            rows, capacity = num_rows, min(capacity, tiled(most_tokens, self._tile))
        keys, values = self.rows(0, min(rows, self.num_rows), min(capacity, self.capacity))
        (layers, _, heads, size, _), (*_, value_size) = self.keys.shape, self.values.shape
        # not `empty`: masked positions are multiplied by zero, and 0 * NaN is NaN
        self.keys = self.keys.new_zeros(layers, rows, heads, size, capacity)
        self.keys[:, : keys.shape[1], ..., : keys.shape[4]] = keys
        del keys  # the old ones, before there are new values
        self.values = self.values.new_zeros(layers, rows, heads, capacity, value_size)
        self.values[:, : values.shape[1], :, : values.shape[3]] = values
        self.num_rows, self.capacity = rows, capacity

    def rows(self, start: int, end: int, num_tokens: int) -> Cache:
        """The first tokens of rows `start` to `end`."""
        return self.keys[:, start:end, ..., :num_tokens], self.values[:, start:end, :, :num_tokens]

    def fill(self, start: int, end: int, cache: Cache) -> None:
        """These rows begin with `cache`, of one row or of each."""
        for mine, theirs in zip(self.rows(start, end, cache[0].shape[-1]), cache, strict=True):
            mine.copy_(theirs)


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
    """Packed chunks of prompts. A token attends to what is cached of its prompt and its past.

    Chunks of up to `short` tokens attend together, padded, if that is at most four times the work:
    not batch-invariant.
    """

    def __init__(self, arena: Arena, chunks: Sequence[Chunk], short: int = 0) -> None:
        row, start, size = np.array([(c.row, c.start, c.size) for c in chunks]).T
        self.arena, few, seen, ends = arena, size <= short, start + size, size.cumsum()
        padded = [int(x[few].max(initial=0)) for x in (row + 1, size, seen)]  # all of them to these
        few &= math.prod(padded) <= 4 * (size * seen)[few].sum()
        self._long = [(chunks[int(i)], slice(ends[i] - size[i], ends[i])) for i in np.flatnonzero(~few)]
        self._few = torch.from_numpy(np.flatnonzero(few.repeat(size)))
        if few.any():
            ahead = np.concatenate([*map(np.arange, size[few])])
            self._padded = VerifyPlan(arena, start[few].repeat(size[few]) + ahead, row[few].repeat(size[few]), ahead)

    def attend(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int, exact: bool = False
    ) -> Tensor:
        """If `exact`, the same bits however the prompt is cut into chunks."""
        rectangle: Any = RectangleAttention.apply if exact else attend_rectangle
        out = v_TJD.new_empty(*q_THD.shape[:2], v_TJD.shape[2])
        if len(few := self._few):
            out[few] = self._padded.attend(layer, q_THD[few], k_TJD[few], v_TJD[few], scale, window)
        for c, at in self._long:
            keys, values = self.arena.keys[layer][c.row], self.arena.values[layer][c.row]
            keys[..., c.start : c.end] = k_TJD[at].permute(1, 2, 0)
            values[:, c.start : c.end] = v_TJD[at].transpose(0, 1)
            seen = keys[..., : c.end].permute(2, 0, 1), values[:, : c.end].transpose(0, 1)
            out[at] = rectangle(q_THD[at], *seen, (1, c.size), scale, window if window < c.end else 0)
        return out


class DecodePlan:
    """One new token for each of the rows 0..n-1; grouped query heads (GQA) share a read."""

    def __init__(self, arena: Arena, at: Ints) -> None:
        self.arena, self.longest = arena, int(at.max()) + 1
        self._equal = self.longest == int(at.min()) + 1
        self._at, self._rows = torch.from_numpy(at), torch.arange(len(at))
        self._grid = self._at[:, None]  # [n, m], m tokens of each row
        self._masks: dict[int, Tensor] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, scale: float, window: int, exact: bool = False
    ) -> Tensor:
        """If `exact`, the same bits as in prefill and training."""
        n, num_heads, last = len(self._grid), k_TJD.shape[1], self.longest - 1
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        if self._equal:
            keys[:n, ..., last], values[:n, :, last] = k_TJD, v_TJD
        else:
            keys[self._rows, ..., self._at], values[self._rows, :, self._at] = k_TJD, v_TJD
        length = tiled(self.longest) if exact else self.longest
        keys, values = keys[:n, ..., :length].flatten(0, 1), values[:n, :, :length].flatten(0, 1)
        grouped = q_THD.unflatten(1, (num_heads, -1)).flatten(0, 1)  # [n * J, H / J, D]
        if exact:
            out = attend_tiles(grouped * scale, keys, values, self._mask(window, keys, num_heads, 1))
        else:
            start, beta = q_THD.new_empty(1, 1, 1), 0
            if not self._equal or 0 < window < self.longest:
                start, beta = self._mask(window, keys, num_heads, grouped.shape[1] // self._grid.shape[1]), 1
            scores = torch.baddbmm(start, grouped, keys, beta=beta, alpha=scale)
            precise = torch.promote_types(scores.dtype, torch.float32)
            out = torch.bmm(torch.softmax(scores, dim=-1, dtype=precise).to(scores.dtype), values)
        return out.unflatten(0, (-1, num_heads)).flatten(1, 2)  # type: ignore[no-any-return]

    def _mask(self, window: int, keys: Tensor, num_heads: int, group: int) -> Tensor:
        """Mask `[n * J, m * group, length of keys]`, shared by layers with the same window."""
        if window not in self._masks:
            mask = unseen(self._grid, keys.shape[2], window, keys.dtype)[:, None, :, None]
            mask = mask.expand(-1, num_heads, -1, group, -1)
            self._masks[window] = mask.flatten(2, 3).flatten(0, 1)
        return self._masks[window]


class VerifyPlan(DecodePlan):
    """Several new tokens of a row: its newest and its draft (speculative decoding), or a chunk.

    Rejected drafts leave keys and values beyond the row's end; they are masked, and overwritten by
    the next tokens. All rows are padded to the most tokens of one, m, and padding may attend to
    anything. Not batch-invariant.
    """

    def __init__(self, arena: Arena, at: Ints, which: Ints, ahead: Ints) -> None:
        super().__init__(arena, at)
        self._rows, self._ahead, self._equal = torch.from_numpy(which), torch.from_numpy(ahead), False
        self._grid = self._at.new_zeros(int(which.max()) + 1, int(ahead.max()) + 1)
        self._grid[self._rows, self._ahead] = self._at

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, *how: Any) -> Tensor:
        """A row's tokens attend like further query heads of one token."""
        q = q_THD.new_zeros(*self._grid.shape, *q_THD.shape[1:])
        q[self._rows, self._ahead] = q_THD
        q = q.unflatten(2, (k_TJD.shape[1], -1)).transpose(1, 2)  # [n, J, m, H / J, D]
        out = super().attend(layer, q.flatten(1, 3), k_TJD, v_TJD, *how)
        out = out.unflatten(1, q.shape[1:4]).transpose(1, 2)  # [n, m, J, H / J, D]
        return out.flatten(2, 3)[self._rows, self._ahead]  # type: ignore[no-any-return]


class RowStore:
    """A row of cache per sequence, one decode step at a time."""

    most_steps = 1  # of a call of `decode`

    def __init__(self, policy: Policy, kv_tokens: int, running: Rows) -> None:
        self._policy, self._kv_tokens, self._running = policy, kv_tokens, running
        self._arena, self._staging = Arena(policy, kv_tokens), Arena(policy, 2**62)
        self._free = list(range(4 * STAGING_ROWS))
        self._kept_tokens = 0  # in caches that `keep` made

    def most_rows(self, longest: int) -> int:
        """Rows of `longest` tokens that fit at the same time; no prompt group is larger."""
        return self._kv_tokens // longest

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        """Whether a prompt group may start: then there are `num_rows` of up to `longest` tokens."""
        return num_rows * longest + self._kept_tokens <= self._kv_tokens

    def open(self, num_prompt: int, num_requests: int, kept: Cache | None = None, num_kept: int = 0) -> int | None:
        """A place for a prompt's cache, beginning with `num_kept` tokens of `kept`; None: full."""
        place = min(self._free, default=None)
        longest = max(num_prompt, self._staging.capacity)
        if place is None or (place >= STAGING_ROWS and (place + 1) * longest > STAGING_TOKENS):
            return None
        self._free.remove(place)
        if kept is not None and num_kept:
            self._staging.reserve(place + 1, num_prompt)
            self._staging.fill(place, place + 1, (kept[0][..., :num_kept], kept[1][..., :num_kept, :]))
        return place

    def keep(self, row: int, num_tokens: int) -> Cache:
        """A copy of the cache of a row that ends: its first `num_tokens`."""
        self._kept_tokens += num_tokens
        keys, values = self._arena.rows(row, row + 1, num_tokens)
        return keys.clone(), values.clone()

    def drop_kept(self, kept: Cache) -> None:
        self._kept_tokens -= kept[0].shape[-1]

    def prefill(self, chunks: Sequence[Chunk], of_rows: bool = False) -> tuple[Tensor, RouteArray]:
        """As `forward`: chunks of opened prompts (their `row` is a place), or of rows again."""
        arena = self._arena if of_rows else self._staging
        arena.reserve(max(c.row for c in chunks) + 1, max(c.end for c in chunks))
        short = 0 if self._policy.exact else SHORT_CHUNK
        return forward(self._policy, chunks, PrefillPlan(arena, chunks, short))

    def fork(self, place: int, count: int) -> None:
        """The last `count` rows begin with the prompt's cache."""
        rows = self._running
        first, num_prompt = len(rows) - count, int(rows.lengths[-1])
        self._arena.reserve(len(rows), num_prompt + 1, rows.longest_possible)
        self._arena.fill(first, len(rows), self._staging.rows(place, place + 1, num_prompt))

    def close(self, place: int) -> None:
        self._free.append(place)

    def grow(self, lengths: Ints, steps: int) -> bool:
        """Room for the next `steps` tokens. Here there is: admission counts on the longest rows."""
        return True

    def decode(self, which: Ints, ahead: Ints, tokens: Ints, steps: int) -> Burst:
        """Compute `tokens`, `ahead` of the newest token of row `which`, and sample after each."""
        rows, policy, arena = self._running, self._policy, self._arena
        at = rows.lengths[which] - 1 + ahead  # the newest token is not in the cache yet
        arena.reserve(len(rows), int(at.max()) + 1, rows.longest_possible)
        plan = DecodePlan(arena, at) if len(at) == len(rows) else VerifyPlan(arena, at, which, ahead)
        routes = Routes()
        hidden = policy.hidden(torch.from_numpy(tokens), torch.from_numpy(at)[None], plan, routes)
        return sample(policy.logits(hidden), rows, which, ahead, policy.routers.to_host(routes, len(tokens)))

    def remove(self, row: int) -> None:
        """The last row moves into the place of this one."""
        if (last := len(self._running) - 1) != row:
            self._arena.fill(row, row + 1, self._arena.rows(last, last + 1, int(self._running.lengths[last]) - 1))


def batches(rows: Rows, budget: int) -> Iterator[list[Chunk]]:
    """What is in the cache of each row, in batches of about `budget` tokens."""
    batch: list[Chunk] = []
    for row in range(len(rows)):
        parked = rows.park(row, 0.0)
        batch.append(Chunk(row, 0, len(parked.tokens) - 1, parked.tokens, parked.routes))
        if sum(c.end for c in batch) >= budget or row == len(rows) - 1:
            yield batch
            batch = []


def forward(policy: Policy, chunks: Sequence[Chunk], plan: AttentionPlan) -> tuple[Tensor, RouteArray]:
    """The hidden state of each chunk's last token, and the experts of all tokens."""
    tokens = np.concatenate([c.sequence[c.start : c.end] for c in chunks]).astype(np.int64)
    at = np.concatenate([np.arange(c.start, c.end) for c in chunks])
    routes = Routes()
    if any(c.known is not None for c in chunks):  # these tokens keep their experts
        num_known = [0 if c.known is None else len(c.known) for c in chunks]
        known = at < np.repeat(num_known, [c.size for c in chunks])
        forced = np.zeros((len(known), *policy.routers.shape), policy.routers.dtype)
        forced[known] = np.concatenate([c.known[c.start : c.end] for c in chunks if c.known is not None])
        forced_T = policy.routers.to_device(forced, policy.device)
        routes = Routes(forced_T, torch.from_numpy(known).to(policy.device))
    last = np.cumsum([c.size for c in chunks]) - 1
    tokens_T, at_T, last_n = (torch.from_numpy(x).to(policy.device) for x in (tokens, at, last))
    hidden = policy.hidden(tokens_T, at_T[None], plan, routes)
    return hidden[last_n], policy.routers.to_host(routes, len(tokens))


def sample(logits: Tensor, rows: Rows, which: Ints, ahead: Ints | int = 0, routes: RouteArray | None = None) -> Burst:
    """Sample a token for each line of `logits`: of row `which`, `ahead` tokens beyond its end."""
    # noise depends on the position: a token sampled ahead is the one that would be sampled later
    noise = uniforms(rows.states["seed"][which], rows.lengths[which] + ahead)
    samplings = [rows.sequences[row].request.sampling for row in which.tolist()]
    if any(s.grammar for s in samplings):
        may = np.ones(logits.shape, np.bool_)
        for line, (row, sampling) in enumerate(zip(which.tolist(), samplings, strict=True)):
            if sampling.grammar:
                may[line] = rows.grammars().allowed(sampling.grammar, rows.tokens(row))
        logits = logits.masked_fill(~torch.from_numpy(may).to(logits.device), float("-inf"))
    tokens, logprobs, allowed = draw(logits, samplings, noise)
    return Burst(
        tokens=tokens.cpu().numpy()[None],
        logprobs=logprobs.float().cpu().numpy()[None],
        counts=np.ones(len(which), np.int64),
        supports=None if allowed is None else _supports(allowed, samplings)[None],
        routes=None if routes is None else routes[None],
    )


class Draw(NamedTuple):
    """A token for each of n requests; `allowed` is None if no request truncates."""

    tokens: Tensor  # [n]
    logprobs: Tensor  # [n] of the distribution sampled from
    allowed: Tensor | None  # [n, V]


def draw(logits_nV: Tensor, samplings: list[Sampling], uniforms_n: npt.NDArray[np.float64]) -> Draw:
    """Sample a token per row by inverse CDF at `uniforms_n`; a temperature of 0 is greedy."""
    uniforms = torch.from_numpy(uniforms_n).to(logits_nV.device)
    kinds = {id(s): s for s in samplings}.values()  # few different ones, and an id is fast
    truncates, allowed = any(s.truncates for s in kinds), None
    if logits_nV.is_cuda:
        temperatures = torch.tensor([s.temperature for s in samplings], device=logits_nV.device)
        logits = logits_nV.contiguous()
        if truncates:
            columns = zip(*((s.top_k, s.top_p, s.min_p) for s in samplings), strict=True)
            limits = [torch.tensor(column, device=logits.device) for column in columns]
            logits = softmax.truncated(logits, temperatures, *limits)
            allowed = torch.isfinite(logits)
        return Draw(*softmax.draw_tokens(logits, uniforms, temperatures), allowed)
    logits = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    if any(s.temperature not in (0.0, 1.0) for s in kinds):
        logits = logits / torch.tensor([s.temperature or 1.0 for s in samplings])[:, None]
    if truncates:
        allowed = _allowed(logits, samplings)
        logits = logits.masked_fill(~allowed, float("-inf"))
    logprobs = torch.log_softmax(logits, dim=-1)
    # in float64: a float32 sum over 150,000 tokens would change the probability of rare tokens
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None]).squeeze(1)
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # NaN logits: the log-prob is NaN
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if any(s.temperature == 0.0 for s in kinds):
        greedy = torch.tensor([s.temperature == 0.0 for s in samplings])
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        chosen = torch.where(greedy, 0.0, chosen)
    return Draw(tokens, chosen, allowed)


def _allowed(logits: Tensor, samplings: list[Sampling]) -> Tensor:
    """Tokens left by top-k, then top-p, then min-p: the order of `transformers` and vLLM."""
    vocab = logits.shape[1]
    limits = [(s.top_k or vocab, s.top_p if s.top_p < 1.0 else 2.0, s.min_p) for s in samplings]
    top_k, top_p, min_p = torch.tensor(limits).T[..., None]
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(vocab) < top_k
    probs = torch.softmax(sorted_logits.masked_fill(~keep, float("-inf")), dim=-1)
    # a token stays if those before it hold less than top_p, so the most likely one always stays;
    # a top_p of 1 excludes nothing, although rounding may bring the sum to 1 before the last token
    keep &= (probs.cumsum(dim=-1, dtype=torch.float64) - probs) < top_p
    keep &= probs >= min_p * probs[:, :1]
    return torch.zeros_like(keep).scatter_(1, order, keep) & torch.isfinite(logits)


def _supports(allowed_nV: Tensor, samplings: list[Sampling]) -> npt.NDArray[np.object_]:
    """The allowed tokens of each line that truncates. The mask stays on the device."""
    lines = [line for line, sampling in enumerate(samplings) if sampling.truncates]
    allowed = allowed_nV[lines]
    ends = allowed.sum(1).cumsum(0).cpu().numpy()
    ids = allowed.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    found = np.empty(len(samplings), np.object_)
    for line, support in zip(lines, np.split(ids, ends[:-1]), strict=True):
        found[line] = support.copy()  # a view would keep all of `ids` in memory
    return found

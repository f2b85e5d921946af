"""Where the keys and values of running sequences lie, and how the next tokens are computed from them.

`RowStore` gives each sequence a row of its own and takes one step at a time; it runs everywhere. `PagedStore`, in
paged.py, needs a CUDA device: pages, and bursts of steps without a word between GPU and host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.policy.exact_cpu import TILE
from headrace.policy.policy import Policy
from headrace.policy.routes import Routes
from headrace.rollout.arena import Arena, Chunk, DecodePlan, PrefillPlan, VerifyPlan
from headrace.rollout.draft import Drafts
from headrace.rollout.rows import Burst, Rows
from headrace.rollout.sampling import draw, uniforms
from headrace.types import IntArray, RouteArray, Sampling

MOST_STEPS = 16  # of one burst: decode steps between two looks at what came in
STAGING_ROWS = 8  # prompts that may be half-way through their prefill at the same time


class Store(Protocol):
    """The cache of one engine. Rows are those of `Rows`: 0..n-1 are in use."""

    def most_rows(self, longest: int) -> int:
        """How many rows of this length fit at the same time; a family never has more."""
        ...

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        """Whether a family may start, when it would bring the rows to `num_rows` and the longest to `longest`."""
        ...

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        """A place for a prompt's cache, or None if there is none just now."""
        ...

    def prefill(
        self, chunks: Sequence[Chunk], sequences: Sequence[IntArray], known: Sequence[RouteArray | None]
    ) -> tuple[Tensor, RouteArray]:
        """Compute parts of opened prompts (a chunk's row is its place).

        `known` are the experts of a sequence's first tokens, if it was computed before; the same are taken again.
        Returns the hidden state of each part's last token, and the experts of all tokens.
        """
        ...

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """Give the next `count` rows the prompt's cache."""
        ...

    def close(self, place: int) -> None:
        """The prompt's place is free again."""
        ...

    def steps(self, rows: Rows, wanted: int) -> int:
        """How many decode steps there is room for, at most `wanted`; 0 when a row must make room first."""
        ...

    def decode(self, rows: Rows, steps: int) -> Burst:
        """Take decode steps for all rows."""
        ...

    def fits(self, rows: Rows, drafts: Drafts) -> bool:
        """Whether there is room for the drafted tokens as well."""
        ...

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        """One step that computes the drafted tokens too: every token up to the first one drafted wrongly."""
        ...

    def remove(self, row: int, rows: Rows) -> None:
        """Forget a row; the last one takes its place."""
        ...

    def recompute(self, sequences: Sequence[IntArray], known: Sequence[RouteArray], budget: int) -> None:
        """Compute the cache of all rows again, from their tokens and with the experts they had."""
        ...


class RowStore:
    """A row of cache per sequence, one step at a time."""

    def __init__(self, policy: Policy, kv_tokens: int) -> None:
        self._policy, self._kv_tokens = policy, kv_tokens
        self._arena, self._staging = _arena(policy), _arena(policy)
        self._free = list(range(STAGING_ROWS))

    def most_rows(self, longest: int) -> int:
        """By tokens."""
        return self._kv_tokens // longest

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        """Every row is kept as long as the longest may become."""
        return num_rows * longest <= self._kv_tokens

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        """A row of the staging arena."""
        return self._free.pop() if self._free else None

    def prefill(
        self, chunks: Sequence[Chunk], sequences: Sequence[IntArray], known: Sequence[RouteArray | None]
    ) -> tuple[Tensor, RouteArray]:
        """Into the staging arena."""
        self._staging.reserve(STAGING_ROWS, max(c.end for c in chunks))
        return self._forward(self._staging, chunks, sequences, known)

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """Copy the prompt's cache into each row."""
        first = len(rows)
        self._reserve(first + count, num_prompt + 1, max(longest, rows.longest_possible))
        self._arena.copy(self._staging, place, first, first + count, num_prompt)

    def close(self, place: int) -> None:
        """Free the staging row."""
        self._free.append(place)

    def steps(self, rows: Rows, wanted: int) -> int:
        """One; admission has seen to it that there is room."""
        return 1

    def decode(self, rows: Rows, steps: int) -> Burst:
        """One token for every row."""
        positions = rows.lengths - 1  # the last token has no cache yet
        longest = int(positions.max()) + 1
        self._reserve(len(rows), longest, rows.longest_possible)
        equal = longest == int(positions.min()) + 1
        plan = DecodePlan(self._arena, _to(self._policy, positions), longest, equal)
        routes = Routes()
        hidden = self._policy.hidden(_to(self._policy, rows.last_tokens), plan.positions, plan, routes)
        return sample(self._policy.logits(hidden), rows, 0, self._policy.routers.to_host(routes, len(rows)))

    def fits(self, rows: Rows, drafts: Drafts) -> bool:
        """Always: no draft is longer than its row may become, and admission has counted on that."""
        return True

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        """All tokens of a row write their keys and values, and each attends to its own past."""
        which, ahead = drafts.cells
        positions = rows.lengths[which] - 1 + ahead
        longest = int(positions.max()) + 1
        self._reserve(len(rows), longest, rows.longest_possible)
        at_T, which_T, ahead_T = (_to(self._policy, x) for x in (positions, which, ahead))
        plan = VerifyPlan(self._arena, at_T, which_T, ahead_T, num_rows=len(rows), width=drafts.width, longest=longest)
        routes = Routes()
        hidden = self._policy.hidden(_to(self._policy, drafts.inputs(rows.last_tokens)), plan.positions, plan, routes)
        chosen = self._policy.routers.to_host(routes, len(which))
        return judge(drafts, sample_cells(self._policy.logits(hidden), rows, which, ahead, chosen))

    def remove(self, row: int, rows: Rows) -> None:
        """Copy the last row over it."""
        last = len(rows) - 1
        if row != last:
            self._arena.copy(self._arena, last, row, row + 1, int(rows.lengths[last]) - 1)

    def recompute(self, sequences: Sequence[IntArray], known: Sequence[RouteArray], budget: int) -> None:
        """In batches of about `budget` tokens."""
        for batch in batches(sequences, budget):
            sequences_of, known_of = [sequences[c.row] for c in batch], [known[c.row] for c in batch]
            self._forward(self._arena, batch, sequences_of, known_of)

    def _reserve(self, num_rows: int, num_tokens: int, most_tokens: int) -> None:
        self._arena.reserve(num_rows, num_tokens, most_tokens=most_tokens, budget_tokens=self._kv_tokens)

    def _forward(
        self,
        arena: Arena,
        chunks: Sequence[Chunk],
        sequences: Sequence[IntArray],
        known: Sequence[RouteArray | None],
    ) -> tuple[Tensor, RouteArray]:
        tokens = np.concatenate([s[c.start : c.end] for c, s in zip(chunks, sequences, strict=True)])
        plan = PrefillPlan(arena, list(chunks), self._policy.device)
        routes = known_routes(self._policy, chunks, known)
        hidden = self._policy.hidden(_to(self._policy, tokens.astype(np.int64)), plan.positions, plan, routes)
        last = hidden[_to(self._policy, np.cumsum([c.end - c.start for c in chunks]) - 1)]
        return last, self._policy.routers.to_host(routes, len(tokens))


def batches(sequences: Sequence[IntArray], budget: int) -> Iterator[list[Chunk]]:
    """All of each row's sequence, a few rows at a time: as many as make about `budget` tokens."""
    batch: list[Chunk] = []
    for row, sequence in enumerate(sequences):
        batch.append(Chunk(row, 0, len(sequence)))
        if sum(c.end for c in batch) >= budget or row == len(sequences) - 1:
            yield batch
            batch = []


def known_routes(policy: Policy, chunks: Sequence[Chunk], known: Sequence[RouteArray | None]) -> Routes:
    """For a pass over the chunks: tokens whose experts are known keep them, the others are free."""
    if all(routes is None for routes in known):
        return Routes()
    routers, ends = policy.routers, np.cumsum([c.end - c.start for c in chunks])
    forced = np.zeros((ends[-1], *routers.shape), routers.dtype)
    is_known = np.zeros(ends[-1], np.bool_)
    for c, routes, end in zip(chunks, known, ends, strict=True):
        if routes is not None:
            start = end - (c.end - c.start)
            part = routes[c.start : c.end]
            forced[start : start + len(part)] = part
            is_known[start : start + len(part)] = True
    return Routes(routers.to_device(forced, policy.device), torch.from_numpy(is_known).to(policy.device))


def sample(logits: Tensor, rows: Rows, first: int, routes: RouteArray | None = None) -> Burst:
    """One token for each row from `first` on, drawn from its logits; `routes [n, L, K]` led to them."""
    which = np.arange(first, len(rows))
    return sample_cells(logits, rows, which, np.zeros_like(which), routes)


def sample_cells(
    logits: Tensor,
    rows: Rows,
    which: npt.NDArray[np.int64],
    ahead: npt.NDArray[np.int64],
    routes: RouteArray | None,
) -> Burst:
    """One token for each line of the logits: that of row `which`, so many tokens ahead of its end.

    The noise belongs to the position, so a token computed ahead is the one that would be drawn there later.
    """
    noise = uniforms(rows.seeds[which], rows.lengths[which] + ahead)
    samplings = [rows.samplings[row] for row in which.tolist()]
    outcome = draw(logits, samplings, noise)
    supports = None if outcome.allowed is None else _supports(outcome.allowed, samplings)[None]
    tokens, logprobs = outcome.tokens.cpu().numpy()[None], outcome.logprobs.float().cpu().numpy()[None]
    return Burst(tokens, logprobs, np.ones(len(which), np.int64), supports, None if routes is None else routes[None])


def _supports(allowed_nV: Tensor, samplings: list[Sampling]) -> npt.NDArray[np.object_]:
    """The allowed tokens of each line that truncates; only they leave the device, not the mask."""
    lines = [line for line, sampling in enumerate(samplings) if sampling.truncates]
    allowed = allowed_nV[lines]
    ends = allowed.sum(1).cumsum(0).cpu().numpy()
    ids = allowed.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    found = np.empty(len(samplings), np.object_)
    for line, support in zip(lines, np.split(ids, ends[:-1]), strict=True):
        found[line] = support.copy()  # a part of `ids` would keep all of it for as long as this sequence runs
    return found


def judge(drafts: Drafts, drawn: Burst) -> Burst:
    """What was drawn after each token of each row, up to the first draft that is not what was drawn.

    The token drawn in its stead is right: all before it is. So every row gets at least one.
    """
    which, ahead = drafts.cells
    counts = drafts.num_right(drawn.tokens[0]) + 1
    most = int(counts.max())
    cells = np.zeros((drafts.width, len(counts)), np.int64)
    cells[ahead, which] = np.arange(len(which))
    cells = cells[:most]
    supports = None if drawn.supports is None else drawn.supports[0][cells]
    routes = None if drawn.routes is None else drawn.routes[0][cells]
    return Burst(drawn.tokens[0][cells], drawn.logprobs[0][cells], counts, supports, routes)


def _to(policy: Policy, array: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(policy.device)


def _arena(policy: Policy) -> Arena:
    return Arena(
        num_layers=policy.num_layers,
        num_heads=policy.num_kv_heads,
        key_size=policy.head_size,
        value_size=policy.value_size,
        dtype=policy.dtype,
        device=policy.device,
        granule_tokens=TILE if policy.exact else 8,
    )

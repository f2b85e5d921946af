"""The KV cache of running sequences, and the decode steps that read it.

`RowStore` gives each sequence a row and takes one step at a time; it runs everywhere. `PagedStore`
(paged.py) has the same methods for CUDA devices: a paged cache, and bursts of decode steps that do
not synchronise with the host. Rows are those of `Rows`: 0..n-1 are in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.policy.policy import Policy
from headrace.policy.routes import Routes
from headrace.roles import AttentionPlan
from headrace.rollout.arena import Arena, Chunk, DecodePlan, PrefillPlan, VerifyPlan
from headrace.rollout.draft import Drafts
from headrace.rollout.rows import Burst, Ints, Rows
from headrace.rollout.sampling import draw, uniforms
from headrace.types import IntArray, RouteArray, Sampling

MOST_STEPS = 16  # of one burst; new requests and weights wait for its end
STAGING_ROWS = 8  # prompts in prefill at the same time


class RowStore:
    """A row of cache per sequence, one decode step at a time."""

    def __init__(self, policy: Policy, kv_tokens: int) -> None:
        self._policy, self._kv_tokens = policy, kv_tokens
        self._arena, self._staging = Arena(policy), Arena(policy)
        self._free = list(range(STAGING_ROWS))

    def most_rows(self, longest: int) -> int:
        """Rows of `longest` tokens that fit at the same time; no prompt group is larger."""
        return self._kv_tokens // longest

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        """Whether a prompt group may start that makes it `num_rows` rows of up to `longest` tokens."""
        return num_rows * longest <= self._kv_tokens

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        """A place for a prompt's cache, or None if there is none now."""
        return self._free.pop() if self._free else None

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, RouteArray]:
        """Compute chunks of opened prompts (a row is a place); returns what `forward` does."""
        self._staging.reserve(STAGING_ROWS, max(c.end for c in chunks))
        plan = PrefillPlan(self._staging, chunks, self._policy.device)
        return forward(self._policy, chunks, plan.positions, plan)

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        """Give the next `count` rows the prompt's cache."""
        first = len(rows)
        self._reserve(first + count, num_prompt + 1, max(longest, rows.longest_possible))
        self._arena.copy(self._staging, place, first, first + count, num_prompt)

    def close(self, place: int) -> None:
        self._free.append(place)

    def steps(self, rows: Rows, wanted: int) -> int:
        """Decode steps there is room for, at most `wanted`; 0 if a row must be preempted first."""
        return 1

    def decode(self, rows: Rows, steps: int) -> Burst:
        positions = rows.lengths - 1  # the newest token is not in the cache yet
        longest = int(positions.max()) + 1
        self._reserve(len(rows), longest, rows.longest_possible)
        equal = longest == int(positions.min()) + 1
        plan = DecodePlan(self._arena, _to(self._policy, positions), longest, equal)
        logits, routes = self._step(rows.last_tokens, plan)
        return sample(logits, rows, 0, routes)

    def fits(self, rows: Rows, drafts: Drafts) -> bool:
        """Whether the drafts fit. Here always: admission counts on the longest possible rows."""
        return True

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        """One decode step that verifies `drafts`: the tokens up to the first that is not accepted."""
        which, ahead = drafts.cells
        positions = rows.lengths[which] - 1 + ahead
        longest = int(positions.max()) + 1
        self._reserve(len(rows), longest, rows.longest_possible)
        at_T, which_T, ahead_T = (_to(self._policy, x) for x in (positions, which, ahead))
        shape = len(rows), drafts.width
        plan = VerifyPlan(self._arena, at_T, which_T, ahead_T, shape, longest)
        logits, routes = self._step(drafts.inputs(rows.last_tokens), plan)
        return accepted(drafts, sample_cells(logits, rows, which, ahead, routes))

    def remove(self, row: int, rows: Rows) -> None:
        """Free a row; the last row moves into its place."""
        last = len(rows) - 1
        if row != last:
            self._arena.copy(self._arena, last, row, row + 1, int(rows.lengths[last]) - 1)

    def recompute(self, sequences: Sequence[IntArray], known: Sequence[RouteArray], budget: int) -> None:
        """Compute the cache of all rows again, with `known` experts, `budget` tokens at a time."""
        for chunks in batches(sequences, known, budget):
            plan = PrefillPlan(self._arena, chunks, self._policy.device)
            forward(self._policy, chunks, plan.positions, plan)

    def _reserve(self, num_rows: int, num_tokens: int, most_tokens: int) -> None:
        self._arena.reserve(num_rows, num_tokens, most_tokens=most_tokens, budget_tokens=self._kv_tokens)

    def _step(self, tokens: Ints, plan: DecodePlan | VerifyPlan) -> tuple[Tensor, RouteArray]:
        """Logits `[T, V]` after `tokens [T]`, and the experts of these."""
        routes = Routes()
        hidden = self._policy.hidden(_to(self._policy, tokens), plan.positions, plan, routes)
        return self._policy.logits(hidden), self._policy.routers.to_host(routes, len(tokens))


def batches(sequences: Sequence[IntArray], known: Sequence[RouteArray], budget: int) -> Iterator[list[Chunk]]:
    """The whole sequence of each row, in batches of about `budget` tokens."""
    batch: list[Chunk] = []
    for row, (sequence, routes) in enumerate(zip(sequences, known, strict=True)):
        batch.append(Chunk(row, 0, len(sequence), sequence, routes))
        if sum(c.end for c in batch) >= budget or row == len(sequences) - 1:
            yield batch
            batch = []


def forward(
    policy: Policy, chunks: Sequence[Chunk], positions: Tensor, plan: AttentionPlan
) -> tuple[Tensor, RouteArray]:
    """The hidden state of each chunk's last token, and the experts of all tokens."""
    tokens = np.concatenate([c.sequence[c.start : c.end] for c in chunks]).astype(np.int64)
    routes = known_routes(policy, chunks)
    hidden = policy.hidden(_to(policy, tokens), positions, plan, routes)
    last = hidden[_to(policy, np.cumsum([c.size for c in chunks]) - 1)]
    return last, policy.routers.to_host(routes, len(tokens))


def known_routes(policy: Policy, chunks: Sequence[Chunk]) -> Routes:
    """Routes of a pass over `chunks`: tokens with known experts keep them."""
    if all(c.known is None for c in chunks):
        return Routes()
    routers, ends = policy.routers, np.cumsum([c.size for c in chunks])
    forced = np.zeros((ends[-1], *routers.shape), routers.dtype)
    is_known = np.zeros(ends[-1], np.bool_)
    for c, end in zip(chunks, ends, strict=True):
        if c.known is not None:
            start, part = end - c.size, c.known[c.start : c.end]
            forced[start : start + len(part)] = part
            is_known[start : start + len(part)] = True
    is_known_T = torch.from_numpy(is_known).to(policy.device)
    return Routes(routers.to_device(forced, policy.device), is_known_T)


def sample(logits: Tensor, rows: Rows, first: int, routes: RouteArray | None = None) -> Burst:
    """Sample a token for each row from `first` on; `routes [n, L, K]` are behind the logits."""
    which = np.arange(first, len(rows))
    return sample_cells(logits, rows, which, np.zeros_like(which), routes)


def sample_cells(logits: Tensor, rows: Rows, which: Ints, ahead: Ints, routes: RouteArray | None) -> Burst:
    """Sample a token for each line of `logits`: of row `which`, `ahead` tokens beyond its end.

    The noise depends on the position: a token sampled ahead is the one that would be sampled later.
    """
    noise = uniforms(rows.seeds[which], rows.lengths[which] + ahead)
    samplings = [rows.samplings[row] for row in which.tolist()]
    outcome = draw(logits, samplings, noise)
    return Burst(
        tokens=outcome.tokens.cpu().numpy()[None],
        logprobs=outcome.logprobs.float().cpu().numpy()[None],
        counts=np.ones(len(which), np.int64),
        supports=None if outcome.allowed is None else _supports(outcome.allowed, samplings)[None],
        routes=None if routes is None else routes[None],
    )


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


def accepted(drafts: Drafts, drawn: Burst) -> Burst:
    """What each row sampled, up to and including the first token that differs from its draft.

    That one is right, because all before it is; so every row gets at least one token.
    """
    which, ahead = drafts.cells
    counts = drafts.num_accepted(drawn.tokens[0]) + 1
    most = int(counts.max())
    cells = np.zeros((drafts.width, len(counts)), np.int64)
    cells[ahead, which] = np.arange(len(which))
    cells = cells[:most]
    supports = None if drawn.supports is None else drawn.supports[0][cells]
    routes = None if drawn.routes is None else drawn.routes[0][cells]
    return Burst(drawn.tokens[0][cells], drawn.logprobs[0][cells], counts, supports, routes)


def _to(policy: Policy, array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(policy.device)

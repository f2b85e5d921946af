"""The embedded engine: continuous batching over the policy's own modules.

One `step` is: admit what fits, compute a chunk of waiting prompts, decode one token for every running sequence.
The samples of one group share one prefill. Everything here runs in the device thread; `submit` and `abort` only leave
a message, so any thread may call them. n running sequences are the arena's rows 0..n-1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from headrace.policy.policy import Policy
from headrace.rollout.arena import Arena, Chunk, DecodePlan, PrefillPlan
from headrace.rollout.request import Generation, Request
from headrace.rollout.rows import Rows
from headrace.rollout.sampling import Draw, draw, uniforms
from headrace.types import FinishReason, IntArray

STAGING_ROWS = 8  # prompts that may be half-way through their prefill at the same time


@dataclass(slots=True, eq=False)
class _Family:
    """Requests that share one prompt, from submission until their prompt is in the arena."""

    prompt: IntArray
    requests: list[Request]
    longest: int  # tokens of the longest sequence it may become
    row: int = -1  # staging row
    done: int = 0  # prompt tokens computed
    aborted: set[str] = field(default_factory=set)


class Engine:
    """Continuous batching on one device."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_running: int,
        prefill_tokens: int,
        kv_tokens: int,
        on_update: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.version = 0
        self.sampled_tokens = 0  # counted ones, ever
        self.prefill_tokens = prefill_tokens
        self._kv_tokens, self._on_update, self._clock = kv_tokens, on_update, clock
        self._max_running = max_running
        self._arena, self._staging = _arena(policy), _arena(policy)
        self._rows = Rows()
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiting: deque[_Family] = deque()
        self._prefilling: list[_Family] = []
        self._free_staging = list(range(STAGING_ROWS))
        self._finished: list[Generation] = []
        self._begun: deque[tuple[str, int]] = deque()

    # ---- called from any thread

    def submit(self, prompt: IntArray, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt."""
        longest = len(prompt) + max(r.sampling.max_new_tokens for r in requests)
        at_once = max(1, min(self._max_running, self._kv_tokens // longest))
        for start in range(0, len(requests), at_once):
            family = _Family(prompt, list(requests[start : start + at_once]), longest)
            self._inbox.append(partial(self._waiting.append, family))

    def abort(self, ids: set[str]) -> None:
        """End these requests at the next step; they come back with the tokens they have and finish ABORT."""
        self._inbox.append(lambda: self._abort(ids))

    def begun(self) -> Iterator[tuple[str, int]]:
        """Requests that got their first token since the last call, and the version that sampled it."""
        while self._begun:
            yield self._begun.popleft()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._waiting or self._prefilling or len(self._rows))

    # ---- called from the device thread

    @torch.inference_mode()
    def advance(self, max_steps: int = 16) -> list[Generation]:
        """Run steps until something finishes, at most `max_steps`."""
        for _ in range(max_steps):
            self.step()
            if self._finished or not self.has_work:
                break
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def step(self) -> None:
        """Admit, prefill a chunk, decode a token."""
        while self._inbox:
            self._inbox.popleft()()
        budget = self.prefill_tokens
        self._admit()
        while self._prefilling and budget:
            budget -= self._prefill(budget)
            self._admit()
        if len(self._rows):
            self._decode()

    @torch.inference_mode()
    def weights_changed(self, version: int) -> None:
        """The policy's weights are those of `version` from here on. Call it between steps."""
        self.version = version
        for family in self._prefilling:
            family.done = 0  # its spans will name this version alone, so none of its cache may be older
        if self._on_update == "recompute":
            self._recompute()

    # ---- inside

    def _admit(self) -> None:
        """Start waiting families, oldest first, while rows and cache allow."""
        reserved = sum(len(f.requests) for f in self._prefilling)
        while self._waiting and self._free_staging:
            family = self._waiting[0]
            num_rows = len(self._rows) + reserved + len(family.requests)
            longest = max([family.longest, self._rows.longest_possible, *(f.longest for f in self._prefilling)])
            fits = num_rows <= self._max_running and num_rows * longest <= self._kv_tokens
            alone = not len(self._rows) and not self._prefilling
            if not (fits or alone):
                break
            family.row = self._free_staging.pop()
            reserved += len(family.requests)
            self._prefilling.append(self._waiting.popleft())

    def _prefill(self, budget: int) -> int:
        """Compute at most `budget` tokens of the waiting prompts; a finished prompt starts its requests."""
        chunks, complete, left = [], [], budget
        for family in self._prefilling:
            take = min(left, len(family.prompt) - family.done)
            if take:
                chunks.append((family, Chunk(family.row, family.done, family.done + take)))
                family.done += take
                left -= take
            if family.done == len(family.prompt) and take:
                complete.append((family, len(chunks) - 1))
            if not left:
                break
        self._staging.reserve(STAGING_ROWS, max(c.end for _, c in chunks))
        sequences = [family.prompt for family, _ in chunks]
        last_hidden = self._forward_chunks(self._staging, [c for _, c in chunks], sequences)
        self._start(complete, last_hidden)
        self._prefilling = [f for f in self._prefilling if f.row >= 0]
        return budget - left

    def _forward_chunks(self, arena: Arena, chunks: list[Chunk], sequences: Sequence[IntArray]) -> torch.Tensor:
        """Write the chunks' cache; return the hidden state of each chunk's last token."""
        tokens = np.concatenate([s[c.start : c.end] for c, s in zip(chunks, sequences, strict=True)])
        plan = PrefillPlan(arena, chunks, self.policy.device)
        hidden = self.policy.hidden(self._to_device(tokens.astype(np.int64)), plan.positions, plan)
        ends = np.cumsum([c.end - c.start for c in chunks]) - 1
        return hidden[self._to_device(ends)]

    def _start(self, complete: list[tuple[_Family, int]], last_hidden: torch.Tensor) -> None:
        """Give every request of the families a row with its prompt's cache, and its first token.

        Each family comes with the index of its prompt's end in `last_hidden`.
        """
        first, ends = len(self._rows), []
        for family, end in complete:
            requests = [r for r in family.requests if r.id not in family.aborted]
            row, num_prompt = len(self._rows), len(family.prompt)
            self._free_staging.append(family.row)
            source, family.row = family.row, -1
            if requests:
                self._reserve(row + len(requests), num_prompt + 1, family.longest)
                self._arena.copy(self._staging, source, row, row + len(requests), num_prompt)
                self._rows.add(family.prompt, requests, self._clock())
                self._begun.extend((r.id, self.version) for r in requests)
                ends += [end] * len(requests)
        if ends:
            logits = self.policy.logits(last_hidden)[ends]
            noise = uniforms(self._rows.seeds[first:], self._rows.lengths[first:])
            self._record(draw(logits, self._rows.samplings[first:], noise), first)

    def _decode(self) -> None:
        """One token for every running sequence."""
        rows = self._rows
        positions = rows.lengths - 1  # the last token has no cache yet
        longest = int(positions.max()) + 1
        self._reserve(len(rows), longest)
        equal = longest == int(positions.min()) + 1
        plan = DecodePlan(self._arena, self._to_device(positions), longest, equal)
        hidden = self.policy.hidden(self._to_device(rows.last_tokens), plan.positions, plan)
        noise = uniforms(rows.seeds, rows.lengths)
        self._record(draw(self.policy.logits(hidden), rows.samplings, noise), 0)

    def _reserve(self, num_rows: int, num_tokens: int, most_tokens: int = 0) -> None:
        most_tokens = max(most_tokens, self._rows.longest_possible)
        self._arena.reserve(num_rows, num_tokens, most_tokens=most_tokens, budget_tokens=self._kv_tokens)

    def _record(self, outcome: Draw, first: int) -> None:
        """Book the drawn tokens to rows `first`.., and retire the rows that are done."""
        tokens = outcome.tokens.cpu().numpy()
        allowed = None if outcome.allowed is None else outcome.allowed.cpu().numpy()
        self._rows.append(first, tokens, outcome.logprobs.cpu().numpy(), self.version, allowed)
        self.sampled_tokens += int(self._rows.counted[first:].sum())
        done = self._rows.done(first, self.policy.eos_ids, self.policy.tokenizer)
        for row, finish in sorted(done.items(), reverse=True):
            self._retire(row, finish)

    def _retire(self, row: int, finish: FinishReason) -> None:
        """Hand the row's request back and move the last row into its place."""
        rows = self._rows
        self._finished.append(rows.generation(row, finish, self._clock()))
        last = len(rows) - 1
        if row != last:
            self._arena.copy(self._arena, last, row, row + 1, int(rows.lengths[last]) - 1)
        rows.remove(row)

    def _abort(self, ids: set[str]) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows.request_id(row) in ids:
                self._retire(row, FinishReason.ABORT)
        for family in [*self._waiting, *self._prefilling]:
            for request in family.requests:
                if request.id in ids and request.id not in family.aborted:
                    family.aborted.add(request.id)
                    self._finished.append(_nothing_sampled(request, self._clock()))
        hopeless = [f for f in self._waiting if len(f.aborted) == len(f.requests)]
        for family in hopeless:
            self._waiting.remove(family)

    def _recompute(self) -> None:
        """Compute the cache of every running sequence again, under the present weights."""
        sequences = [self._rows.sequence(row)[:-1] for row in range(len(self._rows))]
        batch: list[int] = []
        for row in range(len(sequences)):
            batch.append(row)
            if sum(len(sequences[r]) for r in batch) >= self.prefill_tokens or row == len(sequences) - 1:
                chunks = [Chunk(r, 0, len(sequences[r])) for r in batch]
                self._forward_chunks(self._arena, chunks, [sequences[r] for r in batch])
                batch = []

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.policy.device)


def _arena(policy: Policy) -> Arena:
    return Arena(
        num_layers=policy.num_layers,
        num_heads=policy.num_kv_heads,
        head_size=policy.head_size,
        dtype=policy.dtype,
        device=policy.device,
    )


def _nothing_sampled(request: Request, now_s: float) -> Generation:
    return Generation(
        id=request.id,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        spans=(),
        finish=FinishReason.ABORT,
        started_s=now_s,
        finished_s=now_s,
    )


def kv_budget(policy: Policy, kv_tokens: int) -> int:
    """Tokens of cache to use: the setting, or what half of the free GPU memory (2 GiB on a CPU) holds."""
    if kv_tokens:
        return kv_tokens
    bytes_per_token = 2 * policy.num_layers * policy.num_kv_heads * policy.head_size * policy.dtype.itemsize
    free = torch.cuda.mem_get_info(policy.device)[0] // 2 if policy.device.type == "cuda" else 2 * 2**30
    return int(free // bytes_per_token)

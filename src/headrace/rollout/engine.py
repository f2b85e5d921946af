"""The embedded engine: continuous batching over the policy's own modules.

One `step` is: admit what fits, compute a chunk of waiting prompts, decode one token for every running sequence, or
several where drafts of them turn out right (draft.py).
The samples of one group share one prefill. Everything here runs in the device thread; `submit` and `abort` only leave
a message, so any thread may call them. n running sequences are the arena's rows 0..n-1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from headrace import kernels
from headrace.errors import ConfigError, ModelError
from headrace.policy.policy import Policy
from headrace.rollout.arena import Chunk
from headrace.rollout.draft import Drafter
from headrace.rollout.request import Generation, Request
from headrace.rollout.rows import Burst, Parked, Rows
from headrace.rollout.store import MOST_STEPS, RowStore, Store, sample
from headrace.types import EngineCounts, FinishReason, IntArray, RouteArray

if kernels.AVAILABLE:
    from headrace.rollout.paged import PagedStore


@dataclass(slots=True, eq=False)
class _Family:
    """Requests that share one prompt, from submission until their prompt is in the cache."""

    prompt: IntArray
    requests: list[Request]
    longest: int  # tokens of the longest sequence it may become
    place: int = -1  # of the prompt's cache
    done: int = 0  # prompt tokens computed
    routes: list[RouteArray] = field(default_factory=list)  # the experts of those, part by part
    aborted: set[str] = field(default_factory=set)
    parked: Parked | None = None  # the row of a request that was laid aside; it is alone in its family

    @property
    def hopeless(self) -> bool:
        """Whether nobody waits for it any more."""
        return len(self.aborted) == len(self.requests)


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
        max_wall_s: float = 0.0,
        on_wall: str = "cut",
        speculate: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.version = 0
        self.sampled_tokens = 0  # counted ones, ever
        self.computed_tokens = 0  # of prompts and answers, counted or not: as long as it grows, something moves
        self.prefill_tokens = prefill_tokens
        self.preemptions = 0  # times a sequence had to make room, ever
        self.parks = 0  # times one was laid aside at `max_wall_s`, ever
        self.num_drafts = self.drafted_tokens = self.accepted_tokens = 0
        self._on_update, self._clock = on_update, clock
        self._max_wall_s, self._on_wall = max_wall_s, on_wall
        self._max_running = max_running
        self._make_store = partial(make_store, policy, kv_tokens=kv_tokens, max_running=max_running)
        self._held: Store | None = self._make_store()
        if speculate and policy.exact and policy.device.type != "cuda":
            raise ConfigError(
                f"model.exact = true and rollout.speculate = {speculate}: checking drafts on a CPU has no exact form; "
                "set rollout.speculate = 0"
            )
        self._drafter = (
            Drafter(longest=speculate, max_running=max_running, device=policy.device.type) if speculate else None
        )
        self._rows = Rows(policy.routers.shape, policy.routers.dtype)
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiting: deque[_Family] = deque()
        self._prefilling: list[_Family] = []
        self._finished: list[Generation] = []
        self._begun: deque[tuple[str, int]] = deque()

    # ---- called from any thread

    def submit(self, prompt: IntArray, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt."""
        self._inbox.append(partial(self._split, prompt, list(requests)))

    def go_on(self, prompt: IntArray, request: Request, so_far: Generation) -> None:
        """Queue a request that has sampled something before, in another process perhaps."""

        def queue() -> None:
            parked = self._rows.parked(prompt, request, so_far)
            sequence = np.concatenate([prompt, so_far.token_ids])
            self._queue(_Family(sequence, [request], parked.longest, parked=parked))

        self._inbox.append(queue)

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

    @property
    def counts(self) -> EngineCounts:
        """What it did so far."""
        return EngineCounts(
            computed_tokens=self.computed_tokens,
            preemptions=self.preemptions,
            parks=self.parks,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )

    # ---- called from the device thread

    @torch.inference_mode()
    def advance(self, max_steps: int = 16) -> list[Generation]:
        """Run steps until something finishes or so many tokens are decoded for a sequence: new weights may wait."""
        while max_steps > 0:
            max_steps -= self.step()
            if self._finished or not self.has_work:
                break
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def step(self) -> int:
        """Admit, prefill a chunk, decode a burst; how many decode steps long that was, at least one."""
        while self._inbox:
            self._inbox.popleft()()
        budget = self.prefill_tokens
        if self._max_wall_s:
            self._mind_the_wall()
        self._admit()
        while self._prefilling and budget:
            budget -= self._prefill(budget)
            self._admit()
        return self._decode(4 if self._waiting else MOST_STEPS) if len(self._rows) else 1

    @torch.inference_mode()
    def weights_changed(self, version: int) -> None:
        """The policy's weights are those of `version` from here on. Call it between steps."""
        self.version = version
        for family in self._prefilling:
            family.done = 0  # its spans will name this version alone, so none of its cache may be older
            family.routes.clear()
        if self._on_update == "recompute":
            rows = range(len(self._rows))
            sequences, known = [self._rows.sequence(r)[:-1] for r in rows], [self._rows.routes(r) for r in rows]
            self._store.recompute(sequences, known, self.prefill_tokens)

    @torch.inference_mode()
    def release_cache(self) -> None:
        """Give its memory back until there is something to decode: what runs is laid aside, and computed again then."""
        while self._prefilling or len(self._rows):
            self._make_room()
        self._held = None
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def likeliest(self, prompt: IntArray) -> tuple[int, float] | None:
        """The likeliest token after a prompt and its log-prob, by the way of a request; None while there is no room."""
        place = self._store.open(len(prompt), 1)
        if place is None:
            return None
        try:
            last_hidden, _ = self._store.prefill([Chunk(place, 0, len(prompt))], [prompt], [None])
        finally:
            self._store.close(place)
        logprobs = torch.log_softmax(self.policy.logits(last_hidden)[0].float(), -1)
        token = int(logprobs.argmax())
        return token, float(logprobs[token])

    def under_way(self) -> dict[str, Generation]:
        """What every request that holds a row, or was laid aside, has sampled so far; its finish is ABORT."""
        now_s = self._clock()
        rows = [self._rows.generation(row, FinishReason.ABORT, now_s) for row in range(len(self._rows))]
        aside = [f.parked.generation(FinishReason.ABORT, now_s) for f in self._waiting if f.parked is not None]
        return {generation.id: generation for generation in (*rows, *aside)}

    # ---- inside

    @property
    def _store(self) -> Store:
        """The cache; made again once it is needed after it was released."""
        if self._held is None:
            self._held = self._make_store()
        return self._held

    def _split(self, prompt: IntArray, requests: list[Request]) -> None:
        """Queue the samples of one prompt, as many together as can run at the same time."""
        longest = len(prompt) + max(r.sampling.max_new_tokens for r in requests)
        at_once = max(1, min(self._max_running, self._store.most_rows(longest)))
        for start in range(0, len(requests), at_once):
            self._queue(_Family(prompt, requests[start : start + at_once], longest))

    def _queue(self, family: _Family) -> None:
        self._waiting.append(family)

    def _admit(self) -> bool:
        """Start waiting families, oldest first, while rows and cache allow; whether the next one lacks these."""
        reserved = sum(len(f.requests) for f in self._prefilling)
        while self._waiting:
            family = self._waiting[0]
            num_rows = len(self._rows) + reserved + len(family.requests)
            room = self._store.has_room(
                num_rows=num_rows,
                longest=max([family.longest, self._rows.longest_possible, *(f.longest for f in self._prefilling)]),
                num_prompt=len(family.prompt),
                num_requests=len(family.requests),
            )
            alone = not len(self._rows) and not self._prefilling
            if not (num_rows <= self._max_running and room) and not alone:
                return True
            place = self._store.open(len(family.prompt), len(family.requests))
            if place is None:
                break
            family.place = place
            reserved += len(family.requests)
            self._prefilling.append(self._waiting.popleft())
        return False

    def _prefill(self, budget: int) -> int:
        """Compute at most `budget` tokens of the waiting prompts; a finished prompt starts its requests."""
        chunks, complete, left = [], [], budget
        for family in self._prefilling:
            take = min(left, len(family.prompt) - family.done)
            if take:
                chunks.append((family, Chunk(family.place, family.done, family.done + take)))
                family.done += take
                left -= take
            if family.done == len(family.prompt) and take:
                complete.append((family, len(chunks) - 1))
            if not left:
                break
        known = [None if f.parked is None else f.parked.routes for f, _ in chunks]
        last_hidden, routes = self._store.prefill([c for _, c in chunks], [f.prompt for f, _ in chunks], known)
        ends = np.cumsum([c.end - c.start for _, c in chunks])
        for (family, _), part in zip(chunks, np.split(routes, ends[:-1]), strict=True):
            family.routes.append(part)
        self._start(complete, last_hidden)
        self._prefilling = [f for f in self._prefilling if f.place >= 0]
        self.computed_tokens += budget - left
        return budget - left

    def _start(self, complete: list[tuple[_Family, int]], last_hidden: torch.Tensor) -> None:
        """Give every request of the families a row with its prompt's cache, and its next token.

        Each family comes with the index of its prompt's end in `last_hidden`.
        """
        first, ends = len(self._rows), []
        for family, end in complete:
            requests = [r for r in family.requests if r.id not in family.aborted]
            if requests:
                self._store.fork(family.place, self._rows, len(requests), len(family.prompt), family.longest)
                routes = np.concatenate(family.routes)
                if family.parked is not None:
                    self._rows.resume(family.parked, self._clock(), routes)
                else:
                    self._rows.add(family.prompt, requests, self._clock(), routes)
                    self._begun.extend((r.id, self.version) for r in requests)
                    if self._drafter is not None:
                        self._drafter.read(family.prompt)
                ends += [end] * len(requests)
            self._store.close(family.place)
            family.place = -1
        if ends:
            self._record(sample(self.policy.logits(last_hidden)[ends], self._rows, first), first)

    def _decode(self, wanted: int) -> int:
        """At most `wanted` steps for every running sequence, or one that verifies drafts; how many it was."""
        while not (steps := self._store.steps(self._rows, wanted)):
            self._make_room()
        drafts = None if self._drafter is None else self._drafter.propose(self._rows, steps)
        if drafts is None or not self._store.fits(self._rows, drafts):
            self._record(self._store.decode(self._rows, steps), 0)
            return steps
        burst = self._store.verify(self._rows, drafts)
        self.num_drafts += int(np.count_nonzero(drafts.counts))
        self.drafted_tokens += int(drafts.counts.sum())
        self.accepted_tokens += int((burst.counts - 1).sum())
        self._record(burst, 0)
        return 1

    def _make_room(self) -> None:
        """Out of cache: what started last gives its own back and waits to be computed again."""
        if self._prefilling:  # nothing is sampled yet, so nothing is lost but a part of its prompt's pass
            family = self._prefilling.pop()
            self._store.close(family.place)
            family.place, family.done = -1, 0
            family.routes.clear()
            self._waiting.appendleft(family)
            return
        self._waiting.appendleft(self._lay_aside(self._rows.youngest()))
        self.preemptions += 1

    def _mind_the_wall(self) -> None:
        """Cut the sequences that reached `max_wall_s`, or lay them aside, the most overdue first, while others wait.

        They queue up behind those, so that each has its turn, and then decode for as long again.
        """
        overdue = partial(self._rows.overdue, self._clock(), self._max_wall_s)
        if self._on_wall == "cut":
            for row in sorted(overdue(), reverse=True):
                self._retire(row, FinishReason.WALL)
            return
        parked: list[_Family] = []
        while (rows := overdue()) and self._admit() and self._waiting[0] not in parked:
            parked.append(self._lay_aside(rows[0], another_stretch=True))
            self._waiting.append(parked[-1])
        self.parks += len(parked)

    def _lay_aside(self, row: int, *, another_stretch: bool = False) -> _Family:
        """Take a row out, with what it sampled: once its tokens are computed again it goes on."""
        sequence, parked = self._rows.sequence(row), self._rows.park(row, self._clock())
        if another_stretch:
            parked = replace(parked, decoded_s=0.0)
        self._store.remove(row, self._rows)
        self._rows.remove(row)
        return _Family(sequence, [parked.request], parked.longest, parked=parked)

    def _record(self, burst: Burst, first: int) -> None:
        """Book the drawn tokens to rows `first`.., and retire the rows that are done."""
        had = self._rows.sampled[first:].copy()
        self._rows.append(first, burst, self.version)
        ended = self._rows.end(first, burst, self.policy.eos_ids, self.policy.tokenizer)
        fresh = self._rows.sampled[first:] - had
        # what a burst has beyond a row's end is no concern
        if np.isnan(burst.logprobs[np.arange(len(burst.logprobs))[:, None] < fresh]).any():
            raise ModelError(
                f"version {self.version} of the policy gives the next token a probability that is not a number (NaN): "
                "its weights, or what it computes from them, are not finite. Nothing was trained on it; resume the run "
                "from its last checkpoint, and if it comes to this again, lower learner.lr or set model.dtype=float32"
            )
        self.sampled_tokens += int(fresh[self._rows.counted[first:]].sum())
        self.computed_tokens += int(fresh.sum())
        if ended and self._drafter is not None:
            self._drafter.learn(self._rows)
        for row, finish in sorted(ended.items(), reverse=True):
            self._retire(row, finish)

    def _retire(self, row: int, finish: FinishReason) -> None:
        """Hand the row's request back and move the last row into its place."""
        self._finished.append(self._rows.generation(row, finish, self._clock()))
        self._store.remove(row, self._rows)
        self._rows.remove(row)

    def _abort(self, ids: set[str]) -> None:
        for row in reversed(range(len(self._rows))):
            if self._rows.request_id(row) in ids:
                self._retire(row, FinishReason.ABORT)
        for family in [*self._waiting, *self._prefilling]:
            for request in family.requests:
                if request.id in ids and request.id not in family.aborted:
                    family.aborted.add(request.id)
                    self._finished.append(self._unfinished(family, request))
        for family in [f for f in self._prefilling if f.hopeless]:
            self._store.close(family.place)
        self._prefilling = [f for f in self._prefilling if not f.hopeless]
        self._waiting = deque(f for f in self._waiting if not f.hopeless)

    def _unfinished(self, family: _Family, request: Request) -> Generation:
        """What an aborted request that holds no row has sampled: something if it was laid aside, else nothing."""
        now_s = self._clock()
        if family.parked is not None:
            return family.parked.generation(FinishReason.ABORT, now_s)
        return _nothing_sampled(request, now_s)


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


def make_store(policy: Policy, *, kv_tokens: int, max_running: int) -> Store:
    """Pages where there is a GPU, else rows."""
    if policy.device.type == "cuda":
        return PagedStore(policy, kv_tokens, max_running)
    return RowStore(policy, kv_tokens)


def kv_budget(policy: Policy, kv_tokens: int, reserved_bytes: int = 0) -> int:
    """Tokens of cache to use: the setting, or what 2 GiB hold, and on a GPU half of the memory that is left.

    `reserved_bytes` of it are spoken for: the learner's state.
    """
    if kv_tokens:
        return kv_tokens
    usable = 2 * 2**30
    if policy.device.type == "cuda":
        usable = max(0, torch.cuda.mem_get_info(policy.device)[0] - reserved_bytes) // 2
    return int(usable // kv_bytes_per_token(policy))


def kv_bytes_per_token(policy: Policy) -> int:
    """Keys and values of every layer."""
    head_bytes: int = (policy.head_size + policy.value_size) * policy.dtype.itemsize
    return policy.num_layers * policy.num_kv_heads * head_bytes

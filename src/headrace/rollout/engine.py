"""The embedded engine: continuous batching over the policy's own modules.

One `step` admits what fits, prefills a chunk of the waiting prompts, and decodes one token for
every running sequence, or several where drafts are accepted (speculative decoding, draft.py). The
samples of one prompt share one prefill. Everything here runs in the device thread; `submit`,
`resume_request` and `abort` only leave a message, so any thread may call them. The n running
sequences are rows 0..n-1 of the KV cache (store.py).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from headrace import kernels
from headrace.errors import ConfigError, ModelError
from headrace.measured import EngineCounts
from headrace.policy.limits import limits
from headrace.policy.policy import Policy
from headrace.rollout.draft import Drafter
from headrace.rollout.rows import Burst, Generation, Request, Rows, RowSequence
from headrace.rollout.store import MOST_STEPS, Chunk, RowStore, batches, sample
from headrace.types import FinishReason, IntArray, RouteArray, Trajectory
from headrace.user_code import load_optional

if kernels.AVAILABLE or TYPE_CHECKING:
    from headrace.rollout.paged import PagedStore

MOST_COMPARED = 32  # waiting prompts that a new one is compared with


@dataclass(slots=True, eq=False)
class _PromptGroup:
    """Requests that share one prompt (a prefix group), until the end of its prefill."""

    prompt: IntArray
    requests: list[Request]
    longest: int  # most tokens that one of its sequences can reach
    place: int = -1  # handle of the prompt's KV cache, while it is computed
    done: int = 0  # prompt tokens in the cache
    routes: list[RouteArray] = field(default_factory=list)  # experts of those tokens
    parked: RowSequence | None = None  # a preempted row, the only request of its group
    known: RouteArray | None = None  # experts of the first tokens, to be kept
    cached: int = 0  # prompt tokens that an earlier turn of its session computed

    @classmethod
    def of(cls, parked: RowSequence) -> Self:
        """To compute all that it sampled again, with the same experts."""
        longest = len(parked.prompt) + parked.request.sampling.max_new_tokens
        return cls(parked.tokens, [parked.request], longest, parked=parked, known=parked.routes)


@dataclass(eq=False)
class Engine:
    """Continuous batching on one device."""

    policy: Policy
    _: KW_ONLY
    max_running: int
    prefill_tokens: int
    kv_tokens: int
    on_update: str
    max_wall_s: float = 0.0
    on_wall: str = "cut"
    speculate: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        policy, speculate = self.policy, self.speculate
        self.version = 0
        self.notes: list[str] = []  # for the user
        self.begun: deque[tuple[str, int]] = deque()  # requests with a first token, and its version
        self.sampled_tokens = 0  # in total, of requests that are `counted`
        self.num_drafts, self.counts = 0, EngineCounts()
        self._weight_bytes = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        if speculate and policy.exact and policy.device.type != "cuda":
            told = "speculative decoding on a CPU is not batch-invariant; set rollout.speculate = 0"
            raise ConfigError(f"model.exact = true and rollout.speculate = {speculate}: {told}")
        self._drafter = Drafter(speculate, self.max_running, policy.device.type) if speculate else None
        self._rows = Rows((policy.routers.dtype, policy.routers.shape), cache(self._make_grammars))
        _ = self._store  # a cache that is too large is an error now
        self._inbox: deque[Callable[[], None]] = deque()
        self._waiting: deque[_PromptGroup] = deque()
        self._prefilling: list[_PromptGroup] = []
        self._finished: list[Generation] = []
        self._kept: dict[str, list[RowSequence]] = {}  # for next turns, by session; least recently used first

    # ---- called from any thread

    def submit(self, prompt: IntArray, requests: Sequence[Request], known: RouteArray | None = None) -> None:
        """Queue requests that share a prompt; `known` experts of its first tokens are kept."""
        self._inbox.append(partial(self._split, prompt, list(requests), known))

    def forget(self, sessions: set[str]) -> None:
        """These sessions are over: their cache is free."""
        self._inbox.append(lambda: self._drop_kept(sessions))

    def resume_request(self, request: Request, known: Trajectory) -> None:
        """Queue a request that has sampled a part of its answer, `known`, perhaps elsewhere."""
        self._inbox.append(lambda: self._waiting.append(_PromptGroup.of(self._rows.parked(request, known))))

    def abort(self, ids: set[str]) -> None:
        """End these requests at the next step, with the tokens they have and finish ABORT."""
        self._inbox.append(lambda: self._abort(ids))

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._waiting or self._prefilling or len(self._rows))

    # ---- called from the device thread

    @torch.inference_mode()
    def advance(self, max_steps: int = 16) -> list[Generation]:
        """Run steps until a request finishes, at most `max_steps`: new weights may be waiting."""
        while max_steps > 0:
            max_steps -= self.step()
            if self._finished or not self.has_work:
                break
        finished, self._finished = self._finished, []
        return finished

    @torch.inference_mode()
    def step(self) -> int:
        """Admit, prefill a chunk, decode a burst. Returns the decode steps, at least 1."""
        while self._inbox:
            self._inbox.popleft()()
        budget = self.prefill_tokens
        if self.max_wall_s:
            self._enforce_max_wall_s()
        self._admit()
        while self._prefilling and budget:
            budget = self._prefill(budget)
            self._admit()
        return self._decode(4 if self._waiting else MOST_STEPS) if len(self._rows) else 1

    @torch.inference_mode()
    def weights_changed(self, version: int) -> None:
        """The policy's weights are those of `version` from now on. Call it between steps."""
        self.version = version
        if self.on_update != "keep":  # the next turn computes them again
            self._drop_kept([*self._kept])
        for group in self._prefilling:
            # what it samples has one version, and so has the cache, but for that of earlier turns
            group.cached = group.done = group.cached if self.on_update == "keep" else 0
            del group.routes[1 if group.done else 0 :]
        if self.on_update == "recompute":
            for chunks in batches(self._rows, self.prefill_tokens):
                self._store.prefill(chunks, of_rows=True)

    @torch.inference_mode()
    def release_cache(self) -> None:
        """Free the KV cache until there is work again; running sequences are preempted."""
        self.counts.preemptions -= len(self._rows)  # the cache is not full
        while self._kept or self._prefilling or len(self._rows):
            self._make_room()
        vars(self).pop("_store", None)
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def greedy(self, prompt: IntArray) -> list[tuple[int, float]]:
        """Greedy next token and its log-prob, by the normal prefill; none if the cache is full."""
        if (place := self._store.open(len(prompt), 1)) is None:
            return []
        try:
            last_hidden, _ = self._store.prefill([Chunk(place, 0, len(prompt), prompt)])
        finally:
            self._store.close(place)
        logprobs = torch.log_softmax(self.policy.logits(last_hidden)[0].float(), -1)
        token = int(logprobs.argmax())
        return [(token, float(logprobs[token]))]

    def under_way(self) -> dict[str, Generation]:
        """What each running or preempted request has sampled so far, by id; its finish is ABORT."""
        now_s = self.clock()
        running = [self._rows.park(row, now_s) for row in range(len(self._rows))]
        parked = *running, *(g.parked for g in (*self._waiting, *self._prefilling) if g.parked)
        return {p.request.id: p.generation(FinishReason.ABORT, now_s) for p in parked}

    @cached_property
    def _store(self) -> "RowStore | PagedStore":
        """The KV cache; allocated again when it is needed after `release_cache`."""
        if self.policy.device.type == "cuda":
            if self.policy.routers.num_layers and self.policy.dtype is not torch.bfloat16:
                # torch's grouped products of others wait for the host: no graph can hold them
                raise ConfigError("a mixture on a GPU is decoded in bfloat16: set model.dtype=bfloat16")
            return PagedStore(self.policy, self.kv_tokens, self._rows, self.max_running)
        return RowStore(self.policy, self.kv_tokens, self._rows)

    def _make_grammars(self) -> Any:
        module, policy = load_optional("headrace.policy.grammar_llguidance", "llguidance", "grammar"), self.policy
        return module.Grammars(policy.tokenizer, len(policy.head_weight), sorted(policy.eos_ids))

    def _split(self, prompt: IntArray, requests: list[Request], known: RouteArray | None) -> None:
        longest = len(prompt) + max(r.sampling.max_new_tokens for r in requests)
        at_once = max(1, min(self.max_running, self._store.most_rows(longest)))
        if known is None and len(requests) == 1:  # of episodes that ask for the same prompt
            for group in islice(reversed(self._waiting), MOST_COMPARED):
                joinable = group.known is None and group.parked is None and len(group.requests) < at_once
                if joinable and group.longest == longest and np.array_equal(group.prompt, prompt):
                    group.requests += requests
                    return
        for start in range(0, len(requests), at_once):
            self._waiting.append(_PromptGroup(prompt, requests[start : start + at_once], longest, known=known))

    def _admit(self) -> bool:
        """Admit waiting prompts, oldest first, while there is room. True if one is blocked."""
        while self._waiting:
            group = self._waiting[0]
            starting = [*self._prefilling, group]
            num_rows = len(self._rows) + sum(len(g.requests) for g in starting)
            longest = max(self._rows.longest_possible, *(g.longest for g in starting))
            sizes = {"num_prompt": len(group.prompt), "num_requests": len(group.requests)}
            session = group.requests[0].session if len(group.requests) == 1 else ""
            if mine := self._kept.pop(session, []):  # it counts as just used, and what begins like the prompt goes last
                self._kept[session] = sorted(mine, key=lambda kept: _common(group.prompt, kept.tokens[:-1]))
            fits = partial(self._store.has_room, num_rows=num_rows, longest=longest, **sizes)
            while not (room := fits()) and self._kept:
                self._drop_oldest()
            if (num_rows > self.max_running or not room) and (len(self._rows) or self._prefilling):
                return True
            kept = self._kept[session][-1] if session in self._kept else None
            cached = _common(group.prompt[:-1], kept.tokens[:-1]) if kept else 0
            place = self._store.open(**sizes, kept=kept.cache if kept else None, num_kept=cached)
            if place is None:
                break
            group.place, group.cached, group.done = place, cached, cached
            group.routes = [] if kept is None else [kept.routes[:cached]]
            self._prefilling.append(self._waiting.popleft())
        return False

    def _prefill(self, budget: int) -> int:
        """Compute at most `budget` prompt tokens; complete prompts start. Returns the rest."""
        chunks: list[Chunk] = []
        for group in self._prefilling:
            start, group.done = group.done, min(group.done + budget, len(group.prompt))
            chunks.append(Chunk(group.place, start, group.done, group.prompt, group.known))
            budget -= chunks[-1].size
            if not budget:
                break
        last_hidden, routes = self._store.prefill(chunks)
        ends = np.cumsum([chunk.size for chunk in chunks])
        for group, part in zip(self._prefilling, np.split(routes, ends[:-1]), strict=False):
            group.routes.append(part)
        complete = [g for g in self._prefilling if g.done == len(g.prompt)]
        self._prefilling = self._prefilling[len(complete) :]
        self._start(complete, last_hidden)
        self.counts.computed_tokens += int(ends[-1])
        return budget

    def _start(self, complete: list[_PromptGroup], last_hidden: torch.Tensor) -> None:
        """Sample a token for each request; `last_hidden` begins with what follows these prompts."""
        first, ends = len(self._rows), []
        for end, group in enumerate(complete):
            routes = np.concatenate(group.routes)
            if group.parked is not None:
                self._rows.resume(group.parked, self.clock(), routes)
            else:
                self._rows.add(group.prompt, group.requests, self.clock(), routes)
                self.counts.prompt_tokens += len(group.prompt)
                self.counts.cached_tokens += group.cached
                self.begun.extend((r.id, self.version) for r in group.requests)
                if self._drafter is not None:
                    self._drafter.read(group.prompt)
            self._store.fork(group.place, len(group.requests))
            self._store.close(group.place)
            ends += [end] * len(group.requests)
        if ends:
            logits, which = self.policy.logits(last_hidden)[ends], np.arange(first, len(self._rows))
            self._record(sample(logits, self._rows, which), first)

    def _decode(self, wanted: int) -> int:
        """Up to `wanted` decode steps, or one that verifies drafts. Returns the number."""
        bursts = (min(wanted, self._store.most_steps), 1) if self._rows.plain else (1,)
        while not (steps := next((n for n in bursts if self._store.grow(self._rows.lengths, n)), 0)):
            self._make_room()
        read_bytes = self._weight_bytes + kv_bytes_per_token(self.policy) * int(self._rows.lengths.sum())
        self.counts.limit_s += steps * read_bytes / limits(self.policy.device)[1]
        drafts, rows = None, self._rows
        if self._drafter is not None and not any(s.request.sampling.grammar for s in rows.sequences):
            drafts = self._drafter.propose(rows, steps)
        if drafts is None or not self._store.grow(rows.lengths + drafts.counts + 1, 0):
            which = np.arange(len(rows))
            self._record(self._store.decode(which, np.zeros_like(which), rows.last_tokens, steps), 0)
            return steps
        burst = drafts.accepted(self._store.decode(*drafts.cells, drafts.inputs(rows.last_tokens), 1))
        self.num_drafts += int(np.count_nonzero(drafts.counts))
        self.counts.drafted_tokens += int(drafts.counts.sum())
        self.counts.accepted_tokens += int((burst.counts - 1).sum())
        self._record(burst, 0)
        return 1

    def _make_room(self) -> None:
        """The cache is full: preempt what started last. It will be recomputed."""
        if self._kept:
            self._drop_oldest()
        elif self._prefilling:  # nothing is sampled yet: only part of a prefill is lost
            group = self._prefilling.pop()
            self._store.close(group.place)
            group.done = 0
            self._waiting.appendleft(group)
        else:
            self._waiting.appendleft(_PromptGroup.of(self._remove(self._rows.youngest())))
            self.counts.preemptions += 1

    def _enforce_max_wall_s(self) -> None:
        """Cut the sequences that reached `max_wall_s`; or park (preempt) them while others wait."""
        overdue = partial(self._rows.overdue, self.clock(), self.max_wall_s)
        if self.on_wall == "cut":
            for row in sorted(overdue(), reverse=True):
                self._finish(row, FinishReason.WALL)
            return
        parked: list[_PromptGroup] = []  # queue behind the others, then have `max_wall_s` again
        while (rows := overdue()) and self._admit() and self._waiting[0] not in parked:
            parked.append(_PromptGroup.of(replace(self._remove(rows[0]), decoded_s=0.0)))
            self._waiting.append(parked[-1])
        self.counts.parks += len(parked)

    def _record(self, burst: Burst, first: int) -> None:
        """Record the sampled tokens of rows `first`.., and finish the rows that are done."""
        counts, ended = self._rows.ends(first, burst, self.policy.eos_ids, self.policy.tokenizer)
        # tokens beyond a row's end may be NaN
        if np.isnan(burst.logprobs[np.arange(len(burst.logprobs))[:, None] < counts]).any():
            raise ModelError(
                f"version {self.version} of the policy gives the next token a probability that is "
                "not a number (NaN): its weights, or what it computes from them, are not finite. "
                "Nothing was trained on it; resume the run from its last checkpoint. If this happens "
                "again, lower learner.lr or set model.dtype=float32"
            )
        self._rows.append(first, replace(burst, counts=counts), self.version)
        self.sampled_tokens += int(counts[self._rows.states["counted"][first:]].sum())
        self.counts.computed_tokens += int(counts.sum())
        if ended and self._drafter is not None:
            self._drafter.learn(self._rows)
        for row, finish in sorted(ended.items(), reverse=True):
            self._finish(row, finish)

    def _finish(self, row: int, finish: FinishReason) -> None:
        """A row ends. Its cache is kept for the next turn, in place of what it went on from."""
        session, cache = self._rows.sequences[row].request.session, None
        if session and finish is not FinishReason.ABORT:
            cache = self._store.keep(row, int(self._rows.lengths[row]) - 1)
        sequence = self._remove(row)
        if cache is not None:
            tokens, mine = sequence.tokens[:-1], self._kept.pop(session, [])
            replaced = [k for k in mine if _common(k.tokens[:-1], tokens) == len(k.tokens) - 1]
            for kept in replaced:
                self._store.drop_kept(kept.cache)
            others = (kept for kept in mine if kept not in replaced)
            self._kept[session] = [*others, replace(sequence, supports=[], cache=cache)]
        self._finished.append(sequence.generation(finish, self.clock()))

    def _drop_oldest(self) -> None:
        session, caches = next(iter(self._kept.items()))
        self._store.drop_kept(caches.pop(0).cache)
        if not caches:
            del self._kept[session]

    def _drop_kept(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            for kept in self._kept.pop(session, ()):
                self._store.drop_kept(kept.cache)

    def _remove(self, row: int) -> RowSequence:
        """Remove a row, and return what it was; the last row moves into its place."""
        parked = self._rows.park(row, self.clock())
        self._store.remove(row)
        self._rows.remove(row)
        return parked

    def _abort(self, ids: set[str]) -> None:
        """A request without a row has sampled something only if it is parked."""
        for row in reversed(range(len(self._rows))):
            if self._rows.sequences[row].request.id in ids:
                self._finish(row, FinishReason.ABORT)
        now_s, finish = self.clock(), FinishReason.ABORT
        for group in [*self._waiting, *self._prefilling]:
            for id in [request.id for request in group.requests if request.id in ids]:
                nothing = Generation(id=id, finish=finish, started_s=now_s, finished_s=now_s)
                known = group.parked
                self._finished.append(known.generation(finish, now_s) if known else nothing)
            group.requests = [request for request in group.requests if request.id not in ids]
            if not group.requests and group in self._prefilling:
                self._store.close(group.place)
        self._prefilling = [group for group in self._prefilling if group.requests]
        self._waiting = deque(group for group in self._waiting if group.requests)


def _common(a: IntArray, b: IntArray) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def kv_budget(policy: Policy, kv_tokens: int, reserved_bytes: int = 0) -> int:
    """Tokens that the KV cache may hold: `kv_tokens`, or if that is 0 what fits into 2 GiB."""
    usable = 2 * 2**30
    if policy.device.type == "cuda":  # half of what the learner's state, `reserved_bytes`, leaves
        usable = max(0, torch.cuda.mem_get_info(policy.device)[0] - reserved_bytes) // 2
    return kv_tokens or int(usable // kv_bytes_per_token(policy))


def kv_bytes_per_token(policy: Policy) -> int:
    head_bytes: int = (policy.head_size + policy.value_size) * policy.dtype.itemsize
    return policy.num_layers * policy.num_kv_heads * head_bytes

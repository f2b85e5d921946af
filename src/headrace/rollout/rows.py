"""Requests, and the state of the running ones in arrays: no Python loop over rows per decode step.

What a request samples depends only on its seed, its position and its logits, because each token's
uniform number comes from a counter-based hash (`uniforms`). Order and size of the batch do not
matter.
"""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.types import FinishReason, FloatArray, IntArray, Replay, RouteArray, Sampling, Span, Trajectory

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

GROWTH_TOKENS = 64
MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))
NOTHING: npt.NDArray[np.void] = np.empty(0, np.void)
CONTEXT = 8  # tokens before a sampled one from which n-grams predict it
NO_TAIL = np.full(CONTEXT, -1, np.int64)

STATE = np.dtype(  # of a running sequence
    [
        ("num_prompt", np.int64),
        ("sampled", np.int64),  # number of sampled tokens
        ("limit", np.int64),  # of sampled tokens
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("truncates", np.bool_),
        ("has_stop", np.bool_),
        ("counted", np.bool_),
        ("began_s", np.float64),  # of decoding since it was last resumed
        ("prompt_key", np.uint64),
        ("learned", np.int64),  # sampled tokens that the drafter has seen
        ("tail", np.int64, (CONTEXT,)),  # the prompt's last tokens
    ],
    align=True,  # torch needs a stride that is a multiple of the item size
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to sample."""

    id: str
    sampling: Sampling
    seed: int
    counted: bool = True  # in the ledger; False for evaluation
    session: str = ""  # an episode: its cache is kept when the request ends, for the next turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The sampled tokens of a request; `spans` are the positions that each version sampled."""

    id: str
    finish: FinishReason
    started_s: float
    finished_s: float
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    spans: tuple[Span, ...] = ()
    replay: Replay | None = None


@dataclass(frozen=True, slots=True)
class Burst:
    """Up to K tokens for each of n rows, with their supports where a row truncates.

    A support is the set of tokens that top-k, top-p and min-p leave.
    """

    tokens: Ints  # [K, n]
    logprobs: npt.NDArray[np.float32]  # [K, n] of the distribution sampled from
    counts: Ints  # [n] how many of a row's tokens are valid
    supports: npt.NDArray[np.object_] | None = None  # [K, n] token ids, or None
    routes: RouteArray | None = None  # [K, n, L, experts] of the tokens each step started from


@dataclass(frozen=True, slots=True, eq=False)
class RowSequence:
    """The sequence of a row: what never changes of it, and the supports it collects.

    Parked (preempted), it has all it sampled, without its KV cache, and can be resumed exactly. At
    its end its cache may be kept for the next turn of its session.
    """

    request: Request
    prompt: IntArray
    started_s: float
    prompt_routes: RouteArray
    order: int  # of its start, because rows move
    supports: list[IntArray] = field(default_factory=list)
    # if it is parked: token, logprob, version and experts of each
    sampled: npt.NDArray[np.void] = field(default_factory=lambda: NOTHING)
    decoded_s: float = 0.0  # time used of `max_wall_s`, if it is parked
    cache: Any = None  # the store's, of all tokens but the newest, if it is kept

    @property
    def tokens(self) -> IntArray:
        return np.concatenate([self.prompt, self.sampled["token"].astype(np.int32)])

    @property
    def routes(self) -> RouteArray:
        """Experts of prompt and sampled tokens, all but the newest."""
        return np.concatenate([self.prompt_routes, self.sampled["routes"][:-1]])

    def generation(self, finish: FinishReason, now_s: float) -> Generation:
        known = self.routes
        routes = np.concatenate([known, np.zeros_like(known[:1])]) if known.shape[1] else None
        return Generation(
            id=self.request.id,
            token_ids=self.sampled["token"].astype(np.int32),
            logprobs=self.sampled["logprob"].copy(),
            spans=_spans(self.sampled["version"], len(self.prompt)),
            finish=finish,
            started_s=self.started_s,
            finished_s=now_s,
            replay=Replay.of(self.supports, routes),
        )


class Rows:
    """Running sequences 0..n-1: their state, and a table `[rows, tokens]` of what they sampled.

    The table has token, log-prob, version and experts `[L, K]`; L and K are 0 for a dense model.
    The experts of a token are known one step after it was sampled, when the model has computed it.
    """

    def __init__(self, routes: npt.DTypeLike = (np.uint8, (0, 0)), grammars: Callable[[], Any] = lambda: None) -> None:
        self.grammars = grammars  # what knows which tokens a grammar allows
        self.sequences: list[RowSequence] = []
        self._orders = itertools.count()  # of starts
        self._all_states = np.zeros(0, STATE)
        fields = [("token", np.int64), ("logprob", np.float32), ("version", np.int32)]
        self.dtype = np.dtype([*fields, ("routes", routes)])  # of a sampled token
        self._table = np.zeros((0, 0), self.dtype)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def states(self) -> npt.NDArray[np.void]:
        """The state of the rows in use. It is a view: writing to it changes the rows."""
        return self._all_states[: len(self)]

    @property
    def lengths(self) -> Ints:
        return self.states["num_prompt"] + self.sampled

    @property
    def sampled(self) -> Ints:
        return self.states["sampled"]

    @property
    def plain(self) -> bool:
        """Whether no row truncates (top-k, top-p, min-p)."""
        return not self.states["truncates"].any()

    @property
    def last_tokens(self) -> Ints:
        return self._table["token"][np.arange(len(self)), self.sampled - 1]

    @property
    def longest_possible(self) -> int:
        return int((self.states["num_prompt"] + self.states["limit"]).max()) if len(self) else 0

    def contexts(self, rows: Ints, at: Ints) -> Ints:
        """The tokens `[.., CONTEXT]` before sampled token `at` of each of `rows`."""
        places = at[:, None] + np.arange(-CONTEXT, 0)
        sampled = self._table["token"][rows[:, None], np.maximum(places, 0)]
        tails = self.states["tail"][rows[:, None], np.minimum(places, -1)]
        found: Ints = np.where(places < 0, tails, sampled)
        return found

    def add(self, prompt: IntArray, requests: list[Request], now_s: float, routes: RouteArray) -> None:
        """Append rows for `requests` of one prompt, with nothing sampled yet."""
        n, more = len(self), len(requests)
        if n + more > len(self._all_states):
            self._grow(max(n + more, 2 * len(self._all_states)), self._table.shape[1])
        self.sequences += [RowSequence(r, prompt, now_s, routes, next(self._orders)) for r in requests]
        new = self.states[n:]
        new["num_prompt"], new["sampled"], new["learned"] = len(prompt), 0, 0
        new["limit"] = [r.sampling.max_new_tokens for r in requests]
        new["seed"] = [r.seed for r in requests]
        new["temperature"] = [r.sampling.temperature for r in requests]
        new["truncates"] = [r.sampling.truncates for r in requests]
        new["has_stop"] = [bool(r.sampling.stop) for r in requests]
        new["counted"] = [r.counted for r in requests]
        new["began_s"] = now_s
        new["prompt_key"], new["tail"] = prompt_key(prompt), np.append(NO_TAIL, prompt)[-CONTEXT:]

    def append(self, first: int, burst: Burst, version: int) -> None:
        most = int((self.sampled[first : first + len(burst.counts)] + burst.counts).max())
        if most > self._table.shape[1]:
            self._grow(len(self._all_states), max(GROWTH_TOKENS, 2 * self._table.shape[1], most))
        fresh = self.states[first : first + len(burst.counts)]
        steps, columns = np.nonzero(np.arange(len(burst.tokens))[:, None] < burst.counts)
        rows, at = columns + first, fresh["sampled"][columns] + steps
        self._table["token"][rows, at] = burst.tokens[steps, columns]
        self._table["logprob"][rows, at] = burst.logprobs[steps, columns]
        self._table["version"][rows, at] = version
        if burst.routes is not None and burst.routes.size:
            self._table["routes"][rows, at - 1] = burst.routes[steps, columns]
        if burst.supports is not None:
            for column in np.flatnonzero(fresh["truncates"]):
                self.sequences[first + column].supports.extend(burst.supports[: burst.counts[column], column])
        fresh["sampled"] += burst.counts

    def ends(
        self, first: int, burst: Burst, eos_ids: frozenset[int], tokenizer: Any
    ) -> tuple[Ints, dict[int, FinishReason]]:
        """How many tokens of `burst` each row keeps; the rows that end with them, and why."""
        states = self.states[first : first + len(burst.counts)]
        left = states["limit"] - states["sampled"]
        counts = np.minimum(burst.counts, left)
        found = dict.fromkeys(np.flatnonzero(burst.counts >= left).tolist(), FinishReason.LENGTH)
        valid = np.arange(len(burst.tokens))[:, None] < counts
        is_eos = (burst.tokens[..., None] == list(eos_ids)).any(-1) & valid
        for column in np.flatnonzero(is_eos.any(0)).tolist():
            counts[column] = is_eos[:, column].argmax() + 1
            found[column] = FinishReason.EOS
        for column in np.flatnonzero(states["has_stop"]).tolist():
            stops, before = self.sequences[first + column].request.sampling.stop, self.tokens(first + column)
            window = max(len(s.encode()) for s in stops) + 1  # a token holds at least one byte
            for count in range(1, int(counts[column]) + (found.get(column) is not FinishReason.EOS)):
                text = tokenizer.decode(np.append(before[-window:], burst.tokens[:count, column])[-window:])
                if any(s in text for s in stops):
                    counts[column], found[column] = count, FinishReason.STOP
                    break
        return counts, {first + column: finish for column, finish in found.items()}

    def youngest(self) -> int:
        return max(range(len(self)), key=lambda row: self.sequences[row].order)

    def overdue(self, now_s: float, max_wall_s: float) -> list[int]:
        """Rows that have decoded for `max_wall_s`, the longest first."""
        # not of an evaluation: its score must not depend on the clock
        decoded_s = np.where(self.states["counted"], now_s - self.states["began_s"], -np.inf)
        rows = np.argsort(-decoded_s, kind="stable")
        return [int(row) for row in rows if decoded_s[row] >= max_wall_s]

    def park(self, row: int, now_s: float) -> RowSequence:
        """The state to resume the row from; the row itself stays until `remove`."""
        sampled = self._table[row, : self.sampled[row]].copy()
        return replace(self.sequences[row], sampled=sampled, decoded_s=now_s - float(self.states["began_s"][row]))

    def parked(self, request: Request, known: Trajectory) -> RowSequence:
        """The parked row of a request that sampled a part of its answer, `known`, elsewhere."""
        start, whole = known.spans[0].start, np.zeros(len(known.token_ids), self.dtype)
        whole["token"], whole["logprob"] = known.token_ids, known.logprobs
        for span in known.spans:
            whole["version"][span.start : span.end] = span.version
        if known.replay is not None and known.replay.routes is not None:
            whole["routes"] = known.replay.routes
        supports = known.replay.supports if known.replay else []
        before = known.token_ids[:start], known.timing.started_s, whole["routes"][:start]
        return RowSequence(request, *before, next(self._orders), supports, whole[start:])

    def resume(self, parked: RowSequence, now_s: float, routes: RouteArray) -> None:
        """Append a parked row, as begun `decoded_s` ago. `routes` are of all its tokens."""
        row, count = len(self), len(parked.sampled)
        self.add(parked.prompt, [parked.request], now_s - parked.decoded_s, parked.prompt_routes)
        self.sequences[row] = replace(parked, sampled=NOTHING)
        if count > self._table.shape[1]:
            self._grow(len(self._all_states), max(GROWTH_TOKENS, 2 * count))
        self._table[row, :count] = parked.sampled
        self._table["routes"][row, :count] = routes[len(parked.prompt) :]
        self.states["sampled"][row] = self.states["learned"][row] = count

    def tokens(self, row: int) -> Ints:
        return self._table["token"][row, : self.sampled[row]]

    def remove(self, row: int) -> None:
        self._table[row, : self.sampled[-1]] = self._table[len(self) - 1, : self.sampled[-1]]
        self.states[row] = self.states[-1]
        self.sequences[row] = self.sequences[-1]
        del self.sequences[-1]

    def _grow(self, num_rows: int, num_tokens: int) -> None:
        """Pages of zeros take no memory until written, so one long sequence costs little."""
        states = np.zeros(num_rows, STATE)
        table = np.zeros((num_rows, num_tokens), self._table.dtype)
        states[: len(self._all_states)] = self._all_states
        for row, count in enumerate(self.sampled):
            table[row, :count] = self._table[row, :count]
        self._all_states, self._table = states, table


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in (0, 1) for each (seed, position): the splitmix64 finaliser over both."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * MIX[2]
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * MIX[0]
        x = (x ^ (x >> np.uint64(27))) * MIX[1]
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def request_seed(*parts: int) -> int:
    """A 64-bit seed from run seed, group serial and sample index; neighbours are unrelated."""
    seed = np.random.SeedSequence(parts).generate_state(2, np.uint32)
    return int(seed[0]) << 32 | int(seed[1])


def prompt_key(prompt: IntArray) -> np.uint64:
    """A hash of the prompt: the same for all its samples, epochs and processes."""
    digest = hashlib.blake2b(prompt.astype(np.int64).tobytes(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _spans(versions: npt.NDArray[np.int32], start: int) -> tuple[Span, ...]:
    """Runs of equal `versions` as spans; the first begins at position `start`."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    runs = [(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    return tuple(Span(version=int(versions[a]), start=start + a, end=start + b) for a, b in runs)

"""The state of the running sequences, one row each, as arrays: a decode step costs no Python per sequence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.rollout.request import Generation, Request
from headrace.rollout.sampling import Sampling
from headrace.types import BoolArray, FinishReason, IntArray, Replay, RouteArray, Span

GROWTH_TOKENS = 64
CONTEXT = 8  # tokens before a sampled one that tell which will be next


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What of a running sequence never changes, and the sampling subsets it collects."""

    request: Request
    prompt: IntArray
    started_s: float
    routes: RouteArray  # of the prompt's tokens
    order: int  # of its start: rows move about
    supports: list[IntArray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Parked:
    """A row without its cache, with everything it sampled; it can go on later as if nothing had happened."""

    sequence: _Sequence
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    routes: RouteArray  # of all tokens but the newest, the prompt's too
    decoded_s: float  # of the stretch it was decoding in

    @property
    def request(self) -> Request:
        """Whose row it is."""
        return self.sequence.request

    @property
    def longest(self) -> int:
        """Tokens the sequence may become."""
        return len(self.sequence.prompt) + self.request.sampling.max_new_tokens

    def generation(self, finish: FinishReason, now_s: float) -> Generation:
        """What its request gets back if it ends here."""
        return Generation(
            id=self.request.id,
            token_ids=self.tokens.astype(np.int32),
            logprobs=self.logprobs,
            spans=_spans(self.versions, len(self.sequence.prompt)),
            finish=finish,
            started_s=self.sequence.started_s,
            finished_s=now_s,
            replay=self._replay(),
        )

    def _replay(self) -> Replay | None:
        supports, routes, ids, offsets = self.sequence.supports, None, None, None
        if supports:
            ids = np.concatenate(supports)
            offsets = np.concatenate([[0], np.cumsum([len(subset) for subset in supports])]).astype(np.int64)
        if self.routes.shape[1]:
            routes = np.concatenate([self.routes, np.zeros_like(self.routes[:1])])
        if ids is None and routes is None:
            return None
        return Replay(support_ids=ids, support_offsets=offsets, routes=routes)


class Rows:
    """Running sequences 0..n-1. Sampled tokens, log-probs and versions lie in `[rows, tokens]` arrays that grow.

    So do the experts of sampled tokens, `[rows, tokens, L, K]`; a dense model has none: its L and K are 0. The experts
    of a token are known one step after it was sampled, when it was computed with.
    """

    def __init__(self, routes_shape: tuple[int, int] = (0, 0), routes_dtype: npt.DTypeLike = np.uint8) -> None:
        self._sequences: list[_Sequence] = []
        self._started = 0  # rows, ever
        self.samplings: list[Sampling] = []
        self._lengths = np.empty(0, np.int64)  # prompt and sampled tokens
        self._sampled = np.empty(0, np.int64)
        self._limits = np.empty(0, np.int64)
        self._seeds = np.empty(0, np.uint64)
        self._temperatures = np.empty(0, np.float32)
        self._counted = np.empty(0, np.bool_)
        self._began_s = np.empty(0, np.float64)  # its present stretch of decoding
        self._families = np.empty(0, np.uint64)
        self._learned = np.empty(0, np.int64)
        self._tails = np.empty((0, CONTEXT), np.int64)  # the prompt's last tokens
        self._tokens = np.empty((0, 0), np.int64)
        self._logprobs = np.empty((0, 0), np.float32)
        self._versions = np.empty((0, 0), np.int32)
        self._routes: RouteArray = np.empty((0, 0, *routes_shape), routes_dtype)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence so far."""
        return self._lengths[: len(self)]

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """Of each request."""
        return self._seeds[: len(self)]

    @property
    def temperatures(self) -> npt.NDArray[np.float32]:
        """Of each request."""
        return self._temperatures[: len(self)]

    @property
    def plain(self) -> bool:
        """Whether every row samples from its whole distribution."""
        return not any(s.truncates for s in set(self.samplings))

    @property
    def counted(self) -> BoolArray:
        """Whether each request's tokens enter the books."""
        return self._counted[: len(self)]

    @property
    def families(self) -> npt.NDArray[np.uint64]:
        """A number for the prompt of each sequence: the same for its siblings, and in every epoch."""
        return self._families[: len(self)]

    @property
    def sampled(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence that were sampled."""
        return self._sampled[: len(self)]

    @property
    def learned(self) -> npt.NDArray[np.int64]:
        """How many of them the drafter has seen; it keeps the count."""
        return self._learned[: len(self)]

    @property
    def left(self) -> npt.NDArray[np.int64]:
        """Tokens that each sequence may still sample."""
        return self._limits[: len(self)] - self.sampled

    @property
    def last_tokens(self) -> npt.NDArray[np.int64]:
        """The newest token of each sequence."""
        rows = np.arange(len(self))
        return self._tokens[rows, self._sampled[rows] - 1]

    @property
    def longest_possible(self) -> int:
        """Tokens of the longest sequence any row may still become."""
        n = len(self)
        return int((self._lengths[:n] - self._sampled[:n] + self._limits[:n]).max()) if n else 0

    def contexts(self, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens `[.., CONTEXT]` that stand before the sampled token `at` of each of the rows."""
        places = at[:, None] + np.arange(-CONTEXT, 0)
        sampled = self._tokens[rows[:, None], np.maximum(places, 0)]
        found: npt.NDArray[np.int64] = np.where(places < 0, self._tails[rows[:, None], np.minimum(places, -1)], sampled)
        return found

    def tokens_at(self, rows: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sampled token `at` of each of the rows."""
        return self._tokens[rows, at]

    def add(self, prompt: IntArray, requests: list[Request], now_s: float, routes: RouteArray) -> None:
        """Append rows for the requests of one prompt, with nothing sampled yet. `routes` are the prompt's."""
        n, more = len(self), len(requests)
        if n + more > len(self._lengths):
            self._grow_rows(max(n + more, 2 * len(self._lengths)))
        self._lengths[n : n + more] = len(prompt)
        self._sampled[n : n + more] = 0
        self._limits[n : n + more] = [r.sampling.max_new_tokens for r in requests]
        self._seeds[n : n + more] = [r.seed for r in requests]
        self._temperatures[n : n + more] = [r.sampling.temperature for r in requests]
        self._counted[n : n + more] = [r.counted for r in requests]
        self._began_s[n : n + more] = now_s
        self._families[n : n + more] = family_number(prompt)
        self._learned[n : n + more] = 0
        self._tails[n : n + more] = before(prompt)[-1]
        self._sequences += [_Sequence(r, prompt, now_s, routes, self._started + i) for i, r in enumerate(requests)]
        self._started += more
        self.samplings += [r.sampling for r in requests]

    def append(
        self,
        rows: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: int,
        supports: npt.NDArray[np.object_] | None,
        routes: RouteArray | None = None,
    ) -> None:
        """One more token for each of these rows. `routes [n, L, K]` are those of the token before it."""
        at = self._sampled[rows]
        if int(at.max()) >= self._tokens.shape[1]:
            self._grow_tokens(max(GROWTH_TOKENS, 2 * self._tokens.shape[1]))
        if routes is not None:
            self._routes[rows, at - 1] = routes
        self._tokens[rows, at] = tokens
        self._logprobs[rows, at] = logprobs
        self._versions[rows, at] = version
        self._sampled[rows] += 1
        self._lengths[rows] += 1
        if supports is not None:
            for row, support in zip(rows, supports, strict=True):
                if self.samplings[row].truncates:
                    self._sequences[row].supports.append(support)

    def done(self, rows: npt.NDArray[np.int64], eos_ids: frozenset[int], tokenizer: Any) -> dict[int, FinishReason]:
        """Those of the rows that end with their newest token, and why."""
        found: dict[int, FinishReason] = {}
        newest = self.last_tokens[rows]
        for row in rows[self._sampled[rows] >= self._limits[rows]]:
            found[int(row)] = FinishReason.LENGTH
        for row in rows[np.isin(newest, list(eos_ids))]:
            found[int(row)] = FinishReason.EOS
        for row in rows:
            if self.samplings[row].stop and int(row) not in found and self._stops(int(row), tokenizer):
                found[int(row)] = FinishReason.STOP
        return found

    def _stops(self, row: int, tokenizer: Any) -> bool:
        """Whether a stop string ends inside the newest token: decode just enough of the tail to see it."""
        stops = self.samplings[row].stop
        sampled = int(self._sampled[row])
        window = max(len(s.encode()) for s in stops) + 1  # a token holds at least one byte
        tail = tokenizer.decode(self._tokens[row, max(0, sampled - window) : sampled])
        return any(s in tail for s in stops)

    def youngest(self) -> int:
        """The row that started last."""
        return max(range(len(self)), key=lambda row: self._sequences[row].order)

    def overdue(self, now_s: float, max_wall_s: float) -> list[int]:
        """The rows that have been decoding for so long, the longest first. A score must not depend on the clock, so
        what is not counted (evaluation) is never among them.
        """
        decoded_s = np.where(self.counted, now_s - self._began_s[: len(self)], -np.inf)
        rows = np.argsort(-decoded_s, kind="stable")
        return [int(row) for row in rows if decoded_s[row] >= max_wall_s]

    def park(self, row: int, now_s: float) -> Parked:
        """The row's state, to be resumed later; the row itself stays until it is removed."""
        count = int(self._sampled[row])
        return Parked(
            self._sequences[row],
            tokens=self._tokens[row, :count].copy(),
            logprobs=self._logprobs[row, :count].copy(),
            versions=self._versions[row, :count].copy(),
            routes=self.routes(row),
            decoded_s=now_s - float(self._began_s[row]),
        )

    def resume(self, parked: Parked, now_s: float, routes: RouteArray) -> None:
        """Append a row that was parked. `routes` are those of all its tokens, now that the newest is computed too.

        Its stretch of decoding goes on where it was: the time since then is not in it.
        """
        row, count = len(self), len(parked.tokens)
        sequence = parked.sequence
        self.add(sequence.prompt, [parked.request], now_s - parked.decoded_s, sequence.routes)
        self._sequences[row] = sequence
        if count >= self._tokens.shape[1]:
            self._grow_tokens(max(GROWTH_TOKENS, 2 * count))
        for table, values in (
            (self._tokens, parked.tokens),
            (self._logprobs, parked.logprobs),
            (self._versions, parked.versions),
            (self._routes, routes[len(sequence.prompt) :]),
        ):
            table[row, :count] = values
        self._sampled[row] = self._learned[row] = count
        self._lengths[row] += count

    def sequence(self, row: int) -> IntArray:
        """Prompt and sampled tokens."""
        sampled = self._tokens[row, : self._sampled[row]].astype(np.int32)
        return np.concatenate([self._sequences[row].prompt, sampled])

    def routes(self, row: int) -> RouteArray:
        """Experts of prompt and sampled tokens, all but the newest."""
        return np.concatenate([self._sequences[row].routes, self._routes[row, : self._sampled[row] - 1]])

    def request_id(self, row: int) -> str:
        """Whose row it is."""
        return self._sequences[row].request.id

    def generation(self, row: int, finish: FinishReason, now_s: float) -> Generation:
        """What the row's request gets back."""
        return self.park(row, now_s).generation(finish, now_s)

    def remove(self, row: int) -> None:
        """Drop a row; the last row moves into its place."""
        last = len(self) - 1
        if row != last:
            arrays: tuple[npt.NDArray[Any], ...] = (
                *(self._lengths, self._sampled, self._began_s, self._limits, self._seeds, self._temperatures),
                *(self._counted, self._families, self._learned, self._tails),
            )
            for array in arrays:
                array[row] = array[last]
            count = int(self._sampled[last])
            for table in (self._tokens, self._logprobs, self._versions, self._routes):
                table[row, :count] = table[last, :count]
        self._sequences[row], self.samplings[row] = self._sequences[last], self.samplings[last]
        del self._sequences[last], self.samplings[last]

    def _grow_rows(self, num_rows: int) -> None:
        def grown(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([array, np.zeros((num_rows - len(array), *array.shape[1:]), array.dtype)])

        self._lengths, self._sampled, self._limits = grown(self._lengths), grown(self._sampled), grown(self._limits)
        self._seeds, self._counted = grown(self._seeds), grown(self._counted)
        self._temperatures, self._began_s = grown(self._temperatures), grown(self._began_s)
        self._families, self._learned, self._tails = grown(self._families), grown(self._learned), grown(self._tails)
        self._tokens, self._logprobs = grown(self._tokens), grown(self._logprobs)
        self._versions, self._routes = grown(self._versions), grown(self._routes)

    def _grow_tokens(self, num_tokens: int) -> None:
        def grown(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            more = np.zeros((len(array), num_tokens - array.shape[1], *array.shape[2:]), array.dtype)
            return np.concatenate([array, more], axis=1)

        self._tokens, self._logprobs = grown(self._tokens), grown(self._logprobs)
        self._versions, self._routes = grown(self._versions), grown(self._routes)


def before(tokens: IntArray) -> npt.NDArray[np.int64]:
    """For each place in a sequence, and the one after its end, the CONTEXT tokens before it `[T + 1, CONTEXT]`."""
    padded = np.concatenate([np.full(CONTEXT, -1), tokens]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(padded, CONTEXT)


def family_number(prompt: IntArray) -> np.uint64:
    """The same for every sample of the prompt, in every epoch and every process."""
    digest = hashlib.blake2b(prompt.astype(np.int64).tobytes(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _spans(versions: npt.NDArray[np.int32], start: int) -> tuple[Span, ...]:
    """Run-length of the versions, as spans that begin at sequence position `start`."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(Span(version=int(versions[a]), start=start + a, end=start + b) for a, b in pairwise(cuts) if b > a)

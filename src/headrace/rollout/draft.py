"""N-gram speculative decoding: drafts of the next tokens, verified in one forward pass.

The noise of a token depends on its position (`uniforms`), so the token sampled there is a fixed
function of the logits. A verifying step computes a row's newest token and its draft, samples after
each of them, and accepts the draft up to the first token that differs. The result is that of
decoding without drafts, token for token.

Drafts come from a hash table of n-grams, built like a branch predictor: from prompt and last tokens
of a sequence to the token that followed them last, and how often in a row it did. The prompt, all
its samples and earlier epochs write to its entries; new entries replace old ones, so the table
never grows. Each sampled token first scores the table's prediction for it, which needs no forward
pass: drafts are made only where the predictions are right often enough to pay.

n rows, T tokens of a verifying step, M sampled tokens to learn from.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.rollout.rows import CONTEXT, MIX, NO_TAIL, Burst, Ints, Keys, Rows, prompt_key
from headrace.types import IntArray

Tags = npt.NDArray[np.uint32]
Doubles = npt.NDArray[np.float64]

ORDERS = (3, CONTEXT)  # n-gram context lengths; the longest that is in the table is used
NUM_SLOTS = 1 << 21
MOST_VERIFIED = 128  # tokens of one verifying step, unless `max_running` is larger
STREAKS = 4  # kinds of entry per order: the token followed 1, 2, 3, or more times in a row
HALF_LIFE_TOKENS = 256  # the weight of a kind's old scores halves after this many new ones
PRIOR_TOKENS = 4  # weight of the prior: that a kind is as good as the next weaker one
IDLE_STEPS = (8, 32)  # until the next try after one without a draft: first, and at most

# When drafts pay. A step of T tokens takes about LEVEL + T units of time: below LEVEL tokens it is
# mostly fixed cost. So n rows sample n / (LEVEL + n) tokens per unit, and with D drafted tokens,
# of which E are expected to be accepted, (n + E) / (LEVEL + n + D). Where the alternative is a
# burst, a verifying step also leaves the GPU idle for SYNC units while the host works. The best D
# is taken if it is better by GAIN. All is measured (docs/results/speculation.md), SYNC with a model
# of 0.6 billion weights; a larger model has longer units, so drafts pay a little earlier.
LEVEL_TOKENS = {"cpu": 32, "cuda": 160}
SYNC_TOKENS = 256
GAIN = 1.15

_WEIGHTS = np.array([((2 * i + 3) * int(MIX[1])) % 2**64 | 1 for i in range(CONTEXT)], np.uint64)


@dataclass(frozen=True)
class Drafts:
    """A draft for each row. Verified are its cells: each row's newest token and its draft."""

    tokens: Ints  # [n, longest]
    counts: Ints  # [n] tokens drafted

    @cached_property
    def cells(self) -> tuple[Ints, Ints]:
        """Row `[T]` of each cell, and its distance from the row's newest token `[T]`."""
        return _cells(self.counts + 1)

    def inputs(self, last_tokens: Ints) -> Ints:
        return np.column_stack([last_tokens, self.tokens])[self.cells]

    def accepted(self, drawn: Burst) -> Burst:
        """What each row sampled, up to and with the first token that differs from its draft."""
        places = np.zeros((len(self.tokens), self.tokens.shape[1] + 1), np.int64)  # in `drawn`
        places[self.cells] = np.arange(len(self.cells[0]))
        right = drawn.tokens[0][places[:, :-1]] == self.tokens
        right &= np.arange(self.tokens.shape[1]) < self.counts[:, None]
        counts = np.cumprod(right, axis=1, dtype=np.int64).sum(axis=1) + 1
        places = places.T[: counts.max()]
        supports = None if drawn.supports is None else drawn.supports[0][places]
        routes = None if drawn.routes is None else drawn.routes[0][places]
        return Burst(drawn.tokens[0][places], drawn.logprobs[0][places], counts, supports, routes)


class Drafter:
    """Learns n-grams from what is sampled, and proposes drafts."""

    def __init__(self, longest: int, max_running: int, device: str) -> None:
        self._longest, self._level = longest, LEVEL_TOKENS[device]
        self._most_tokens = max(max_running, MOST_VERIFIED)
        # `full` writes: memory of `zeros` would only be allocated during the first steps
        self._tags = np.full(NUM_SLOTS, 0, np.uint32)  # of the context in a slot; 0 is empty
        self._tokens = np.full(NUM_SLOTS, 0, np.int32)
        self._streaks = np.full(NUM_SLOTS, 0, np.uint8)
        self._right, self._scored = np.zeros((2, len(ORDERS) * STREAKS))  # by kind of entry, with a half-life
        self._idle_steps, self._pause_steps = 0, IDLE_STEPS[0]

    def read(self, prompt: IntArray) -> None:
        """Learn from a prompt, without scoring: predictions are scored on sampled tokens only."""
        windows = np.lib.stride_tricks.sliding_window_view(np.append(NO_TAIL, prompt), CONTEXT)
        slots, tags = _places(np.full(len(prompt), prompt_key(prompt)), windows[:-1])
        self._write(slots, tags, prompt.astype(np.int64))

    def learn(self, rows: Rows) -> None:
        """Learn from every token that was sampled since the last call."""
        learned = rows.states["learned"]
        if not (fresh := rows.sampled - learned).any():
            return
        which, at = _cells(fresh)
        at += learned[which]
        tokens = rows.contexts(which, at + 1)[:, -1]
        slots, tags = _places(rows.states["prompt_key"][which], rows.contexts(which, at))
        guesses, kinds = self._look_up(slots, tags)
        right, known = (guesses == tokens)[kinds >= 0], kinds[kinds >= 0]
        num_scored = np.bincount(known, minlength=len(self._scored))
        keep = 0.5 ** (num_scored / HALF_LIFE_TOKENS)
        self._scored = self._scored * keep + num_scored
        self._right = self._right * keep + np.bincount(known, weights=right, minlength=len(keep))
        self._write(slots, tags, tokens)
        learned[:] = rows.sampled

    def propose(self, rows: Rows, steps: int) -> Drafts | None:
        """Drafts for the rows, or None where `steps` plain decode steps are faster."""
        self._idle_steps -= steps
        plain = len(rows) / (self._level + len(rows))
        level = self._level + (SYNC_TOKENS if steps > 1 else 0)
        most = min(self._most_tokens, len(rows) * (1 + self._longest))
        if self._idle_steps > 0 or most / (level + most) < plain * GAIN:
            return None
        self.learn(rows)
        tokens, chances = self._guess(rows, max(plain, 0.1))
        if not (counts := self._choose(chances, level, plain * GAIN)).any():
            self._idle_steps = self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, IDLE_STEPS[1])
            return None
        self._pause_steps = IDLE_STEPS[0]
        return Drafts(tokens, counts)

    def _guess(self, rows: Rows, floor: float) -> tuple[Ints, Doubles]:
        """Drafts `[n, longest]`, and the chance that each token and all before it are accepted."""
        # a draft ends where that falls below `floor`, a row's share of a step: no more tokens pay
        tokens = np.zeros((len(rows), self._longest), np.int64)
        chances = np.zeros(tokens.shape)
        rates = np.zeros(len(self._scored) + 1)  # of each kind of entry, weakest first; then 0, for no entry
        for kind, (right, scored) in enumerate(zip(self._right, self._scored, strict=True)):
            weaker = rates[kind - 1] if kind % STREAKS else rates[kind - STREAKS] if kind else 0.0
            rates[kind] = (right + PRIOR_TOKENS * weaker) / (scored + PRIOR_TOKENS)
        if rates.max() <= floor:
            return tokens, chances
        room = rows.states["limit"] - rows.sampled - 1  # one token is sampled after the last draft
        which = np.flatnonzero(room > 0)
        contexts, chance = rows.contexts(which, rows.sampled[which]), np.ones(len(which))
        for depth in range(self._longest):
            guesses, kinds = self._look_up(*_places(rows.states["prompt_key"][which], contexts))
            chance = chance * rates[kinds]
            if not (likely := (chance > floor) & (room[which] > depth)).any():
                break
            which, guesses, chance = which[likely], guesses[likely], chance[likely]
            tokens[which, depth], chances[which, depth] = guesses, chance
            contexts = np.concatenate([contexts[likely, 1:], guesses[:, None]], axis=1)
        return tokens, chances

    def _choose(self, chances: Doubles, level: int, needed: float) -> Ints:
        """Tokens `[n]` of each draft to verify: for most tokens per unit of time, or none."""
        num_rows = len(chances)
        order = np.argsort(-chances, axis=None, kind="stable")[: max(0, self._most_tokens - num_rows)]
        order = order[chances.flat[order] > 0]
        expected = np.append(0.0, chances.flat[order].cumsum())  # accepted tokens of 0, 1, 2 ..
        speeds = (num_rows + expected) / (level + num_rows + np.arange(len(expected)))
        best = int(speeds.argmax())
        # chances fall along a draft and the sort is stable: prefixes of drafts are chosen
        chosen = order[: best if speeds[best] >= needed else 0]
        return np.bincount(chosen // chances.shape[1], minlength=num_rows)

    def _look_up(self, slots: Ints, tags: Tags) -> tuple[Ints, Ints]:
        """The token `[M]` after the longest known context; the kind of entry `[M]`, -1 if none."""
        known = self._tags[slots] == tags
        order = known.shape[0] - 1 - known[::-1].argmax(axis=0)
        slot = slots[order, np.arange(slots.shape[1])]
        kinds = order * STREAKS + np.minimum(self._streaks[slot], STREAKS - 1)
        return self._tokens[slot].astype(np.int64), np.where(known.any(axis=0), kinds, -1)

    def _write(self, slots: Ints, tags: Tags, tokens: Ints) -> None:
        again = (self._tags[slots] == tags) & (self._tokens[slots] == tokens)
        self._streaks[slots] = np.where(again, np.minimum(self._streaks[slots], 254) + 1, 0)
        self._tags[slots], self._tokens[slots] = tags, tokens


def _places(prompt_keys: Keys, contexts: Ints) -> tuple[Ints, Tags]:
    """Slot and tag `[orders, M]` of each context: a hash of `prompt_keys` and the last tokens."""
    parts = (contexts + 1).astype(np.uint64) * _WEIGHTS
    salts = [prompt_keys * _WEIGHTS[i] for i in range(len(ORDERS))]
    sums = np.stack([parts[:, -n:].sum(axis=1) + s for n, s in zip(ORDERS, salts, strict=True)])
    for shift in (32, 29):
        sums = (sums ^ (sums >> np.uint64(shift))) * MIX[0]
    sums ^= sums >> np.uint64(32)
    tags = (sums >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return (sums & np.uint64(NUM_SLOTS - 1)).astype(np.int64), tags


def _cells(counts: Ints) -> tuple[Ints, Ints]:
    """Row of each item and its index in the row, when `counts` items per row are concatenated."""
    which, at = np.nonzero(np.arange(counts.max()) < counts[:, None])
    return which, at

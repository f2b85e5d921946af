"""Guesses at the next tokens of running sequences, so that one forward pass may yield several.

The noise of a token belongs to its position (sampling.py), so what will be drawn there is a fixed function of the
logits. A step computes a row's newest token and a draft of those that may follow, draws after each, and keeps what was
drawn as long as the draft said the same. The result is that of decoding without drafts, token for token.

Drafts come from a table that works like a branch predictor: from the prompt's number and the last tokens of a sequence
to the token that followed them last, and how often in a row it did. Prompt, sampled tokens, siblings and earlier epochs
of a prompt all write to its entries; new ones replace old ones, so the table never grows. Every sampled token is first
used to score what the table would have said, which costs no forward pass: a draft is made only where such guesses have
turned out right often enough to pay.

n rows, T tokens of a verifying step, M sampled tokens to learn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.rollout.rows import CONTEXT, Rows, before, family_number
from headrace.rollout.sampling import MIX
from headrace.types import IntArray

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

ORDERS = (3, CONTEXT)  # tokens of context that an entry stands for; the longest that has one is believed
NUM_SLOTS = 1 << 21
MOST_VERIFIED = 128  # tokens of one step with drafts, unless more sequences than that may run
STREAKS = 4  # kinds of entries of one order: the token followed once, twice, three times, more often in a row
HALF_LIFE_TOKENS = 256  # scores of a kind of entry count half after so many more
DOUBT_TOKENS = 4  # a kind of entry is believed to be like the next weaker one until it has scored more than these
IDLE_STEPS = (8, 32)  # until the next look after one that found nothing: at first, and at most after several

# When drafts pay. A step of T tokens takes about as long as LEVEL + T units: below LEVEL tokens the time is mostly
# that of the step itself. So n rows sample n / (LEVEL + n) tokens per unit, and with D drafts of which E are expected
# to be right (n + E) / (LEVEL + n + D). Where the alternative is a burst of steps without a word to the host, a step
# with drafts also leaves the GPU idle while the host is drafting and judging, WORD units long. The best D is taken if
# it is better by GAIN. All numbers are measured (docs/results/speculation.md), WORD with a model of 0.6 billion
# weights: a larger one has longer units, and drafts pay a little earlier than this says.
LEVEL_TOKENS = {"cpu": 32, "cuda": 160}
WORD_TOKENS = 256
GAIN = 1.15

_WEIGHTS = np.array([((2 * i + 3) * int(MIX[1])) % 2**64 | 1 for i in range(CONTEXT)], np.uint64)


@dataclass(frozen=True)
class Drafts:
    """What may follow in each row; verified in cells: for each row its newest token and its draft.

    Example:
        Drafts(tokens=[[7, 4], [9, 0]], counts=[2, 1])
    """

    tokens: Ints  # [n, longest]
    counts: Ints  # [n] tokens drafted

    @property
    def width(self) -> int:
        """The most cells of a row."""
        return int(self.counts.max()) + 1

    @cached_property
    def cells(self) -> tuple[Ints, Ints]:
        """Row `[T]` of each cell, and how many tokens it is ahead of the row's newest `[T]`."""
        return _ragged(self.counts + 1)

    def inputs(self, last_tokens: Ints) -> Ints:
        """The token `[T]` of each cell."""
        which, ahead = self.cells
        return np.where(ahead == 0, last_tokens[which], self.tokens[which, ahead - 1])

    def num_right(self, drawn_T: Ints) -> Ints:
        """How many tokens `[n]` of each draft are what was drawn, before the first that is not."""
        which, ahead = self.cells
        right = np.zeros((len(self.counts), self.width), np.bool_)
        right[which[:-1], ahead[:-1]] = (ahead[1:] > 0) & (self.tokens[which, ahead - 1][1:] == drawn_T[:-1])
        counts: Ints = np.cumprod(right, axis=1, dtype=np.int64).sum(axis=1)
        return counts


class Drafter:
    """Learns from what is sampled and says what may be next."""

    def __init__(self, *, longest: int, max_running: int, device: str) -> None:
        self._longest, self._level = longest, LEVEL_TOKENS[device]
        self._most_tokens = max(max_running, MOST_VERIFIED)
        self._tags = np.zeros(NUM_SLOTS, np.uint32)  # tells apart the contexts that share a slot; 0 is empty
        self._tokens = np.zeros(NUM_SLOTS, np.int32)
        self._streaks = np.zeros(NUM_SLOTS, np.uint8)
        for table in (self._tags, self._tokens, self._streaks):
            table.fill(0)  # the memory comes now, not in the middle of the first steps
        self._right = np.zeros(len(ORDERS) * STREAKS)  # guesses by kind of entry, older ones counted less
        self._scored = np.zeros(len(ORDERS) * STREAKS)
        self._idle_steps, self._pause_steps = 0, IDLE_STEPS[0]

    def read(self, prompt: IntArray) -> None:
        """Learn from a prompt. It says nothing about how good guesses at sampled tokens are."""
        contexts = before(prompt)[:-1]
        slots, tags = _places(np.full(len(prompt), family_number(prompt)), contexts)
        self._write(slots, tags, prompt.astype(np.int64))

    def learn(self, rows: Rows) -> None:
        """Learn from every token that was sampled since the last call."""
        fresh = rows.sampled - rows.learned
        if not fresh.any():
            return
        which, at = _ragged(fresh)
        at += rows.learned[which]
        tokens = rows.tokens_at(which, at)
        slots, tags = _places(rows.families[which], rows.contexts(which, at))
        guesses, kinds = self._look_up(slots, tags)
        guessed = kinds >= 0
        self._score(kinds[guessed], (guesses == tokens)[guessed])
        self._write(slots, tags, tokens)
        rows.learned[:] = rows.sampled

    def propose(self, rows: Rows, steps: int) -> Drafts | None:
        """Drafts for the rows, where they pay; the alternative is to take so many steps without."""
        self._idle_steps -= steps
        plain = len(rows) / (self._level + len(rows))
        level = self._level + (WORD_TOKENS if steps > 1 else 0)
        most = min(self._most_tokens, len(rows) * (1 + self._longest))
        if self._idle_steps > 0 or most / (level + most) < plain * GAIN:
            return None
        self.learn(rows)
        tokens, chances = self._guess(rows, max(plain, 0.1))
        counts = self._choose(chances, level, plain * GAIN)
        if not counts.any():
            self._idle_steps = self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, IDLE_STEPS[1])
            return None
        self._pause_steps = IDLE_STEPS[0]
        return Drafts(tokens, counts)

    def _guess(self, rows: Rows, floor: float) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Drafts `[n, longest]`, and for each token the chance that it and all before it are right.

        A draft ends where that falls below the floor: a token less likely than a row's share of a step never pays.
        """
        tokens = np.zeros((len(rows), self._longest), np.int64)
        chances = np.zeros(tokens.shape)
        rates = self._rates()
        if rates.max() <= floor:
            return tokens, chances
        room = rows.left - 1  # the token after the last one drafted is drawn too
        which = np.flatnonzero(room > 0)
        contexts, chance = rows.contexts(which, rows.sampled[which]), np.ones(len(which))
        for depth in range(self._longest):
            guesses, kinds = self._look_up(*_places(rows.families[which], contexts))
            chance = chance * rates[kinds]
            likely = (chance > floor) & (room[which] > depth)
            if not likely.any():
                break
            which, guesses, chance = which[likely], guesses[likely], chance[likely]
            tokens[which, depth], chances[which, depth] = guesses, chance
            contexts = np.concatenate([contexts[likely, 1:], guesses[:, None]], axis=1)
        return tokens, chances

    def _rates(self) -> npt.NDArray[np.float64]:
        """How often guesses of each kind were right, from the weakest kind to the strongest; then 0, for no guess."""
        rates = np.zeros((len(ORDERS), STREAKS))
        right, scored = self._right.reshape(rates.shape), self._scored.reshape(rates.shape)
        for order, streak in np.ndindex(rates.shape):
            weaker = rates[order, streak - 1] if streak else rates[order - 1, 0] if order else 0.0
            rates[order, streak] = (right[order, streak] + DOUBT_TOKENS * weaker) / (
                scored[order, streak] + DOUBT_TOKENS
            )
        return np.append(rates, 0.0)

    def _choose(self, chances: npt.NDArray[np.float64], level: int, needed: float) -> Ints:
        """How many tokens `[n]` of each draft to verify: those that make most tokens per unit of time, or none."""
        num_rows = len(chances)
        order = np.argsort(-chances, axis=None, kind="stable")[: max(0, self._most_tokens - num_rows)]
        order = order[chances.flat[order] > 0]
        counts = np.zeros(num_rows, np.int64)
        if len(order):
            drafted = np.arange(1, len(order) + 1)
            speeds = (num_rows + chances.flat[order].cumsum()) / (level + num_rows + drafted)
            best = int(speeds.argmax())
            if speeds[best] >= needed:
                # chances fall along a draft, and equal ones keep their order: a row's first tokens come first
                np.add.at(counts, order[: best + 1] // chances.shape[1], 1)
        return counts

    def _look_up(self, slots: Ints, tags: npt.NDArray[np.uint32]) -> tuple[Ints, Ints]:
        """The token `[M]` that the longest known context speaks for, and the kind of entry `[M]`, -1 for none."""
        known = self._tags[slots] == tags
        order = known.shape[0] - 1 - known[::-1].argmax(axis=0)
        slot = slots[order, np.arange(slots.shape[1])]
        kinds = order * STREAKS + np.minimum(self._streaks[slot], STREAKS - 1)
        return self._tokens[slot].astype(np.int64), np.where(known.any(axis=0), kinds, -1)

    def _write(self, slots: Ints, tags: npt.NDArray[np.uint32], tokens: Ints) -> None:
        again = (self._tags[slots] == tags) & (self._tokens[slots] == tokens)
        self._streaks[slots] = np.where(again, np.minimum(self._streaks[slots], 254) + 1, 0)
        self._tags[slots], self._tokens[slots] = tags, tokens

    def _score(self, kinds: Ints, right: npt.NDArray[np.bool_]) -> None:
        scored = np.bincount(kinds, minlength=len(self._scored))
        keep = 0.5 ** (scored / HALF_LIFE_TOKENS)
        self._scored = self._scored * keep + scored
        self._right = self._right * keep + np.bincount(kinds, weights=right, minlength=len(self._right))


def _places(families: Keys, contexts: Ints) -> tuple[Ints, npt.NDArray[np.uint32]]:
    """Slot and tag `[orders, M]` of each context, by order: a hash of the family and the last tokens."""
    parts = (contexts + 1).astype(np.uint64) * _WEIGHTS
    sums = np.stack([parts[:, -order:].sum(axis=1) + families * _WEIGHTS[i] for i, order in enumerate(ORDERS)])
    for shift in (32, 29):
        sums = (sums ^ (sums >> np.uint64(shift))) * MIX[0]
    sums ^= sums >> np.uint64(32)
    return (sums & np.uint64(NUM_SLOTS - 1)).astype(np.int64), (sums >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Rows of different lengths laid end to end: the row of each place, and its place in the row."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)

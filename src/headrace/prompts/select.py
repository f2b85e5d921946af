"""Which prompt is drawn next, if what is known of the prompts decides it (`prompts.select`).

A group whose rewards are all equal teaches nothing and is dropped. So `signal` draws prompts whose
answers are likely to differ. Prompts are alike if their newest groups went alike; those that were
never drawn are alike, too. How often the next group of such prompts differs is counted as the run
goes on (the mean of a Beta posterior):

    chance = (next groups that differed + PRIOR * guess) / (next groups + PRIOR)

The guess is 1 - p^K - (1 - p)^K for K answers at the solve rate p: what would come if the policy
stood still. The counts tell what it has learnt since; they halve in HALF_LIFE versions. A draw
follows from the seed, its serial and the outcomes so far: a restart reads them in the ledger.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError
from headrace.types import Known, Outcomes
from headrace.user_code import load_function, short_traceback

EXPLORE = 4  # with `signal`, one draw in so many follows the uniform order: every prompt is reached
REST = 64  # draws before a prompt is drawn again by its score; half the prompts, if that is less
NEARLY = 0.9  # with `signal`, scores of this share of the best count as equal
HALF_LIFE = 8.0  # versions
PRIOR = 4.0  # groups
PARTS = 4  # of solve rates: the share of answers beyond the middle of all rewards so far
UNSEEN, UNSOLVED, SOLVED = range(PARTS, PARTS + 3)  # standings of prompts without such a part

Order = Callable[[int], npt.NDArray[np.int64]]  # of an epoch
Floats = npt.NDArray[np.float64]


class Selection:
    """What is known of every prompt, and the draws that follow from it.

    The highest score comes first; of equal ones, what was drawn least often.
    """

    def __init__(self, spec: str, num: int, known: Callable[[], Iterable[Known]], order: Order) -> None:
        self._spec, self._num, self._order = spec, num, order
        self._turn = -np.argsort(order(0))  # of equal ones: from the end, explored last
        self._standing = np.full(num, UNSEEN, np.int64)
        self._guess = np.full(SOLVED + 1, 0.5)
        self._groups, self._differed = np.zeros((2, SOLVED + 1))  # by the standing before them
        self._version, self._low, self._high = 0, np.inf, -np.inf  # of outcomes, and rewards so far
        self._function = None
        if spec != "signal":
            self._function = load_function(spec, "prompts.select", DataError)
            self._known = list(known())
        self._scores = self._score()  # a mistake in a user's function is told before the run
        self.restore([])

    def restore(self, drawn: Sequence[int]) -> None:
        """Continue a run that drew these prompts; the outcomes of all of them are awaited again."""
        self.drawn = list(drawn)  # by serial
        self.awaited = set(range(len(drawn)))  # serials of groups without an outcome so far
        self._num_draws = np.bincount(np.array(drawn, np.int64), minlength=self._num)

    def heed(self, outcomes: Outcomes) -> None:
        """Take in groups that are over."""
        for serial, (version, rewards) in sorted(outcomes.items()):
            i = self.drawn[serial]
            if len(rewards) > 1:
                self._count(i, version, rewards)
            if self._function is not None:
                seen = self._known[i].seen + 1
                self._known[i] = replace(self._known[i], seen=seen, rewards=tuple(rewards), version=version)
        self.awaited -= outcomes.keys()
        if outcomes:
            self._scores = self._score()

    def _count(self, i: int, version: int, rewards: Sequence[float]) -> None:
        kept = 0.5 ** (max(0, version - self._version) / HALF_LIFE)
        self._version = max(version, self._version)
        self._groups, self._differed = self._groups * kept, self._differed * kept
        differed = min(rewards) < max(rewards)
        self._groups[self._standing[i]] += 1
        self._differed[self._standing[i]] += differed
        rates = np.array([*((part + 0.5) / PARTS for part in range(PARTS)), 0.5, 0.0, 1.0])
        self._guess = 1 - rates ** len(rewards) - (1 - rates) ** len(rewards)
        self._guess[UNSEEN] = 0.5
        self._low, self._high = min(self._low, *rewards), max(self._high, *rewards)
        middle = (self._low + self._high) / 2
        solved = sum(reward > middle for reward in rewards)
        self._standing[i] = min(PARTS * solved // len(rewards), PARTS - 1)
        if not differed:
            self._standing[i] = SOLVED if solved or rewards[0] == middle > 0 else UNSOLVED

    def draw(self) -> int:
        """The prompt of the next group."""
        serial = len(self.drawn)
        if self._function is None and serial % EXPLORE == 0:
            epoch, place = divmod(serial // EXPLORE, self._num)
            i = int(self._order(epoch)[place])
        else:
            scores = self._scores.copy()
            scores[self.drawn[max(0, serial - min(REST, self._num // 2)) :]] = -np.inf
            scores[[self.drawn[under_way] for under_way in self.awaited]] = -np.inf
            enough = scores.max() * (NEARLY if self._function is None else 1.0)
            best = np.flatnonzero(scores >= enough)
            i = int(best[np.lexsort((self._turn[best], self._num_draws[best]))[0]])
        self.drawn.append(i)
        self.awaited.add(serial)
        self._num_draws[i] += 1
        return i

    def _score(self) -> Floats:
        if self._function is None:
            return ((self._differed + PRIOR * self._guess) / (self._groups + PRIOR))[self._standing]
        told = f"prompts.select = '{self._spec}'"
        try:
            scores = np.array(list(self._function(tuple(self._known))), np.float64)
        except Exception as error:  # the user's code
            raise DataError(f"{told} failed:\n{short_traceback(error)}") from error
        if scores.shape != (self._num,) or not np.isfinite(scores).all():
            needed = f"a finite number for each of the {self._num} prompts is needed"
            raise DataError(f"{told}: {needed}, and it returned {np.array2string(scores, threshold=4)}")
        return scores

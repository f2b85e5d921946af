"""Which prompt is drawn next, if what is known of the prompts decides it (`prompts.select`).

A group whose rewards are all equal teaches nothing and is dropped. So `signal` draws the prompt
whose answers are likeliest to differ. If the most common reward of a group has the share q of its K
answers, then K new ones differ with the chance 1 - q^K: that is what one group says. The estimate
has three levels, each the prior of the next (the whole run, prompts alike, one prompt):

    chance = (sum over its groups + PRIOR * chance one level up) / (number of groups + PRIOR)

The policy moves, so a group's weight halves in HALF_LIFE versions. A draw follows from the seed,
its serial and the outcomes so far, taken in by serial: a restart reads these from the ledger.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError
from headrace.types import Known, Outcomes
from headrace.user_code import load_function, short_traceback

EXPLORE = 4  # with `signal`, one draw in so many follows the uniform order: every prompt is reached
REST = 128  # draws before a prompt is drawn again by its score; half the prompts, if that is less
NEARLY = 0.75  # of the best chance: these prompts count as equally good
HALF_LIFE = 16.0  # versions
PRIOR = 1.0  # groups that the level above counts for

Floats = npt.NDArray[np.float64]


class Estimate:
    """By prompt, or by kind of prompt: the chance that the rewards of a group differ."""

    def __init__(self, size: int) -> None:
        self._groups, self._sum, self._version = np.zeros((3, size))

    def add(self, i: int, version: int, chance: float) -> None:
        kept = _kept(version - self._version[i])
        self._groups[i] = self._groups[i] * kept + 1
        self._sum[i] = self._sum[i] * kept + chance
        self._version[i] = max(version, self._version[i])

    def at(self, version: int, above: Any) -> Floats:
        """As of `version`; `above` is the estimate one level up."""
        kept = _kept(version - self._version)
        found: Floats = (self._sum * kept + PRIOR * above) / (self._groups * kept + PRIOR)
        return found


def _kept(age: Any) -> Any:
    return 0.5 ** (np.maximum(age, 0) / HALF_LIFE)


def chance_of(rewards: Sequence[float]) -> float:
    """What one group says about the chance that as many answers differ in reward."""
    most_common = max(Counter(rewards).values())
    return float(1 - (most_common / len(rewards)) ** len(rewards))


class Selection:
    """What is known of every prompt, and the draws that follow from it.

    The highest score comes first; of equal ones, what was drawn least often. `kinds` are numbers
    that prompts alike share, and `order(epoch)` is the uniform order.
    """

    def __init__(
        self,
        spec: str,
        kinds: Sequence[int],
        known: Callable[[], Iterable[Known]],
        order: Callable[[int], npt.NDArray[np.int64]],
    ) -> None:
        self._spec, self._kinds, self._order, self._num = spec, np.asarray(kinds), order, len(kinds)
        self._levels = Estimate(1), Estimate(max(kinds) + 1), Estimate(self._num)
        self._turn = -np.argsort(order(0))  # of equal ones: from the end, where exploring comes last
        self._function, self._version = None, 0  # the newest version that an outcome is of
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
            i, self._version = self.drawn[serial], max(self._version, version)
            if len(rewards) > 1:
                for level, key in zip(self._levels, (0, self._kinds[i], i), strict=True):
                    level.add(key, version, chance_of(rewards))
            if self._function is not None:
                new = {"seen": self._known[i].seen + 1, "rewards": tuple(rewards), "version": version}
                self._known[i] = replace(self._known[i], **new)
        self.awaited -= outcomes.keys()
        if outcomes:
            self._scores = self._score()

    def draw(self) -> int:
        """The prompt of the next group."""
        serial = len(self.drawn)
        if self._function is None and serial % EXPLORE == 0:
            epoch, place = divmod(serial // EXPLORE, self._num)
            i = int(self._order(epoch)[place])
        else:
            scores = self._scores.copy()
            scores[self.drawn[max(0, serial - min(REST, self._num // 2)) :]] = -np.inf
            enough = scores.max() * (NEARLY if self._function is None else 1.0)
            best = np.flatnonzero(scores >= enough)
            i = int(best[np.lexsort((self._turn[best], self._num_draws[best]))[0]])
        self.drawn.append(i)
        self.awaited.add(serial)
        self._num_draws[i] += 1
        return i

    def _score(self) -> Floats:
        if self._function is None:
            run, alike, own = self._levels
            above = alike.at(self._version, run.at(self._version, 0.5))
            return own.at(self._version, above[self._kinds])
        told = f"prompts.select = '{self._spec}'"
        try:
            scores = np.array(list(self._function(tuple(self._known))), np.float64)
        except Exception as error:  # the user's code
            raise DataError(f"{told} failed:\n{short_traceback(error)}") from error
        if scores.shape != (self._num,) or not np.isfinite(scores).all():
            needed = f"a finite number for each of the {self._num} prompts is needed"
            raise DataError(f"{told}: {needed}, and it returned {np.array2string(scores, threshold=4)}")
        return scores

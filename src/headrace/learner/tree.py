"""Common prefixes of trajectories, found: each of their tokens is laid out, and computed, once.

A trajectory that branches is a tree by itself (`Trajectory.segments`), and the answers to one prompt
begin alike. Tokens are shared if all tokens before them are, and if they were sent to the same
experts where those were recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.types import Trajectory

Ints = npt.NDArray[np.int64]

LEAST_SHARED = 32  # tokens of a prefix: fewer cost more in pieces of attention than they save
ROOT = (-1, -1)
Place = tuple[int, int]  # a token: its run, and its place there
Piece = tuple[int, int, int]  # a run, the first place there, number of tokens


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens end to end that go on after the token `after`."""

    ids: npt.NDArray[Any]
    routes: npt.NDArray[Any] | None
    after: Place

    @property
    def beginning(self) -> bytes:
        """What roots with LEAST_SHARED tokens in common have in common."""
        experts = b"" if self.routes is None else self.routes[:LEAST_SHARED].tobytes()
        return self.ids[:LEAST_SHARED].tobytes() + experts


class Forest:
    """Trajectories, one added after the other, without what an earlier one has already."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        self.num_tokens = 0  # without repetition
        self._runs: list[_Run] = []
        self._roots: defaultdict[bytes, list[int]] = defaultdict(list)  # by their beginning
        self._branches: defaultdict[tuple[Place, int], list[int]] = defaultdict(list)  # by `after` and first token
        self._pieces: list[Piece] = []  # of all trajectories, in the order of their tokens
        for trajectory in trajectories:
            self.add(trajectory)

    def add(self, trajectory: Trajectory) -> int:
        """Returns a number that trajectories with a common beginning have in common."""
        t, first = trajectory, len(self._pieces)
        routes = None if t.replay is None else t.replay.routes
        for start, end, after in segments(t):
            where = ROOT if after < 0 else self._place(self._pieces[first:], after)
            given = _Run(t.token_ids[start:end], None if routes is None else routes[start:end], where)
            known = list(self._known(given))
            shared = _worth_sharing(known, t.sampled[start:end], at_root=after < 0) if known else 0
            at = 0
            for run, place, count in known:
                if n := min(count, shared - at):
                    self._pieces.append((run, place, n))
                    at, where = at + n, (run, place + n - 1)
            if at:
                given = _Run(given.ids[at:], None if given.routes is None else given.routes[at:], where)
            if len(given.ids):
                self._grow(given)
        return self._root(self._pieces[first][0])

    def laid_out(self) -> tuple[list[int], list[int], Ints, Ints]:
        """Lengths of the runs in depth-first order; the row each goes on after; and rows of tokens.

        Of each row, which token it is; of each token, its row. Tokens count through all trajectories.
        """
        order = self._depth_first()
        lengths = [len(self._runs[i].ids) for i in order]
        starts = np.empty(len(order), np.int64)
        starts[order] = np.cumsum([0, *lengths[:-1]])
        after = [-1 if a == ROOT else int(starts[a[0]]) + a[1] for a in (self._runs[i].after for i in order)]
        runs, places, counts = np.array(self._pieces).T
        begins = np.cumsum(counts) - counts
        numbers = np.arange(begins[-1] + counts[-1])
        rows = numbers + np.repeat(starts[runs] + places - begins, counts)
        tokens = np.empty(self.num_tokens, np.int64)
        tokens[rows[::-1]] = numbers[::-1]  # of several, the first
        return lengths, after, tokens, rows

    def _known(self, given: _Run) -> Iterator[Piece]:
        """What is there already of the tokens of `given`."""
        at, where = 0, given.after
        while at < len(given.ids):
            if where == ROOT:
                nearby = [(run, 0) for run in self._roots.get(given.beginning, ())]
            else:
                nearby = [(run, 0) for run in self._branches.get((where, int(given.ids[at])), ())]
                if where[1] + 1 < len(self._runs[where[0]].ids):
                    nearby.append((where[0], where[1] + 1))
            agreed = [(_agreement(self._runs[run], place, given, at), run, place) for run, place in nearby]
            count, run, place = max(agreed, default=(0, 0, 0), key=lambda found: found[0])
            if not count:
                return
            yield run, place, count
            at, where = at + count, (run, place + count - 1)

    def _grow(self, run: _Run) -> None:
        number = len(self._runs)
        self._runs.append(run)
        self._pieces.append((number, 0, len(run.ids)))
        self.num_tokens += len(run.ids)
        if run.after != ROOT:
            self._branches[run.after, int(run.ids[0])].append(number)
        elif len(run.ids) >= LEAST_SHARED:
            self._roots[run.beginning].append(number)

    def _place(self, pieces: Sequence[Piece], token: int) -> Place:
        """Of a trajectory's token."""
        for run, place, count in pieces:
            if token < count:
                return run, place + token
            token -= count
        raise IndexError(token)

    def _root(self, run: int) -> int:
        while self._runs[run].after != ROOT:
            run = self._runs[run].after[0]
        return run

    def _depth_first(self) -> list[int]:
        """Of the runs that go on after one, those after its last tokens first: what sees a token has no gap."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for i, run in enumerate(self._runs):
            children[run.after[0]].append(i)
        order: list[int] = []
        stack = children[-1][::-1]
        while stack:
            order.append(stack.pop())
            stack += sorted(children[order[-1]], key=lambda i: (self._runs[i].after[1], -i))
        return order


def segments(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """First token, end, and the token that it goes on after (-1: none), of each unbroken part."""
    t, num_tokens = trajectory, len(trajectory.token_ids)
    parts = [(s.start, s.after) for s in t.segments]
    if not parts or parts[0][0] > 0:
        parts = [(0, -1), *parts]
    found = [(a, b, after) for (a, after), (b, _) in pairwise([*parts, (num_tokens, 0)])]
    if any(start >= end or not -1 <= after < start for start, end, after in found):
        raise ValueError(
            f"trajectory {t.id} of {num_tokens} tokens has branches {[(s.start, s.after) for s in t.segments]}: each "
            "must begin behind the one before, and go on after a token before its own (-1: after none)"
        )
    return found


def _agreement(run: _Run, place: int, given: _Run, at: int) -> int:
    """How many of the given tokens from `at` on are those of the run from `place` on."""
    count = min(len(run.ids) - place, len(given.ids) - at)
    same = run.ids[place : place + count] == given.ids[at : at + count]
    if run.routes is not None or given.routes is not None:
        ours, theirs = (None if x is None else x[i : i + count] for x, i in ((run.routes, place), (given.routes, at)))
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return 0
        same &= (ours == theirs).all((1, 2))
    return count if same.all() else int(np.argmin(same))


def _worth_sharing(known: Sequence[Piece], sampled: npt.NDArray[np.bool_], *, at_root: bool) -> int:
    """How many of the tokens that could be shared are: up to a turn's start, or well into a turn."""
    count = sum(n for *_, n in known)
    turns = np.flatnonzero(sampled[1 : count + 1] & ~sampled[:count][: len(sampled) - 1])
    start = int(turns[-1]) + 1 if len(turns) else 0
    count = start if count - start < LEAST_SHARED else count
    return 0 if at_root and count < LEAST_SHARED else count

"""Common prefixes of trajectories, found: each of their tokens is laid out, and computed, once.

A trajectory that branches is a tree by itself (`Trajectory.segments`), and the answers to one prompt
begin alike. Tokens are shared if all tokens before them are, and if they were sent to the same
experts where those were recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.types import Trajectory

Ints = npt.NDArray[np.int64]

LEAST_SHARED = 32  # tokens of a prefix: fewer cost more in pieces of attention than they save
ROOT = (-1, -1)


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens end to end that go on after token `after` (its run, its place there)."""

    ids: npt.NDArray[Any]
    routes: npt.NDArray[Any] | None
    after: tuple[int, int]


class Forest:
    """Trajectories, one added after the other, without what an earlier one has already."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        self.num_tokens = 0  # without repetition
        self._runs: list[_Run] = []
        self._next: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # runs by `after` and first token
        self._places: list[Ints] = []  # [T, 2] of each trajectory: run, and place in it
        for trajectory in trajectories:
            self.add(trajectory)

    def add(self, trajectory: Trajectory) -> int:
        """Returns a number that trajectories with a common beginning have in common."""
        t, places = trajectory, np.empty((len(trajectory.token_ids), 2), np.int64)
        routes = None if t.replay is None else t.replay.routes
        for start, end, after in segments(t):
            where = ROOT if after < 0 else (int(places[after, 0]), int(places[after, 1]))
            ids, experts = t.token_ids[start:end], None if routes is None else routes[start:end]
            known = list(self._known(ids, experts, where))
            shared = _worth_sharing(sum(n for *_, n in known), t.sampled[start:end], at_root=after < 0)
            at = start
            for run, place, count in known:
                n = min(count, shared - (at - start))
                places[at : at + n, 0], places[at : at + n, 1] = run, np.arange(place, place + n)
                at += n
            if at < end:
                where = (int(places[at - 1, 0]), int(places[at - 1, 1])) if at > start else where
                run = self._new_run(_Run(ids[at - start :], None if experts is None else experts[at - start :], where))
                places[at:end, 0], places[at:end, 1] = run, np.arange(end - at)
        self._places.append(places)
        return self._root(int(places[0, 0]))

    def laid_out(self) -> tuple[list[int], list[int], Ints, Ints]:
        """Lengths of the runs in depth-first order; the row each goes on after; and rows of tokens.

        Of each row, which token it is; of each token, its row. Tokens count through all trajectories.
        """
        order = self._depth_first()
        lengths = [len(self._runs[i].ids) for i in order]
        starts = np.empty(len(order), np.int64)
        starts[order] = np.cumsum([0, *lengths[:-1]])
        after = [-1 if a == ROOT else int(starts[a[0]]) + a[1] for a in (self._runs[i].after for i in order)]
        places = np.concatenate(self._places)
        rows = starts[places[:, 0]] + places[:, 1]
        tokens = np.empty(self.num_tokens, np.int64)
        tokens[rows[::-1]] = np.arange(len(rows))[::-1]  # of several, the first
        return lengths, after, tokens, rows

    def _known(
        self, ids: npt.NDArray[Any], routes: npt.NDArray[Any] | None, where: tuple[int, int]
    ) -> Iterator[tuple[int, int, int]]:
        """What is there already of `ids` after the token `where`: runs, places in them, numbers of tokens."""
        at = 0
        while at < len(ids):
            run, place = where
            nearby = [(run, place + 1)] if run >= 0 and place + 1 < len(self._runs[run].ids) else []
            nearby += [(other, 0) for other in self._next.get((run, place, int(ids[at])), ())]
            agreed = [(_agreement(self._runs[r], p, ids, routes, at), r, p) for r, p in nearby]
            count, run, place = max(agreed, default=(0, 0, 0), key=lambda found: found[0])
            if not count:
                return
            yield run, place, count
            at, where = at + count, (run, place + count - 1)

    def _new_run(self, run: _Run) -> int:
        self._runs.append(run)
        self._next[(*run.after, int(run.ids[0]))].append(len(self._runs) - 1)
        self.num_tokens += len(run.ids)
        return len(self._runs) - 1

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
    starts = {0: -1} | {s.start: s.after for s in t.segments}
    bounds = [*starts, num_tokens]
    if any(a >= b for a, b in pairwise(bounds)) or any(not -1 <= after < start for start, after in starts.items()):
        raise ValueError(
            f"trajectory {t.id} of {num_tokens} tokens has branches {[(s.start, s.after) for s in t.segments]}: each "
            "must begin behind the one before, and go on after a token before its own (-1: after none)"
        )
    return [(a, b, starts[a]) for a, b in pairwise(bounds)]


def _agreement(run: _Run, place: int, ids: npt.NDArray[Any], routes: npt.NDArray[Any] | None, at: int) -> int:
    """How many of the tokens from `at` on are those of the run from `place` on."""
    count = min(len(run.ids) - place, len(ids) - at)
    same = run.ids[place : place + count] == ids[at : at + count]
    if run.routes is not None or routes is not None:
        ours, theirs = (None if x is None else x[i : i + count] for x, i in ((run.routes, place), (routes, at)))
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return 0
        same &= (ours == theirs).all((1, 2))
    return count if same.all() else int(np.argmin(same))


def _worth_sharing(count: int, sampled: npt.NDArray[np.bool_], *, at_root: bool) -> int:
    """Of `count` tokens that could be shared, those that are: up to a turn's start, or well into a turn."""
    turns = np.flatnonzero(sampled[1:] & ~sampled[:-1]) + 1
    start = int(turns[turns <= count][-1]) if len(turns) and turns[0] <= count else 0
    count = start if count - start < LEAST_SHARED else count
    return 0 if at_root and count < LEAST_SHARED else count

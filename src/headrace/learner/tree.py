"""Common prefixes of trajectories, found: each of their tokens is laid out, and computed, once.

A trajectory that branches is a tree by itself (`Trajectory.segments`), and the answers to one
prompt begin alike. Tokens are shared if all tokens before them are, and if they were sent to the
same experts where those were recorded. So all paths from a root to the end of a segment are sorted:
then those that begin alike lie together, and each goes on where it parts from the one before it.
"""

from bisect import bisect
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.types import Trajectory

Ints = npt.NDArray[np.int64]

LEAST_SHARED = 32  # tokens of a prefix: fewer cost more in pieces of attention than they save


class _Path(NamedTuple):
    """The tokens from a root to the end of a segment."""

    width: int  # bytes of each token in `key`
    key: bytes
    number: int  # in the order of arrival
    ranges: list[tuple[int, int]]  # of tokens, counted through all trajectories
    sampled: bytes  # of each token, 0 or 1
    forks: bytes  # 1 for a token that a branch goes on after, too: it is shared in any case

    def shared(self, other: "_Path") -> int:
        """How many tokens are: up to the start of a turn or a branch, or well into one."""
        forked = 1 in self.forks[:LEAST_SHARED] or 1 in other.forks[:LEAST_SHARED]
        least = self.width * (1 if forked else LEAST_SHARED)
        if self.width != other.width or self.key[:least] != other.key[:least]:
            return 0
        size = min(len(self.key), len(other.key))
        differ = np.frombuffer(self.key, np.uint8, size) != np.frombuffer(other.key, np.uint8, size)
        first = int(differ.argmax())
        count = (first if differ[first] else size) // self.width
        turn = max(self.sampled.rfind(b"\0\1", 0, count + 1), other.sampled.rfind(b"\0\1", 0, count + 1)) + 1
        branch = max(self.forks.rfind(b"\1", 0, count), other.forks.rfind(b"\1", 0, count)) + 1
        if count - max(turn, branch) >= LEAST_SHARED:
            return count
        return max(turn if turn >= LEAST_SHARED else 0, branch)


class Forest:
    """Trajectories, one added after the other, and how many tokens they have without repetition."""

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        self.num_tokens = 0
        self._num_given = 0  # with repetition
        self._paths = [_Path(0, b"", 0, [], b"", b"")]  # sorted; this one has nothing in common
        self._shared: list[int] = []  # by each with the next
        for trajectory in trajectories:
            self.add(trajectory)

    def add(self, trajectory: Trajectory) -> None:
        t, first, paths = trajectory, self._num_given, paths_of(trajectory)
        key, sampled, forks = key_of(t), t.sampled.tobytes(), bytearray(len(t.sampled))
        width = len(key) // len(sampled)
        for segment in t.segments:
            forks[segment.after] = segment.after >= 0
        for ranges in paths:
            if sampled[ranges[0][0]]:
                raise ValueError(f"trajectory {t.id} begins with a sampled token: there is no prompt before it")
            path = _Path(
                width,
                b"".join(key[a * width : b * width] for a, b in ranges),
                len(self._paths),
                [(first + a, first + b) for a, b in ranges],
                b"".join(sampled[a:b] for a, b in ranges),
                b"".join(forks[a:b] for a, b in ranges),
            )
            place = bisect(self._paths, path)
            self._paths.insert(place, path)
            shared = [b.shared(a) for a, b in pairwise(self._paths[place - 1 : place + 2])]
            self.num_tokens += len(path.sampled) - sum(shared) + sum(self._shared[place - 1 : place])
            self._shared[place - 1 : place] = shared
        self._num_given += len(sampled)

    def laid_out(self) -> tuple[list[int], list[int], Ints, Ints]:
        """Lengths of runs of tokens in depth-first order; the row each goes on after; and rows of tokens.

        Of each row, which token it is; of each token, its row. Tokens count through all
        trajectories.
        """
        trees: list[list[tuple[_Path, int]]] = []
        for path, shared in zip(self._paths[1:], self._shared, strict=True):
            if not shared:
                trees.append([])
            trees[-1].append((path, shared))
        trees.sort(key=lambda tree: min(path.number for path, _ in tree))
        lengths, after = list[int](), list[int]()
        rows, here, start = np.empty(self._num_given, np.int64), np.empty(0, np.int64), 0
        for path, shared in chain.from_iterable(trees):
            end, depth = start + len(path.sampled) - shared, 0
            here = np.concatenate([here[:shared], np.arange(start, end)])
            for a, b in path.ranges:
                rows[a:b] = here[depth : depth + b - a]
                depth += b - a
            if end > start:
                lengths.append(end - start)
                after.append(int(here[shared - 1]) if shared else -1)
            start = end
        tokens = np.empty(start, np.int64)
        tokens[rows] = np.arange(len(rows))
        return lengths, after, tokens, rows


def key_of(t: Trajectory, most: int | None = None) -> bytes:
    """Ids of the tokens, or of the first `most`, each with its experts if those were recorded."""
    ids = t.token_ids[:most]
    if t.replay is None or t.replay.routes is None:
        return ids.tobytes()
    routes = t.replay.routes[:most].reshape(len(ids), -1)
    return np.hstack([ids[:, None].view(np.uint8), routes.view(np.uint8)]).tobytes()


def paths_of(t: Trajectory) -> list[list[tuple[int, int]]]:
    """Ranges of tokens from a root to the end of each segment."""
    num_tokens, branches = len(t.token_ids), [(s.start, s.after) for s in t.segments]
    ordered = all(a < b for a, b in pairwise([start for start, _ in branches] + [num_tokens]))
    if not ordered or any(not -1 <= after < start for start, after in branches):
        how = "each must begin behind the one before, and go on after a token before its own (-1: after none)"
        raise ValueError(f"trajectory {t.id} of {num_tokens} tokens has branches {branches}: {how}")
    return [t.ranges(end - 1) for end in (*(start for start, _ in branches if start), num_tokens)]

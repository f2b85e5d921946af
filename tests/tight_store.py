"""A cache that runs out on a CPU as a GPU's does: counted in pages, by the same bookkeeping, and computed in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headrace.policy.policy import Policy
from headrace.rollout.draft import Drafts
from headrace.rollout.pages import PAGE, PageTables
from headrace.rollout.rows import Burst, Rows
from headrace.rollout.store import Chunk, RowStore
from headrace.types import RouteArray


class TightStore(RowStore):
    """Rows without a limit of their own; pages say how much there is room for. Steps come in bursts, if wanted."""

    def __init__(self, policy: Policy, kv_tokens: int, most_steps: int = 1) -> None:
        super().__init__(policy, 10**9)
        self._most_steps = most_steps
        self.tables = PageTables(kv_tokens)
        self.batches: list[int] = []  # rows of each decode step
        self._staged: dict[int, int] = {}

    def most_rows(self, longest: int) -> int:
        return self.tables.most_rows(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        return self.tables.has_room(num_rows=num_rows, num_prompt=num_prompt, num_requests=num_requests)

    def open(self, num_prompt: int, num_requests: int, kept: Any = None, num_kept: int = 0) -> int | None:
        cache, pages = kept or (None, [])
        row = super().open(num_prompt, num_requests, cache, num_kept)
        shared = pages[: num_kept // PAGE]
        place = None if row is None else self.tables.open(num_prompt, num_requests, shared)
        if row is not None and place is None:
            super().close(row)
        if row is not None and place is not None:
            self._staged[place] = row
        return place

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[Tensor, RouteArray]:
        return super().prefill([replace(c, row=self._staged[c.row]) for c in chunks])

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        self.tables.fork(place, count, num_prompt)
        super().fork(self._staged[place], rows, count, num_prompt, longest)

    def close(self, place: int) -> None:
        self.tables.close(place)
        super().close(self._staged.pop(place))

    def steps(self, rows: Rows, wanted: int) -> int:
        for steps in (min(wanted, self._most_steps), 1) if rows.plain else (1,):
            if self.tables.grow(rows.lengths, steps):
                return steps
        return 0

    def decode(self, rows: Rows, steps: int) -> Burst:
        self.batches.append(len(rows))
        self._assert_held(rows.lengths + steps - 1)
        bursts, ahead = [], rows
        for step in range(steps):
            bursts.append(super().decode(ahead, 1))
            ahead = cast(Rows, _Ahead(rows, step + 1, bursts[-1].tokens[0]))
        fields: dict[str, Any] = {
            name: np.concatenate([getattr(burst, name) for burst in bursts])
            for name in ("tokens", "logprobs", "routes")
        }
        return Burst(counts=np.full(len(rows), steps), supports=bursts[0].supports, **fields)

    def fits(self, rows: Rows, drafts: Drafts) -> bool:
        return self.tables.reach(rows.lengths + drafts.counts + 1)

    def verify(self, rows: Rows, drafts: Drafts) -> Burst:
        self._assert_held(rows.lengths + drafts.counts)
        return super().verify(rows, drafts)

    def keep(self, row: int, num_tokens: int) -> Any:
        return super().keep(row, num_tokens), self.tables.keep(row, num_tokens)

    def drop_kept(self, kept: Any) -> None:
        super().drop_kept(kept[0])
        self.tables.pages.give_back(kept[1])

    def remove(self, row: int, rows: Rows) -> None:
        self.tables.remove(row)
        super().remove(row, rows)

    def _assert_held(self, lengths: npt.NDArray[np.int64]) -> None:
        assert all(len(pages) * PAGE >= length for pages, length in zip(self.tables.rows, lengths, strict=True))


class _Ahead:
    """Rows as a burst sees them after its first steps: nothing is recorded yet."""

    def __init__(self, rows: Rows, steps: int, last_tokens: npt.NDArray[np.int64]) -> None:
        self.lengths, self.last_tokens = rows.lengths + steps, last_tokens
        self.seeds, self.samplings, self.longest_possible = rows.seeds, rows.samplings, rows.longest_possible

    def __len__(self) -> int:
        return len(self.samplings)

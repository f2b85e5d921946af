"""A cache that runs out on a CPU as a GPU's does: counted in pages, by the same bookkeeping, and computed in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headrace.policy.policy import Policy
from headrace.rollout.arena import Chunk
from headrace.rollout.pages import PAGE, PageTables
from headrace.rollout.rows import Rows
from headrace.rollout.store import RowStore
from headrace.types import IntArray, RouteArray


class TightStore(RowStore):
    """Rows without a limit of their own; pages say how much there is room for."""

    def __init__(self, policy: Policy, kv_tokens: int) -> None:
        super().__init__(policy, 10**9)
        self.tables = PageTables(kv_tokens)
        self.batches: list[int] = []  # rows of each decode step
        self._staged: dict[int, int] = {}

    def most_rows(self, longest: int) -> int:
        return self.tables.most_rows(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        return self.tables.has_room(num_rows=num_rows, num_prompt=num_prompt, num_requests=num_requests)

    def open(self, num_prompt: int, num_requests: int) -> int | None:
        row = super().open(num_prompt, num_requests)
        place = None if row is None else self.tables.open(num_prompt, num_requests)
        if row is not None and place is None:
            super().close(row)
        if row is not None and place is not None:
            self._staged[place] = row
        return place

    def prefill(
        self, chunks: Sequence[Chunk], sequences: Sequence[IntArray], known: Sequence[RouteArray | None]
    ) -> tuple[Tensor, RouteArray]:
        return super().prefill([replace(c, row=self._staged[c.row]) for c in chunks], sequences, known)

    def fork(self, place: int, rows: Rows, count: int, num_prompt: int, longest: int) -> None:
        self.tables.fork(place, count, num_prompt)
        super().fork(self._staged[place], rows, count, num_prompt, longest)

    def close(self, place: int) -> None:
        self.tables.close(place)
        super().close(self._staged.pop(place))

    def steps(self, rows: Rows, wanted: int) -> int:
        return int(self.tables.grow(rows.lengths, 1))

    def decode(self, rows: Rows, steps: int) -> Any:
        self.batches.append(len(rows))
        assert all(len(pages) * PAGE >= length for pages, length in zip(self.tables.rows, rows.lengths, strict=True))
        return super().decode(rows, steps)

    def remove(self, row: int, rows: Rows) -> None:
        self.tables.remove(row)
        super().remove(row, rows)

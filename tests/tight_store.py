"""A cache that runs out on a CPU as a GPU's does: counted in pages, by the same bookkeeping, and computed in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from headrace.policy.policy import Policy
from headrace.rollout.pages import PAGE, PageTables
from headrace.rollout.rows import Burst, Ints, Rows
from headrace.rollout.store import Chunk, RowStore
from headrace.types import RouteArray


class TightStore(RowStore):
    """Rows without a limit of their own; pages say how much there is room for. Steps come in bursts, if wanted."""

    def __init__(self, policy: Policy, kv_tokens: int, running: Rows, most_steps: int = 1) -> None:
        super().__init__(policy, 10**9, running)
        self.most_steps = most_steps
        self.tables = PageTables(kv_tokens)
        self.batches: list[int] = []  # rows of each decode step
        self._staged: dict[int, int] = {}

    def most_rows(self, longest: int) -> int:
        return self.tables.most_rows(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        sizes = {"num_rows": num_rows, "longest": longest, "num_prompt": num_prompt, "num_requests": num_requests}
        return self.tables.has_room(**sizes)

    def open(self, num_prompt: int, num_requests: int, kept: Any = None, num_kept: int = 0) -> int | None:
        cache, pages = kept or (None, [])
        row = super().open(num_prompt, num_requests, cache, num_kept)
        place = None if row is None else self.tables.open(num_prompt, num_requests, pages, num_kept)
        if row is not None and place is None:
            super().close(row)
        if row is not None and place is not None:
            self._staged[place] = row
        return place

    def prefill(self, chunks: Sequence[Chunk], of_rows: bool = False) -> tuple[Tensor, RouteArray]:
        return super().prefill([c if of_rows else replace(c, row=self._staged[c.row]) for c in chunks], of_rows)

    def fork(self, place: int, count: int) -> None:
        self.tables.fork(place, count)
        super().fork(self._staged[place], count)

    def close(self, place: int) -> None:
        self.tables.close(place)
        super().close(self._staged.pop(place))

    def grow(self, lengths: Ints, steps: int) -> bool:
        return self.tables.grow(lengths, steps)

    def decode(self, which: Ints, ahead: Ints, tokens: Ints, steps: int) -> Burst:
        self.batches.append(len(self._running))
        for row, length in zip(which, self._running.lengths[which] + ahead + steps - 1, strict=True):
            assert len(self.tables.rows[row]) * PAGE >= length
        bursts: list[Burst] = []
        for step in range(steps):
            bursts.append(super().decode(which, ahead + step, bursts[-1].tokens[0] if bursts else tokens, 1))
        fields: dict[str, Any] = {
            name: np.concatenate([getattr(burst, name) for burst in bursts])
            for name in ("tokens", "logprobs", "routes")
        }
        return Burst(counts=np.full(len(which), steps), supports=bursts[0].supports, **fields)

    def keep(self, row: int, num_tokens: int) -> Any:
        return super().keep(row, num_tokens), self.tables.keep(row, num_tokens)

    def drop_kept(self, kept: Any) -> None:
        super().drop_kept(kept[0])
        self.tables.drop_kept(kept[1])

    def remove(self, row: int) -> None:
        self.tables.remove(row)
        super().remove(row)

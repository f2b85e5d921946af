"""Where a run stands in its prompts, and how a restart takes the same place again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Draw:
    """The `serial`-th draw of a run falls in `epoch` and takes the record at `index`.

    Example:
        Draw(serial=130, epoch=1, index=17)
    """

    serial: int
    epoch: int
    index: int


class Cursor:
    """Draws every record once per epoch, in an order that follows from `(seed, epoch)`.

    Example:
        Cursor(num_prompts=100, seed=0, shuffle=False).next() == Draw(serial=0, epoch=0, index=0)
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise ValueError("a cursor needs at least one prompt")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._serial = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # (epoch, its permutation)

    def next(self) -> Draw:
        """The next record to take."""
        draw = self.at(self._serial)
        self._serial += 1
        return draw

    def at(self, serial: int) -> Draw:
        """What the draw with this serial is or will be; the cursor stays where it is."""
        epoch, position = divmod(serial, self._num_prompts)
        return Draw(serial, epoch, int(self._permutation(epoch)[position]) if self._shuffle else position)

    def state(self) -> dict[str, Any]:
        """Plain JSON. With another `serial` it is the state before that draw."""
        return {
            "serial": self._serial,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """A cursor that continues exactly where `state` was taken."""
        cursor = cls(state["num_prompts"], state["seed"], state["shuffle"])
        cursor._serial = state["serial"]
        return cursor

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts))
        return self._order[1]

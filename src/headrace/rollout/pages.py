"""Who holds which page of the key/value cache. Page 0 belongs to nobody: rows that only fill up a batch write there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Pages:
    """Pages 1..n-1, each with the number of sequences that read it: the samples of a group share their prompt's.

    Example:
        pages = Pages(100); own = pages.take(3); pages.share(own); pages.give_back(own); pages.give_back(own)
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._readers: npt.NDArray[np.int32] = np.zeros(num_pages, np.int32)

    @property
    def num_free(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages with one reader each. Ask `num_free` first."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        self._readers[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more reader for each."""
        assert (self._readers[list(pages)] > 0).all()
        self._readers[list(pages)] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One reader less; a page that nobody reads is free."""
        held = list(pages)
        assert (self._readers[held] > 0).all()
        self._readers[held] -= 1
        self._free += [page for page in held if not self._readers[page]]

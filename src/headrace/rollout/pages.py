"""Which sequence holds which page of the paged KV cache: bookkeeping only, without tensors.

Page 0 belongs to no sequence: rows that pad a batch write there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.rollout.rows import Ints

PAGE = 64  # tokens


class Pages:
    """Pages 1..n-1 with reference counts: the samples of a prompt share its pages."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._readers: npt.NDArray[np.int32] = np.zeros(num_pages, np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reader each. Check `num_free` first."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        self._readers[taken] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        assert (self._readers[pages] > 0).all()
        self._readers[pages] += 1

    def give_back(self, pages: list[int]) -> None:
        """Remove a reader from each page; a page without readers is free."""
        assert (self._readers[pages] > 0).all()
        self._readers[pages] -= 1
        self._free += [page for page in pages if not self._readers[page]]


class PageTables:
    """The pages of every prompt in prefill and of every row, by the methods of a store."""

    def __init__(self, num_tokens: int) -> None:
        self.num_pages = num_pages(num_tokens)
        self.pages = Pages(self.num_pages + 1)
        self.drop_kept = self.pages.give_back
        self.rows: list[list[int]] = []
        # of a prompt; and if its last page is partial, that page and copies of it: one for each row
        self._prompts: dict[int, tuple[list[int], list[int]]] = {}
        self._opened = 0

    def most_rows(self, longest: int) -> int:
        """Rows of `longest` tokens that fit at the same time, with a page to spare."""
        return (self.num_pages - 1) // num_pages(longest)

    def has_room(self, *, num_rows: int, longest: int, num_prompt: int, num_requests: int) -> bool:
        """Room for the prompt, a page for each new row, and one to grow for every row."""
        return self.pages.num_free >= num_pages(num_prompt) + num_requests + num_rows

    def open(self, num_prompt: int, num_requests: int, kept: list[int] | None = None, num_kept: int = 0) -> int | None:
        """Take pages for a prompt and copies of its last, partial page; None if too few are free.

        It begins with `num_kept` tokens of `kept`: full pages are shared, the last one is copied.
        """
        kept, num_full = kept or [], num_kept // PAGE
        num_copies = num_requests - 1 if num_prompt % PAGE else 0
        if self.pages.num_free < (num_own := num_pages(num_prompt) - num_full) + num_copies:
            if not self.rows and not self._prompts:
                told = f"the key/value cache has room for {self.num_pages * PAGE} tokens: raise rollout.kv_tokens"
                raise ConfigError(f"a prompt of {num_prompt} tokens with {num_requests} answers does not fit: {told}")
            return None
        self._opened += 1
        self.pages.share(kept[:num_full])
        pages = [*kept[:num_full], *self.pages.take(num_own)]
        lasts = [pages[-1], *self.pages.take(num_copies)] if num_prompt % PAGE else []
        self._prompts[self._opened] = pages, lasts
        if num_kept % PAGE:
            self.copy_page(kept[num_full], pages[num_full : num_full + 1])
        return self._opened

    def copy_page(self, source: int, targets: list[int]) -> None:
        """A store copies its keys and values here."""

    def keep(self, row: int, num_tokens: int) -> list[int]:
        """The pages with the first tokens of a row that ends, held until they are given back."""
        held = self.rows[row][: num_pages(num_tokens)]
        self.pages.share(held)
        return held

    def fork(self, place: int, count: int) -> None:
        """Append `count` rows that share the prompt's full pages; each has its own last page."""
        # The first row goes on in the prompt's last page: close the prompt, nothing else may write.
        pages, lasts = self._prompts[place]
        for row in range(count):
            self.rows.append([*pages[:-1], *lasts[row : row + 1]] if lasts else [*pages])
            self.pages.share(self.rows[-1])
        if copies := lasts[1:count]:
            self.copy_page(lasts[0], copies)

    def close(self, place: int) -> None:
        """Release the prompt's own hold on its pages."""
        pages, lasts = self._prompts.pop(place)
        self.pages.give_back([*pages, *lasts[1:]])

    def grow(self, lengths: Ints, steps: int) -> bool:
        """Give every row the pages for its next `steps` tokens, or none if too few are free."""
        pairs = zip(lengths + steps, self.rows, strict=True)
        needed = [max(0, num_pages(length) - len(held)) for length, held in pairs]
        if sum(needed) <= self.pages.num_free:
            for held, count in zip(self.rows, needed, strict=True):
                held += self.pages.take(count)
            return True
        if steps == 1 and len(self.rows) == 1 and not self._prompts:
            told = f"key/value cache of {self.num_pages * PAGE} tokens: raise rollout.kv_tokens"
            raise ConfigError(f"an answer, with its prompt {int(lengths[0])} tokens long, fills the whole {told}")
        return False

    def remove(self, row: int) -> None:
        """Give a row's pages back; the last row moves into its place."""
        self.pages.give_back(self.rows[row])
        self.rows[row] = self.rows[-1]
        del self.rows[-1]

    def table(self, rows: Sequence[Sequence[int]] = ()) -> npt.NDArray[np.int32]:
        """The pages `[rows, pages]` of each row, or of each of `rows`, padded with page 0."""
        rows = rows or self.rows
        table = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, held in enumerate(rows):
            table[row, : len(held)] = held
        return table


def num_pages(num_tokens: int) -> int:
    return -(-int(num_tokens) // PAGE)

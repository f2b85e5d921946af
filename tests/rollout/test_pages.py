"""Pages of the cache: each is free or held, and nobody writes to a page that another one reads."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.rollout.pages import PAGE, Pages, PageTables, num_pages


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Copied(PageTables):
    """Notes which page is copied where."""

    source, targets = 0, ()

    def copy_page(self, source: int, targets: list[int]) -> None:
        self.source, self.targets = source, targets


def started(tables: PageTables, num_prompt: int, num_requests: int) -> None:
    place = tables.open(num_prompt, num_requests)
    assert place is not None
    tables.fork(place, num_requests)
    tables.close(place)


def test_a_page_is_free_when_its_last_reader_leaves():
    pages = Pages(5)
    held = pages.take(3)
    assert 0 not in held, "page 0 is for rows that fill up a batch"
    pages.share(held[:2])
    pages.give_back(held)
    assert pages.num_free == 2
    pages.give_back(held[:2])
    assert pages.num_free == 4
    assert sorted(pages.take(4)) == [1, 2, 3, 4]
    with pytest.raises(AssertionError):
        pages.take(1)


def test_a_page_cannot_be_given_back_twice():
    pages = Pages(5)
    held = pages.take(1)
    pages.give_back(held)
    with pytest.raises(AssertionError):
        pages.give_back(held)
    with pytest.raises(AssertionError):
        pages.share(held)


@pytest.mark.parametrize("num_prompt", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 7])
def test_rows_share_full_pages_and_write_to_their_own(num_prompt: int):
    tables = Copied(40 * PAGE)
    started(tables, num_prompt, 4)
    full = num_prompt // PAGE
    assert all(row[:full] == tables.rows[0][:full] for row in tables.rows)
    lasts = [row[full:] for row in tables.rows]
    if num_prompt % PAGE:
        assert sorted(page for last in lasts for page in last) == sorted({tables.source, *tables.targets})
        assert tables.rows[0][-1] == tables.source
        assert len(tables.targets) == 3, "the first row goes on in the prompt's own page"
    else:
        assert lasts == [[]] * 4
    assert tables.grow(lengths(*[num_prompt + 1] * 4), 16)
    written = [page for row in tables.rows for page in row[full:]]
    assert len(set(written)) == len(written)
    for _ in range(4):
        tables.remove(0)
    assert tables.pages.num_free == 40


def test_growing_takes_everything_or_nothing():
    tables = PageTables(6 * PAGE)
    started(tables, PAGE, 1)
    started(tables, 2 * PAGE, 1)
    assert tables.pages.num_free == 3
    assert tables.grow(lengths(PAGE + 1, 2 * PAGE + 1), 1)
    assert [len(row) for row in tables.rows] == [2, 3]
    assert not tables.grow(lengths(2 * PAGE, 3 * PAGE), 1)
    assert [len(row) for row in tables.rows] == [2, 3]
    assert tables.grow(lengths(2 * PAGE - 1, 3 * PAGE), 1)
    assert [len(row) for row in tables.rows] == [2, 4]


def test_a_row_with_pages_to_spare_lends_none_to_another():
    tables = PageTables(6 * PAGE)
    started(tables, PAGE - 4, 1)
    started(tables, PAGE - 4, 1)
    assert tables.grow(lengths(PAGE - 3, PAGE - 3), 16)  # two pages each, of which a shorter look needs only one
    assert not tables.grow(lengths(PAGE - 3, 5 * PAGE - 1), 1)
    assert tables.pages.num_free == 2


def test_the_table_has_the_pages_of_each_row():
    tables = PageTables(10 * PAGE)
    started(tables, PAGE + 1, 1)
    started(tables, 3 * PAGE, 1)
    table = tables.table()
    assert table.shape == (2, 3)
    assert table[0].tolist() == [*tables.rows[0], 0]
    assert table[1].tolist() == tables.rows[1]


def test_removing_a_row_moves_the_last_into_its_place():
    tables = PageTables(20 * PAGE)
    for num_prompt in (PAGE, 2 * PAGE, 3 * PAGE):
        started(tables, num_prompt, 1)
    last = tables.rows[2]
    tables.remove(0)
    assert [len(row) for row in tables.rows] == [3, 2]
    assert tables.rows[0] is last


def test_a_prompt_waits_for_room_and_is_refused_only_if_there_can_never_be_any():
    tables = PageTables(4 * PAGE)
    started(tables, 2 * PAGE, 1)
    assert tables.open(3 * PAGE, 1) is None
    tables.remove(0)
    assert tables.open(3 * PAGE, 1) is not None
    with pytest.raises(ConfigError, match=r"300 tokens .* room for 256 tokens: raise rollout.kv_tokens"):
        PageTables(4 * PAGE).open(300, 1)


@pytest.mark.parametrize("longest", [3, PAGE, PAGE + 1, 5 * PAGE])
@pytest.mark.parametrize("total", [1, 2, 5, 31])
def test_a_group_of_the_largest_size_fits_into_an_empty_cache(longest: int, total: int):
    if num_pages(longest) > total:
        pytest.skip("not even one sequence fits")
    tables = PageTables(total * PAGE)
    count = max(1, tables.most_rows(longest))
    started(tables, longest - 1, count)
    assert tables.grow(lengths(*[longest - 1] * count), 1)


def test_one_row_that_fills_the_cache_is_an_error_but_not_while_a_prompt_can_make_room():
    tables = PageTables(3 * PAGE)
    started(tables, PAGE, 1)
    place = tables.open(2 * PAGE, 1)
    assert place is not None
    assert not tables.grow(lengths(PAGE), 1)
    tables.close(place)
    assert tables.grow(lengths(PAGE), 1)
    assert not tables.grow(lengths(3 * PAGE), 16)
    with pytest.raises(ConfigError, match="192 tokens long, fills the whole key/value cache of 192 tokens"):
        tables.grow(lengths(3 * PAGE), 1)


@pytest.mark.parametrize("num_kept", [PAGE, 2 * PAGE + 5, 3 * PAGE])
def test_a_prompt_shares_what_was_kept_and_copies_the_last_page(num_kept: int):
    tables = Copied(20 * PAGE)
    started(tables, 3 * PAGE + 7, 1)
    kept = tables.keep(0, num_kept)
    tables.remove(0)
    place = tables.open(4 * PAGE, 1, kept, num_kept)
    assert place is not None
    full, pages = num_kept // PAGE, tables._prompts[place][0]
    assert pages[:full] == kept[:full]
    assert not set(pages[full:]) & set(kept)
    if num_kept % PAGE:
        assert (tables.source, list(tables.targets)) == (kept[full], [pages[full]])
    else:
        assert tables.source == 0
    tables.close(place)
    tables.drop_kept(kept)
    assert tables.pages.num_free == 20

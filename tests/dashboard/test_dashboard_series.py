"""Curves: what the page draws is what the rows say, however little is read."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hand_made import row

from headrace.dashboard import books as module
from headrace.dashboard.books import Series, read_series
from headrace.errors import RunError
from headrace.ledger.ledger import Ledger
from headrace.runs.columns import RowColumns


@pytest.fixture
def grow(tmp_path: Path) -> Callable[..., Path]:
    """`grow(5, reward_mean=...)` adds so many rows to a ledger; a function of the step gives each its number."""
    ledger, steps = Ledger.create(tmp_path), 0

    def more(num_rows: int, **given: Callable[[int], float]) -> Path:
        nonlocal steps
        for step in range(steps + 1, steps + num_rows + 1):
            ledger.row(row(step, trained_tokens=step, **{name: of(step) for name, of in given.items()}))
        steps += num_rows
        return tmp_path

    return more


def test_every_step_is_a_point_while_they_are_few(grow: Callable[..., Path]):
    run = grow(5, reward_mean=lambda step: step / 10)
    found = read_series(run, Series())
    assert found.curve("reward_mean") == [(step, step / 10) for step in range(1, 6)]
    assert found.curve("stage_s.rollout") == [(step, 1.5) for step in range(1, 6)]
    assert found.curve("goodput") == [(step, step / 2.0) for step in range(1, 6)]
    assert found.goodput() == 15 / 10.0
    assert found.goodput(2) == 9 / 4.0
    assert found.now("reward_mean") == pytest.approx(0.3)


def test_many_steps_are_averaged_and_keep_their_extremes(grow: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_POINTS", 4)
    run = grow(10, reward_mean=float, lag_max=lambda step: step, ratio_p01=lambda step: 1 / step)
    found = read_series(run, Series())
    assert found.width == 4
    assert found.curve("reward_mean") == [(4, 2.5), (8, 6.5), (10, 9.5)]
    assert found.curve("lag_max") == [(4, 4), (8, 8), (10, 10)]
    assert found.curve("ratio_p01") == [(4, 1 / 4), (8, 1 / 8), (10, 1 / 10)]
    assert found.curve("trained_tokens") == [(4, 2.5), (8, 6.5), (10, 9.5)]
    assert found.curve("wall_s") == [(4, 2.0), (8, 2.0), (10, 2.0)]
    assert found.curve("goodput") == [(4, 1.25), (8, 3.25), (10, 4.75)]


def test_looking_again_gives_what_a_first_look_would(grow: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_POINTS", 8)
    seen = Series()
    for num_rows in (1, 2, 5, 1, 9, 30):  # one bucket, more, a full set, and twice a doubling
        run = grow(num_rows, reward_mean=math.sqrt)
        seen = read_series(run, seen)
        afresh = read_series(run, Series())
        assert seen.width == afresh.width
        assert seen.columns.keys() == afresh.columns.keys()
        for name in ("reward_mean", "lag_max", "stage_s.rollout"):
            assert seen.curve(name) == afresh.curve(name)
    assert read_series(run, seen) is seen


def test_only_new_rows_are_read_again(grow: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    run = grow(50)
    seen = read_series(run, Series())
    asked: list[int] = []

    def read(connection: sqlite3.Connection, *, after_step: int, strict: bool) -> RowColumns:
        asked.append(after_step)
        return RowColumns(connection, after_step=after_step, strict=strict)

    monkeypatch.setattr(module, "RowColumns", read)
    assert read_series(grow(1), seen).last_step == 51
    assert asked == [50]


def test_what_is_not_a_number_is_a_gap(grow: Callable[..., Path]):
    run = grow(3, ratio_mean=lambda step: math.nan if step == 2 else 1.5)
    assert read_series(run, Series()).curve("ratio_mean") == [(1, 1.5), (2, None), (3, 1.5)]


def test_a_damaged_row_is_left_out_and_counted(grow: Callable[..., Path]):
    run = grow(3)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE rows SET data = '{\"step\": 2, ' WHERE step = 2")
    found = read_series(run, Series())
    assert found.num_damaged == 1
    assert found.curve("reward_mean") == [(1, 0.25), (2, None), (3, 0.25)]


def test_a_run_that_took_the_place_of_another_is_read_afresh(grow: Callable[..., Path], tmp_path: Path):
    seen = read_series(grow(5), Series())
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection, connection:
        connection.execute("UPDATE meta SET value = 'later' WHERE key = 'created'")
        connection.execute("UPDATE rows SET data = json_set(data, '$.reward_mean', 7.0)")
    assert read_series(tmp_path, seen).curve("reward_mean") == [(step, 7.0) for step in range(1, 6)]


def test_a_run_without_a_ledger_says_so(tmp_path: Path):
    with pytest.raises(RunError, match="no ledger yet"):
        read_series(tmp_path, Series())

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hand_made import group, group_of, trajectory

from headrace.buffer.buffer import Sieve
from headrace.config import BufferSection
from headrace.errors import ConfigError, HeadraceError
from headrace.types import DropReason, FinishReason, Group


@pytest.fixture
def filter_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setattr("sys.path", list(sys.path))  # loading a file adds its folder

    def write(code: str) -> Path:
        path = tmp_path / "own_filters.py"
        path.write_text(code, encoding="utf-8")
        return path

    return write


def reasons(sieve: Sieve, candidate: Group) -> tuple[list[int], list[tuple[int, str]]]:
    """Indices of the answers that stay, and of those that go with why."""
    kept, dropped = sieve.sift(candidate)
    return [t.index for t in kept.trajectories] if kept else [], [(t.index, str(reason)) for t, reason in dropped]


def test_groups_of_equal_rewards_have_no_signal():
    sieve = Sieve(BufferSection())
    assert reasons(sieve, group(rewards=[0.5, 0.5])) == ([], [(0, "no_signal"), (1, "no_signal")])
    assert reasons(sieve, group(rewards=[0.5, 0.5, 0.25])) == ([0, 1, 2], [])
    keeps_all = Sieve(BufferSection(drop_no_signal=False))
    assert reasons(keeps_all, group(rewards=[0.5, 0.5])) == ([0, 1], [])


def test_overlong_drops_only_the_cut_answers():
    finishes = [FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP, FinishReason.WALL]
    answers = [trajectory(index=i, finish=finish, reward=float(i)) for i, finish in enumerate(finishes)]
    assert reasons(Sieve(BufferSection()), group_of(*answers)) == ([0, 1, 2, 3], [])
    sieve = Sieve(BufferSection(drop_overlong=True))
    assert reasons(sieve, group_of(*answers)) == ([1, 2], [(0, "overlong"), (3, "overlong")])


def test_every_answer_cut_leaves_nothing():
    answers = [trajectory(index=i, finish=FinishReason.LENGTH, reward=float(i)) for i in range(2)]
    kept, dropped = Sieve(BufferSection(drop_overlong=True)).sift(group_of(*answers))
    assert kept is None
    assert [reason for _, reason in dropped] == [DropReason.OVERLONG, DropReason.OVERLONG]


def test_signal_is_looked_for_in_what_is_left():
    """The cut answer was the only different one."""
    cut = trajectory(index=0, finish=FinishReason.LENGTH, reward=0.0)
    rest = [trajectory(index=i, reward=1.0) for i in (1, 2)]
    expected = [(0, "overlong"), (1, "no_signal"), (2, "no_signal")]
    assert reasons(Sieve(BufferSection(drop_overlong=True)), group_of(cut, *rest)) == ([], expected)


def test_own_filter_is_booked_under_its_name(filter_file: Callable[[str], Path]):
    path = filter_file("def not_too_easy(group):\n    return min(t.reward for t in group.trajectories) < 0.5\n")
    sieve = Sieve(BufferSection(filters=(f"{path}:not_too_easy",)))
    assert reasons(sieve, group(rewards=[0.6, 0.9])) == ([], [(0, "filter:not_too_easy"), (1, "filter:not_too_easy")])
    assert reasons(sieve, group(rewards=[0.2, 0.9])) == ([0, 1], [])


def test_the_first_filter_that_objects_gives_the_reason(filter_file: Callable[[str], Path]):
    path = filter_file("def one(group):\n    return False\n\ndef two(group):\n    raise AssertionError('not asked')\n")
    sieve = Sieve(BufferSection(filters=(f"{path}:one", f"{path}:two")))
    assert reasons(sieve, group(rewards=[0.5, 0.5]))[1] == [(0, "filter:one"), (1, "filter:one")]


def test_filter_from_a_module():
    assert reasons(Sieve(BufferSection(filters=("operator:truth",))), group(rewards=[0.2, 0.9])) == ([0, 1], [])


def test_filter_from_a_module_in_the_working_directory(
    filter_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    path = filter_file("def never(group):\n    return False\n")
    monkeypatch.chdir(path.parent)
    monkeypatch.delitem(sys.modules, "own_filters", raising=False)  # another test's
    monkeypatch.syspath_prepend(path.parent)
    sieve = Sieve(BufferSection(filters=("own_filters:never",)))
    assert reasons(sieve, group(rewards=[0.2, 0.9]))[1] == [(0, "filter:never"), (1, "filter:never")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("keep", " = 'keep': expected 'module:function' or 'path/to/file.py:function'"),
        (":keep", " = ':keep': expected 'module:function' or 'path/to/file.py:function'"),
        ("no_such_module:keep", ": there is no module 'no_such_module' (No module named"),
        ("no/such/file.py:keep", ": there is no file "),
        ("math:keep", ": 'math' has no function 'keep'"),
        ("math:pi", ": 'pi' in 'math' is a float, not a function"),
    ],
)
def test_bad_filter_specs(spec: str, message: str):
    with pytest.raises(ConfigError) as caught:
        Sieve(BufferSection(filters=(spec,)))
    assert str(caught.value).startswith(f"buffer.filters{message}")


@pytest.mark.parametrize(("code", "hint"), [("def keep(group:\n", "never closed"), ("1 / 0\n", "division by zero")])
def test_filter_file_that_cannot_be_imported(filter_file: Callable[[str], Path], code: str, hint: str):
    path = filter_file(code)
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        Sieve(BufferSection(filters=(f"{path}:keep",)))
    assert hint in str(caught.value)


def test_a_filter_file_may_import_its_neighbour(filter_file: Callable[[str], Path]):
    path = filter_file("from beside_filters import LIMIT\n\ndef low(group):\n    return LIMIT > 1\n")
    (path.parent / "beside_filters.py").write_text("LIMIT = 0.5\n")
    sieve = Sieve(BufferSection(filters=(f"{path}:low",)))
    assert reasons(sieve, group(rewards=[0.2, 0.9]))[1] == [(0, "filter:low"), (1, "filter:low")]


def test_an_async_filter_is_refused(filter_file: Callable[[str], Path]):
    path = filter_file("async def never(group):\n    return False\n")
    with pytest.raises(ConfigError, match=r"buffer\.filters: .* is an async function"):
        Sieve(BufferSection(filters=(f"{path}:never",)))


def test_a_filter_that_exits_does_not_end_the_process(filter_file: Callable[[str], Path]):
    path = filter_file("def leave(group):\n    raise SystemExit(1)\n")
    with pytest.raises(HeadraceError, match="the filter 'leave' failed on prompt"):
        Sieve(BufferSection(filters=(f"{path}:leave",))).sift(group(rewards=[0.2, 0.9]))

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hand_made import group, group_of, trajectory

from headrace.buffer.buffer import Sieve
from headrace.config import BufferSection, RewardSection
from headrace.errors import ConfigError
from headrace.reward.scorer import Scorer
from headrace.types import DropReason, FinishReason, Group, Turn

WriteFilters = Callable[[str], Path]


@pytest.fixture
def filter_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteFilters:
    monkeypatch.setattr("sys.path", list(sys.path))  # loading a file adds its folder

    def write(code: str) -> Path:
        path = tmp_path / "own_filters.py"
        path.write_text(code, encoding="utf-8")
        return path

    return write


def reasons(sieve: Sieve, candidate: Group, refusal: str | None = None) -> tuple[list[int], list[tuple[int, str]]]:
    """Indices of the answers that stay, and of those that go with why."""
    kept, dropped = sieve.sift(candidate, refusal)
    return [t.index for t in kept.trajectories] if kept else [], [(t.index, str(reason)) for t, reason in dropped]


@asynccontextmanager
async def filters(*specs: str, workers: int = 0, **reward: Any) -> AsyncIterator[Sieve]:
    """A sieve with filters of the user, in this process or in their own."""
    section = RewardSection(workers=workers, function="exact", **reward)
    scorer = Scorer(section, max_new_tokens=10, filters=specs)
    await scorer.start()
    try:
        yield Sieve(BufferSection(filters=specs), scorer.keeps)
    finally:
        await scorer.close()


async def verdicts(
    *groups: Group, specs: Sequence[str], workers: int = 0, **reward: Any
) -> list[list[tuple[int, str]]]:
    """What is dropped of each group, and why."""
    async with filters(*specs, workers=workers, **reward) as sieve:
        return [reasons(sieve, each, (await sieve.filtered(each))[1])[1] for each in groups]


def test_groups_of_equal_rewards_have_no_signal():
    sieve = Sieve(BufferSection())
    assert reasons(sieve, group(rewards=[0.5, 0.5])) == ([], [(0, "no_signal"), (1, "no_signal")])
    assert reasons(sieve, group(rewards=[0.5, 0.5, 0.25])) == ([0, 1, 2], [])
    keeps_all = Sieve(BufferSection(drop="nothing"))
    assert reasons(keeps_all, group(rewards=[0.5, 0.5])) == ([0, 1], [])


def test_overlong_drops_only_the_cut_answers():
    finishes = [FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP, FinishReason.WALL]
    answers = [trajectory(index=i, finish=finish, reward=float(i)) for i, finish in enumerate(finishes)]
    assert reasons(Sieve(BufferSection()), group_of(*answers)) == ([0, 1, 2, 3], [])
    sieve = Sieve(BufferSection(drop="no_signal,overlong"))
    assert reasons(sieve, group_of(*answers)) == ([1, 2], [(0, "overlong"), (3, "overlong")])


def test_every_answer_cut_leaves_nothing():
    answers = [trajectory(index=i, finish=FinishReason.LENGTH, reward=float(i)) for i in range(2)]
    kept, dropped = Sieve(BufferSection(drop="no_signal,overlong")).sift(group_of(*answers))
    assert kept is None
    assert [reason for _, reason in dropped] == [DropReason.OVERLONG, DropReason.OVERLONG]


def test_signal_is_looked_for_in_what_is_left():
    """The cut answer was the only different one."""
    cut = trajectory(index=0, finish=FinishReason.LENGTH, reward=0.0)
    rest = [trajectory(index=i, reward=1.0) for i in (1, 2)]
    expected = [(0, "overlong"), (1, "no_signal"), (2, "no_signal")]
    assert reasons(Sieve(BufferSection(drop="no_signal,overlong")), group_of(cut, *rest)) == ([], expected)


IN_BOTH = pytest.mark.parametrize("workers", [0, 1])


@IN_BOTH
async def test_own_filter_is_booked_under_its_name(filter_file: WriteFilters, workers: int):
    path = filter_file("def not_too_easy(group):\n    return min(t.reward for t in group.trajectories) < 0.5\n")
    asked = group(rewards=[0.6, 0.9]), group(rewards=[0.2, 0.9])
    dropped = await verdicts(*asked, specs=[f"{path}:not_too_easy"], workers=workers)
    assert dropped == [[(0, "filter:not_too_easy"), (1, "filter:not_too_easy")], []]


@IN_BOTH
async def test_a_filter_sees_the_whole_group(filter_file: WriteFilters, workers: int):
    asked = group(3, rewards=[0.25, 0.75], version=2)
    asked = replace(asked, prompt=replace(asked.prompt, fields=MappingProxyType({"level": 7})))
    path = filter_file(
        "import numpy\nfrom headrace.types import Group\n"
        "def same(group):\n    assert isinstance(group, Group)\n"
        "    assert (group.serial, group.version, group.prompt.fields) == (3, 2, {'level': 7})\n"
        "    assert [t.reward for t in group.trajectories] == [0.25, 0.75]\n"
        f"    return numpy.array_equal(group.trajectories[1].token_ids, {asked.trajectories[1].token_ids.tolist()})\n"
    )
    assert await verdicts(asked, specs=[f"{path}:same"], workers=workers) == [[]]


async def test_the_first_filter_that_objects_gives_the_reason(filter_file: WriteFilters):
    path = filter_file("def one(group):\n    return False\n\ndef two(group):\n    raise AssertionError('not asked')\n")
    dropped = await verdicts(group(rewards=[0.5, 0.5]), specs=[f"{path}:one", f"{path}:two"])
    assert dropped == [[(0, "filter:one"), (1, "filter:one")]]


async def test_filters_are_not_asked_about_cut_answers(filter_file: WriteFilters):
    path = filter_file("def one(group):\n    return len(group.trajectories) == 1\n")
    scorer = Scorer(RewardSection(workers=0, function="exact"), max_new_tokens=10, filters=[f"{path}:one"])
    await scorer.start()
    sieve = Sieve(BufferSection(filters=(f"{path}:one",), drop="no_signal,overlong"), scorer.keeps)
    cut = [trajectory(index=i, finish=FinishReason.LENGTH, reward=float(i)) for i in range(2)]
    assert (await sieve.filtered(group_of(*cut)))[1] is None
    kept, refusal = await sieve.filtered(group_of(*cut, trajectory(index=2)))
    assert ([t.index for t in kept.trajectories], refusal) == ([2, 0, 1], None)
    assert (await sieve.filtered(group_of(*cut, trajectory(index=2), trajectory(index=3))))[1] == "filter:one"


RANKING = """
import numpy as np

def by_length(group):
    rank = np.argsort(np.argsort([len(t.text) for t in group.trajectories]))
    return rank / (len(rank) - 1) - 0.5

def mixed(group):
    return min(t.reward for t in group.trajectories) < 0.5

def few(group):
    return [1.0]

def none(group):
    return (1.0, None)

def named(group):
    return {0: 1.0, 1: 0.0}

def of_turns(group):
    return [[0.5] * 2, (0.25, -1.0), 3.0]

def turnless(group):
    return [[0.5, 0.5], 1.0]
"""


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_function_over_a_group_adds_to_the_rewards_of_its_answers(filter_file: WriteFilters, workers: int):
    path = filter_file(RANKING)
    found = (trajectory(index=i, reward=1.0) for i in range(3))
    answers = [replace(t, text="x" * n, reward_parts={"right": 1.0}) for t, n in zip(found, (9, 2, 5), strict=True)]
    async with filters(f"{path}:by_length", f"{path}:mixed", workers=workers) as sieve:
        dropped, refusal = await sieve.filtered(group_of(*answers))
        assert refusal == "filter:mixed", "the next one sees them: 1.5, 0.5 and 1.0"
        assert [t.reward for t in dropped.trajectories] == [1.0] * 3, "what is dropped stays as it was"
    async with filters(f"{path}:by_length", workers=workers) as sieve:
        ranked, refusal = await sieve.filtered(group_of(*answers))
        assert [(t.index, t.reward) for t in ranked.trajectories] == [(0, 1.5), (1, 0.5), (2, 1.0)]
        assert ranked.trajectories[1].reward_parts == {"right": 1.0, "by_length": -0.5}
        assert refusal is None
        assert reasons(sieve, ranked, refusal)[1] == [], "ranks are a signal where rewards are equal"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("few", "'few' returned 1 rewards for 2 answers"),
        ("none", "not a finite number"),
        ("named", "'named' returned a dict; rewards of a group are a list"),
        ("turnless", "'turnless' returned 2 rewards for an answer of 0 turns"),
    ],
)
async def test_rewards_of_a_group_that_do_not_fit_it_are_an_error(filter_file: WriteFilters, name: str, told: str):
    async with filters(f"{filter_file(RANKING)}:{name}", workers=0) as sieve:
        assert (await sieve.filtered(group(1)))[1] == "filter_error"
        assert told in sieve.first_error


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_function_over_a_group_adds_to_the_rewards_of_turns(filter_file: WriteFilters, workers: int):
    turns = tuple(Turn(start=2 + k, end=3 + k, finish=FinishReason.EOS, reward=own) for k, own in enumerate([None, 2]))
    answers = [replace(trajectory(index=i, answer=(7, 8), reward=1.0), turns=turns) for i in (2, 0, 1)]
    async with filters(f"{filter_file(RANKING)}:of_turns", workers=workers) as sieve:
        ranked, _ = await sieve.filtered(group_of(*answers))
    found = {
        t.index: (t.reward, t.reward_parts["of_turns"], *(turn.reward for turn in t.turns)) for t in ranked.trajectories
    }
    assert found == {2: (2.0, 1.0, 0.5, 2.5), 0: (0.25, -0.75, 0.25, 1.0), 1: (4.0, 3.0, None, 2)}


async def test_a_filter_sees_groups_one_after_the_other(filter_file: WriteFilters):
    """A filter may keep something in mind, as it would in this process."""
    path = filter_file("seen = []\ndef new(group):\n    seen.append(group.serial)\n    return len(seen) % 2\n")
    async with filters(f"{path}:new", workers=2) as sieve:
        asked = [sieve.filtered(group(serial)) for serial in range(8)]
        assert [refusal for _, refusal in await asyncio.gather(*asked)] == [None, "filter:new"] * 4


async def test_filter_from_a_module():
    assert await verdicts(group(rewards=[0.2, 0.9]), specs=["operator:truth"]) == [[]]


@IN_BOTH
async def test_filter_from_a_module_in_the_working_directory(
    filter_file: WriteFilters, monkeypatch: pytest.MonkeyPatch, workers: int
):
    path = filter_file("def never(group):\n    return False\n")
    monkeypatch.chdir(path.parent)
    monkeypatch.delitem(sys.modules, "own_filters", raising=False)  # another test's
    monkeypatch.syspath_prepend(path.parent)
    dropped = await verdicts(group(rewards=[0.2, 0.9]), specs=["own_filters:never"], workers=workers)
    assert dropped == [[(0, "filter:never"), (1, "filter:never")]]


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
@IN_BOTH
async def test_bad_filter_specs(spec: str, message: str, workers: int):
    with pytest.raises(ConfigError) as caught:
        await verdicts(specs=[spec], workers=workers)
    assert str(caught.value).startswith(f"buffer.filters{message}")


@pytest.mark.parametrize(("code", "hint"), [("def keep(group:\n", "never closed"), ("1 / 0\n", "division by zero")])
async def test_filter_file_that_cannot_be_imported(filter_file: WriteFilters, code: str, hint: str):
    path = filter_file(code)
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        await verdicts(specs=[f"{path}:keep"])
    assert hint in str(caught.value)


async def test_a_filter_file_may_import_its_neighbour(filter_file: WriteFilters):
    path = filter_file("from beside_filters import LIMIT\n\ndef low(group):\n    return LIMIT > 1\n")
    (path.parent / "beside_filters.py").write_text("LIMIT = 0.5\n")
    dropped = await verdicts(group(rewards=[0.2, 0.9]), specs=[f"{path}:low"])
    assert dropped == [[(0, "filter:low"), (1, "filter:low")]]


@IN_BOTH
async def test_an_async_filter_is_refused(filter_file: WriteFilters, workers: int):
    path = filter_file("async def never(group):\n    return False\n")
    with pytest.raises(ConfigError, match=r"buffer\.filters: .* is an async function"):
        await verdicts(specs=[f"{path}:never"], workers=workers)


MISBEHAVING = """
import os, time
def moody(group):
    match group.serial:
        case 0: raise SystemExit(1)
        case 1: 1 / 0
        case 2: os._exit(3)
        case 3: time.sleep(600)
    return True
"""


@pytest.mark.parametrize(
    ("workers", "hints"),
    [(0, ["SystemExit", "ZeroDivisionError"]), (1, ["SystemExit", "Zero", "exit code 3", "in 0.5 s"])],
)
async def test_a_filter_that_fails_is_an_error_of_its_group(filter_file: WriteFilters, workers: int, hints: list[str]):
    path = filter_file(MISBEHAVING)
    for serial, hint in enumerate(hints):
        async with filters(f"{path}:moody", workers=workers, timeout_s=0.5, retries=0) as sieve:
            _, refusal = await asyncio.wait_for(sieve.filtered(group(serial)), 30)
            assert reasons(sieve, group(serial), refusal)[1] == [(0, "filter_error"), (1, "filter_error")]
            assert sieve.first_error.startswith(f"the filter 'moody' failed on prompt 'p{serial}': ")
            assert hint in sieve.first_error
            assert (await sieve.filtered(group(9)))[1] is None, "the next group is asked about"

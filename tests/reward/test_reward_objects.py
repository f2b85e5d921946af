"""Reward functions that are Python objects, not names in the settings."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_completions import completion

from headrace.config import RewardSection
from headrace.errors import RewardError
from headrace.reward.scorer import Scorer
from headrace.types import Completion, Score


def where(answer: Completion) -> float:
    return os.getpid()


async def later(answer: Completion) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"where": os.getpid()}


def batch(completions: list[Completion]) -> list[float]:
    return [os.getpid() for _ in completions]


class Scaled:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, answer: Completion) -> float:
        return self.by * os.getpid()


class Secretive(Scaled):
    def __reduce__(self) -> Any:
        return (unpickled_only_here, (os.getpid(),))


def unpickled_only_here(pid: int) -> Secretive:
    assert pid == os.getpid(), "not here"
    return Secretive(1.0)


def two(answer: Completion, other: int) -> float:
    return 0.0


async def judged(
    function: Callable[[Any], Any], told: list[str] | None = None, *, workers: int = 1
) -> tuple[list[Score], Scorer]:
    section = RewardSection(workers=workers, function="exact")
    note = [].append if told is None else told.append
    scorer = Scorer(section, max_new_tokens=10, function=function, on_note=note)
    await scorer.start()
    try:
        return [await scorer.score(completion("a")), await scorer.score(completion("b"))], scorer
    finally:
        await scorer.close()


@pytest.mark.parametrize("function", [where, later, batch, Scaled(1.0), functools.partial(where)])
async def test_what_can_be_pickled_is_judged_in_child_processes(function: Callable[[Any], Any]) -> None:
    told: list[str] = []
    scores, _ = await judged(function, told)
    assert scores[0].reward == scores[1].reward
    assert scores[0].reward not in (None, os.getpid())
    assert told == []


@pytest.mark.parametrize(
    ("function", "why"),
    [(lambda answer: os.getpid(), "cannot be pickled"), (Secretive(1.0), "cannot be unpickled.*not here")],
)
async def test_what_cannot_be_pickled_is_judged_here_and_a_note_says_so(
    function: Callable[[Any], Any], why: str
) -> None:
    told: list[str] = []
    scores, _ = await judged(function, told)
    assert [score.reward for score in scores] == [os.getpid()] * 2
    (note,) = told
    assert re.search(f"is called in this process, not in one of its own: .*{why}", note)


@pytest.mark.parametrize("function", [where, later, batch, lambda answer: os.getpid()])
async def test_without_workers_it_is_judged_here(function: Callable[[Any], Any]) -> None:
    told: list[str] = []
    scores, scorer = await judged(function, told, workers=0)
    assert [score.reward for score in scores] == [os.getpid()] * 2
    assert scorer.function == function.__name__
    assert told == []


def test_wrong_parameters_are_told_before_anything_starts() -> None:
    with pytest.raises(RewardError, match="'two' has the wrong parameters"):
        Scorer(RewardSection(), max_new_tokens=10, function=two)


async def test_verdicts_are_kept_for_the_same_object_only() -> None:
    def keys_of(function: Callable[[Any], Any]) -> list[bytes]:
        async def collect() -> list[bytes]:
            keys: list[bytes] = []
            section = RewardSection(workers=0)
            scorer = Scorer(section, max_new_tokens=9, function=function, on_verdict=lambda key, _: keys.append(key))
            await scorer.start()
            await scorer.score(completion("a"))
            await scorer.close()
            return keys

        return asyncio.run(collect())

    def keys(function: Callable[[Any], Any]) -> asyncio.Future[list[bytes]]:
        return asyncio.get_running_loop().run_in_executor(None, keys_of, function)

    assert await keys(Scaled(1.0)) == await keys(Scaled(1.0)) != await keys(Scaled(2.0))
    same = lambda answer: 1.0  # noqa: E731
    assert await keys(same) != await keys(same), "nobody knows what it depends on"


SCRIPT = """
import asyncio, os
from headrace.config import RewardSection
from headrace.reward.scorer import Scorer
from headrace.types import Completion

def score(completion):
    return float(os.getpid())

async def main():
    scorer = Scorer(RewardSection(), max_new_tokens=9, function=score, on_note=print)
    await scorer.start()
    found = await scorer.score(Completion(prompt="", text="", fields={{}}, num_tokens=1, finish="eos"))
    await scorer.close()
    print("here" if found.reward == os.getpid() else "there")

{guard}
asyncio.run(main())
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_function_of_the_main_script(tmp_path: Path, guarded: bool) -> None:
    text = SCRIPT.format(guard="if __name__ == '__main__':" if guarded else "")
    text = text.replace("\nasyncio.run", "\n    asyncio.run") if guarded else text
    (tmp_path / "training.py").write_text(text)
    done = subprocess.run([sys.executable, "training.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *notes, last = done.stdout.splitlines()
    assert last == ("there" if guarded else "here")
    assert len(notes) == (0 if guarded else 1)
    assert guarded or "__name__ == '__main__'" in notes[0]


def test_a_function_that_is_typed_at_a_prompt(tmp_path: Path) -> None:
    code = SCRIPT.format(guard="")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    note, last = done.stdout.splitlines()
    assert last == "here"
    assert "in no file that could be imported" in note

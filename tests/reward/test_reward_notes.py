"""Trouble with rewards is told while it happens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from reward_completions import completion

from headrace.config import RewardSection
from headrace.reward.scorer import REPLACED, Scorer, TroubleNotes
from headrace.types import DropReason

FUNCTIONS = """
import time
from headrace import UnavailableError

def sleeps(completion):
    time.sleep(60 if completion.text == "slow" else 0)
    if completion.text == "away":
        raise UnavailableError("the judge is not there")
    return float(completion.text)
"""


@pytest.fixture
def told(tmp_path: Path) -> list[str]:
    (tmp_path / "sleeping.py").write_text(FUNCTIONS)
    return []


async def test_a_verdict_that_times_out_is_told_at_once_and_the_rest_later(tmp_path: Path, told: list[str]) -> None:
    section = RewardSection(function=f"{tmp_path}/sleeping.py:sleeps", timeout_s=0.5, retries=0, cache=False)
    scorer = Scorer(section, max_new_tokens=10, on_note=told.append)
    await scorer.start()
    assert (await scorer.score(completion("1"))).reward == 1.0
    assert told == []
    await scorer.score(completion("slow"))
    timed_out = "1 verdict timed out after 0.5 s (reward.timeout_s), 1 worker process replaced"
    assert told == [f"{timed_out}; the first: no verdict in 0.5 s"]
    for text in ("slow", "away", "no number", "also none"):
        await scorer.score(completion(text))
    assert len(told) == 1, "not so soon after the first"
    await scorer.close()
    others = "1 verdict could not be had: a service was unavailable, 2 verdicts failed"
    assert told[1:] == [f"{timed_out}, {others}; the first: no verdict in 0.5 s"]


async def test_an_error_is_told_with_its_place(tmp_path: Path, told: list[str]) -> None:
    section = RewardSection(function=f"{tmp_path}/sleeping.py:sleeps", workers=0)
    scorer = Scorer(section, max_new_tokens=10, on_note=told.append)
    await scorer.start()
    for text in ("x", "y", "z"):
        await scorer.score(completion(text))
    assert re.match(r"1 verdict failed: Traceback(?s:.)*sleeping.py(?s:.)*could not convert", told[0])
    await scorer.close()
    assert told[1:] == ["2 verdicts failed; the first: ValueError: could not convert string to float: 'y'"]


async def test_a_worker_that_is_replaced_is_told_even_if_the_second_try_succeeds(rewards: str) -> None:
    told: list[str] = []
    scorer = Scorer(RewardSection(function=f"{rewards}:score"), max_new_tokens=10, on_note=told.append)
    await scorer.start()
    assert (await scorer.score(completion("abc", do="exit-once"))).reward == 3.0
    await scorer.close()
    assert told == ["1 worker process replaced"]


async def test_after_a_quiet_while_the_next_trouble_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reward.scorer.NOTE_EVERY_S", 0.05)
    told: list[str] = []
    notes = TroubleNotes(told.append, 10.0)
    notes.add({DropReason.FILTER_ERROR: 1, REPLACED: 0}, "it is broken")
    await asyncio.sleep(0.1)
    notes.add({DropReason.REWARD_TIMEOUT: 37}, "no verdict in 10 s")
    notes.tell()
    assert told == [
        "1 group dropped because a filter failed: it is broken",
        "37 verdicts timed out after 10 s (reward.timeout_s); the first: no verdict in 10 s",
    ]

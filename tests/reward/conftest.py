"""A file of reward functions that misbehave on request, and ways to use it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_completions import MakeScorer

from headrace.config import RewardSection
from headrace.reward.scorer import Scorer

REWARDS = """
import asyncio, os, sys, time
from pathlib import Path
from headrace import UnavailableError

COUNT = Path(__file__).with_name("calls.txt")

def note(text):
    with COUNT.open("a") as file:
        file.write(text + "\\n")

def first_time(text):
    seen = COUNT.exists() and text in COUNT.read_text().split()
    note(text)
    return not seen

def misbehave(do):
    if do == "hang": time.sleep(600)
    if do == "exit": os._exit(3)
    if do == "raise": raise ValueError("no such luck")
    if do == "quit": sys.exit("bye")
    if do == "print": print("{}\\x00" * 1000, flush=True); os.write(2, b"noise"); sys.stdout.close()
    if do == "exit-once" and first_time(do): os._exit(3)
    if do == "unavailable" or (do == "unavailable-once" and first_time(do)): raise UnavailableError("queue is full")
    if do == "refused": raise ConnectionRefusedError("no judge there")
    if do == "hang-once" and first_time(do): time.sleep(600)

def score(completion):
    misbehave(completion.fields.get("do"))
    return completion.fields.get("verdict", len(completion.text))

def counted(completion):
    note(completion.text)
    if completion.text == "fails":
        return None
    time.sleep(0.05)
    return {"length": len(completion.text), "tokens": completion.num_tokens}

async def later(completion):
    if completion.fields.get("do") == "wait":
        await asyncio.sleep(600)
    misbehave(completion.fields.get("do"))
    await asyncio.sleep(0.01 * completion.fields.get("delay", 0))
    return len(completion.text)

async def together(completion):
    note("began")
    while len(COUNT.read_text().split()) < completion.fields["all"]:
        await asyncio.sleep(0.02)
    return 1.0

async def laborious(completion):
    time.sleep(0.15)
    return 1.0

def batch(completions):
    note(str(len(completions)))
    for completion in completions:
        misbehave(completion.fields.get("do"))
    if completions[0].text == "short":
        return [1.0] * (len(completions) + 1)
    return [None if c.text == "none" else len(c.text) for c in completions]

async def async_batch(completions):
    await asyncio.sleep(0)
    return [len(c.text) for c in completions]

def two(completion, answer):
    return 0.0

def none_at_all():
    return 0.0

def with_default(completion, weight=1.0):
    return weight

NUMBER = 3
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    """The path of a file with reward functions."""
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


@pytest.fixture(autouse=True)
def _same_imports() -> Iterator[None]:
    """Loading a function adds to the search path and the modules."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("headrace_reward_", "user_")):
            del sys.modules[name]


@pytest.fixture
async def make_scorer(rewards: str) -> AsyncIterator[MakeScorer]:
    """Starts scorers with a function of that file, and closes them."""
    scorers: list[Scorer] = []

    async def make(function: str = "score", *, max_new_tokens: int = 100, **settings: Any) -> Scorer:
        section = RewardSection(function=f"{rewards}:{function}", **settings)
        scorers.append(Scorer(section, max_new_tokens=max_new_tokens))
        await scorers[-1].start()
        return scorers[-1]

    yield make
    for scorer in scorers:
        await scorer.close()

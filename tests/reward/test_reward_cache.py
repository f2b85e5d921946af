"""The verdict cache, without processes."""

from __future__ import annotations

import asyncio
from types import MappingProxyType

import numpy as np
import pytest
from reward_completions import completion

from headrace.reward.scorer import VerdictCache
from headrace.types import Completion, DropReason, Score


class Judge:
    """Counts its calls and answers when it is let go."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.num_calls = 0
        self.go = asyncio.Event()

    async def __call__(self) -> Score:
        self.num_calls += 1
        await self.go.wait()
        return self.score


async def test_the_same_requests_share_one_call_and_then_the_verdict() -> None:
    cache, judge = VerdictCache("f"), Judge(Score(reward=1.0))
    requests = [asyncio.ensure_future(cache.fetch(completion(), judge)) for _ in range(5)]
    await asyncio.sleep(0)
    judge.go.set()
    answers = await asyncio.gather(*requests, cache.fetch(completion(), judge))
    assert [score.reward for score in answers] == [1.0] * 6
    assert judge.num_calls == 1


async def test_failures_are_not_kept() -> None:
    cache, judge = VerdictCache("f"), Judge(Score(failure=DropReason.REWARD_ERROR))
    judge.go.set()
    await cache.fetch(completion(), judge)
    await cache.fetch(completion(), judge)
    assert (judge.num_calls, len(cache.verdicts)) == (2, 0)


async def test_a_cancelled_caller_leaves_the_call_to_the_others() -> None:
    cache, judge = VerdictCache("f"), Judge(Score(reward=1.0))
    first, second = (asyncio.ensure_future(cache.fetch(completion(), judge)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    judge.go.set()
    assert (await second).reward == 1.0
    assert judge.num_calls == 1


async def test_an_exception_reaches_every_caller_and_is_forgotten() -> None:
    cache = VerdictCache("f")

    async def broken() -> Score:
        await asyncio.sleep(0)
        raise RuntimeError("broken")

    answers = await asyncio.gather(*(cache.fetch(completion(), broken) for _ in range(2)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["broken"] * 2
    judge = Judge(Score(reward=1.0))
    judge.go.set()
    assert (await cache.fetch(completion(), judge)).reward == 1.0


async def test_the_oldest_verdict_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reward.scorer.MAX_VERDICTS", 2)
    cache, judge = VerdictCache("f"), Judge(Score(reward=1.0))
    judge.go.set()
    for text in ("a", "b", "c", "c", "a"):
        await cache.fetch(completion(text), judge)
    assert (judge.num_calls, len(cache.verdicts)) == (4, 2)


@pytest.mark.parametrize(
    "other",
    [completion("22"), completion(prompt="?"), completion(num_tokens=4), completion(answer="1"), completion(a=[1])],
)
def test_all_that_the_function_sees_is_in_the_key(other: Completion) -> None:
    cache = VerdictCache("f")
    assert cache.key(other) != cache.key(completion())
    assert VerdictCache("g").key(other) != cache.key(other)


def test_the_order_and_the_kind_of_the_fields_do_not_matter() -> None:
    cache = VerdictCache("f")
    assert cache.key(completion(a=1, b=2)) == cache.key(completion(b=2, a=1))
    assert cache.key(completion(a={"x": [1, 2]})) == cache.key(completion(a=MappingProxyType({"x": np.array([1, 2])})))


async def test_fields_without_canonical_json_are_judged_every_time() -> None:
    cache, judge = VerdictCache("f"), Judge(Score(reward=1.0))
    judge.go.set()
    for _ in range(2):
        await cache.fetch(completion(thing=object()), judge)
    assert (judge.num_calls, len(cache.verdicts)) == (2, 0)

"""Judging in this process: the same scores as child processes give, without the processes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from reward_completions import completion

from headrace.config import RewardSection
from headrace.errors import RewardError
from headrace.reward.function import Setup
from headrace.reward.scorer import InlineJudges, Scorer
from headrace.types import Completion, DropReason, Score

MODES = ["score", "later", "batch", "async_batch"]  # one at a time, coroutine, list, coroutine for a list


async def scores_of(function: str, completions: list[Completion], *, inline: bool) -> tuple[list[Score], Scorer]:
    judges = InlineJudges if inline else None
    scorer = Scorer(RewardSection(function=function, cache=False), max_new_tokens=100, judges=judges)
    await scorer.start()
    try:
        return list(await asyncio.gather(*(scorer.score(one) for one in completions))), scorer
    finally:
        await scorer.close()


@pytest.mark.parametrize("function", MODES)
async def test_scores_are_those_of_child_processes(rewards: str, function: str) -> None:
    asked = [completion("x" * n) for n in range(5)]
    asked += [] if function == "async_batch" else [completion("abc", do="raise"), completion("abc", do="quit")]
    if function == "batch":  # where one failure fails the whole list, ask for one at a time
        here = [(await scores_of(f"{rewards}:batch", [one], inline=True))[0][0] for one in asked]
        there = [(await scores_of(f"{rewards}:batch", [one], inline=False))[0][0] for one in asked]
    else:
        here, scorer = await scores_of(f"{rewards}:{function}", asked, inline=True)
        there, _ = await scores_of(f"{rewards}:{function}", asked, inline=False)
        assert (scorer.num_scored, scorer.num_failed) == (5, len(asked) - 5)
        assert (scorer.num_retried, scorer.num_workers_replaced) == (0, 0)
    assert [score.reward for score in here[:5]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [(score.reward, score.parts, score.failure) for score in here] == [
        (score.reward, score.parts, score.failure) for score in there
    ]
    for score, said in zip(here[5:], ("no such luck", "SystemExit: bye"), strict=False):
        assert said in score.detail


async def test_it_is_this_process(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("import os\ndef who(completion):\n    return os.getpid()\n")
    scores, _ = await scores_of(f"{path}:who", [completion()], inline=True)
    assert scores[0].reward == os.getpid()


async def test_a_coroutine_has_its_time_limit_and_a_cancelled_one_is_cancelled(rewards: str) -> None:
    setup = Setup(function=f"{rewards}:later", answer_field="answer", timeout_s=0.2)
    judges = InlineJudges(setup)
    await judges.start()
    score = await judges.run(completion(do="wait"))
    assert (score.failure, score.detail) == (DropReason.REWARD_TIMEOUT, "no verdict in 0.2 s")
    patient = InlineJudges(replace(setup, timeout_s=60.0))
    await patient.start()
    running = asyncio.ensure_future(patient.run(completion(do="wait")))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_function_cannot_change_the_prompts_fields(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def taking(completion):\n    return completion.fields.pop('answer')\n")
    fields = {"answer": 3}
    asked = Completion(prompt="", text="", fields=MappingProxyType(fields), num_tokens=1, finish="eos")
    scores, _ = await scores_of(f"{path}:taking", [asked, asked], inline=True)
    assert [score.reward for score in scores] == [3.0, 3.0]
    assert fields == {"answer": 3}


async def test_what_cannot_be_loaded_is_an_error_at_the_start(rewards: str) -> None:
    with pytest.raises(RewardError, match="has no function 'nothing'"):
        await scores_of(f"{rewards}:nothing", [], inline=True)

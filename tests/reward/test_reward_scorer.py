"""Scoring in worker processes, with functions that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from reward_completions import MakeScorer, completion

import headrace
from headrace.config import RewardSection
from headrace.errors import RewardError
from headrace.reward.function import Setup
from headrace.reward.pool import JudgePool
from headrace.reward.scorer import Scorer
from headrace.types import Completion, DropReason, Score

SHORT_S = 1.0


def calls(rewards: str) -> list[str]:
    return Path(rewards).with_name("calls.txt").read_text().split()


async def score_all(scorer: Scorer, *completions: Completion) -> list[Score]:
    return list(await asyncio.gather(*(scorer.score(one) for one in completions)))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_worker_does_not_import_torch() -> None:
    code = "import sys, headrace.reward.worker; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_answers_belong_to_their_questions_in_any_order(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(workers=2)
    scores = await score_all(scorer, *(completion("x" * n) for n in range(100)))
    assert [score.reward for score in scores] == [float(n) for n in range(100)]
    assert scores[7].parts == {"score": 7.0}
    assert (scorer.num_scored, scorer.num_failed, scorer.num_workers_replaced) == (100, 0, 0)


async def test_bad_behaviour_is_a_failure_and_the_next_answer_is_scored(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(retries=0, timeout_s=SHORT_S)
    bad: dict[str, dict[str, Any]] = {
        "no such luck": {"do": "raise"},
        "SystemExit: bye": {"do": "quit"},
        "nan (float)": {"verdict": float("nan")},
        "'good' (str)": {"verdict": "good"},
        "returned None": {"verdict": None},
        "exit code 3": {"do": "exit"},
        "no verdict in 1 s": {"do": "hang"},
    }
    scores = await score_all(
        scorer, *(one for fields in bad.values() for one in (completion("bad", **fields), completion("good")))
    )
    for said, failed, good in zip(bad, scores[::2], scores[1::2], strict=True):
        hang = said.startswith("no verdict")
        assert failed.failure is (DropReason.REWARD_TIMEOUT if hang else DropReason.REWARD_ERROR)
        assert said in failed.detail
        assert failed.reward is None
        assert good.reward == 4.0
    assert (scorer.num_failed, scorer.num_scored, scorer.num_workers_replaced, scorer.num_retried) == (7, 7, 2, 0)
    assert "rewards.py" in scores[0].detail  # a traceback that leads to the line


async def test_what_was_unavailable_is_tried_again(make_scorer: MakeScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reward.pool.PAUSE_S", 0.01)
    scorer = await make_scorer(retries=2)
    kinds = ["unavailable-once", "unavailable", "refused", "raise"]
    scores = await score_all(scorer, *(completion("abc", do=kind) for kind in kinds))
    assert scores[0].reward == 3.0
    unavailable = DropReason.REWARD_UNAVAILABLE
    assert [score.failure for score in scores[1:]] == [unavailable, unavailable, DropReason.REWARD_ERROR]
    assert "queue is full" in scores[1].detail
    assert (scorer.num_retried, scorer.num_workers_replaced) == (1 + 2 + 2, 0), "what is unknown is not tried again"


async def test_a_second_try_may_succeed(make_scorer: MakeScorer, rewards: str) -> None:
    scorer = await make_scorer(retries=1, timeout_s=SHORT_S)
    scores = await score_all(
        scorer, completion("abc", do="exit-once"), completion("ab", do="hang-once"), completion("x", do="exit")
    )
    assert [score.reward for score in scores] == [3.0, 2.0, None]
    assert (scorer.num_retried, scorer.num_workers_replaced) == (3, 4)
    assert sorted(calls(rewards)) == ["exit-once", "exit-once", "hang-once", "hang-once"]


async def test_a_busy_event_loop_is_not_a_timeout(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(retries=0, timeout_s=SHORT_S)
    scoring = asyncio.ensure_future(scorer.score(completion("abc")))
    for _ in range(5):
        await asyncio.sleep(0)
    time.sleep(SHORT_S + 0.3)  # what an optimizer step in the same process does
    assert (await scoring).reward == 3.0


async def test_what_is_printed_does_no_harm(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer()
    scores = await score_all(scorer, completion("abc", do="print"), completion("ab"))
    assert [score.reward for score in scores] == [3.0, 2.0]


async def test_fields_arrive_whatever_mapping_they_are_or_fail_alone(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer()
    view = Completion(prompt="", text="", fields=MappingProxyType({"verdict": 5}), num_tokens=1, finish="eos")
    scores = await score_all(scorer, view, completion(cannot=lambda: 0), completion("abc"))
    assert [score.reward for score in scores] == [5.0, None, 3.0]
    assert "cannot be pickled" in scores[1].detail


async def test_coroutines_run_together_and_time_out_alone(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("later", retries=0, timeout_s=SHORT_S)
    scores = await score_all(
        scorer,
        completion("waits", do="wait"),
        completion("raises", do="raise"),
        *(completion("x" * n, delay=10 - n) for n in range(10)),
    )
    assert [score.failure for score in scores[:2]] == [DropReason.REWARD_TIMEOUT, DropReason.REWARD_ERROR]
    assert [score.reward for score in scores[2:]] == [float(n) for n in range(10)]
    assert scorer.num_workers_replaced == 0


async def test_a_slow_coroutine_holds_up_nobody_who_comes_later(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("later", retries=0, timeout_s=60.0)
    slow = asyncio.ensure_future(scorer.score(completion("waits", do="wait")))
    for n in range(1, 4):  # one after the other, while the first still waits
        assert (await asyncio.wait_for(scorer.score(completion("x" * n)), 30)).reward == float(n)
    assert not slow.done()
    slow.cancel()


async def test_whatever_there_is_room_for_runs_at_the_same_time(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("together", retries=0, timeout_s=60.0, workers=2)
    scores = await score_all(scorer, *(completion("x" * n, all=100) for n in range(100)))
    assert [score.reward for score in scores] == [1.0] * 100


async def test_what_trickles_in_is_shared_among_the_workers(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("together", retries=0, timeout_s=60.0, workers=2)
    scoring = []
    for n in range(10):
        scoring.append(asyncio.ensure_future(scorer.score(completion("x" * n, all=10))))
        await asyncio.sleep(0.01)
        if n == 8:
            assert sorted(len(worker.going) for worker in scorer._pool._workers) == [4, 5]  # type: ignore[attr-defined]
    assert {score.reward for score in await asyncio.gather(*scoring)} == {1.0}


async def test_a_worker_that_replies_steadily_is_not_lost_however_much_it_has_to_do(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("laborious", retries=0, timeout_s=SHORT_S)
    scores = await score_all(scorer, *(completion("x" * n) for n in range(20)))
    assert [score.reward for score in scores] == [1.0] * 20
    assert scorer.num_workers_replaced == 0


async def test_a_coroutine_that_blocks_the_others_is_tried_alone(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("later", retries=1, timeout_s=SHORT_S)
    early = asyncio.ensure_future(scorer.score(completion("abc", delay=50)))
    await asyncio.sleep(0.1)
    scores = await score_all(scorer, completion("blocks", do="hang"), *(completion("x" * n, delay=9) for n in range(5)))
    assert scores[0].failure is DropReason.REWARD_TIMEOUT
    assert [score.reward for score in scores[1:]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (await early).reward == 3.0
    assert scorer.num_workers_replaced == 2, "once for all of them, once for the one that is to blame"


async def test_a_coroutine_that_kills_the_worker_takes_nobody_with_it(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("later", retries=1)
    scores = await score_all(
        scorer, completion("abc", delay=20), completion("dies", do="exit"), completion("ab", delay=20)
    )
    assert [score.reward for score in scores] == [3.0, None, 2.0]


async def test_a_batch_function_gets_all_that_is_queued(make_scorer: MakeScorer, rewards: str) -> None:
    scorer = await make_scorer("batch", retries=0)
    scores = await score_all(scorer, *(completion("x" * n) for n in range(1, 5)), completion("none"))
    assert [score.reward for score in scores] == [1.0, 2.0, 3.0, 4.0, None]
    assert calls(rewards) == ["5"]
    wrong = await score_all(scorer, completion("short"), completion("other"))
    assert ["3 verdicts for 2 completions" in score.detail for score in wrong] == [True, True]
    raised = await score_all(scorer, completion("xxxx"), completion("abcde", do="raise"))
    assert [score.failure for score in raised] == [None, DropReason.REWARD_ERROR]  # xxxx was in the cache
    assert scorer.num_workers_replaced == 0


async def test_after_a_lost_batch_each_answer_is_tried_alone(make_scorer: MakeScorer, rewards: str) -> None:
    scorer = await make_scorer("batch", retries=1)
    scores = await score_all(scorer, completion("a"), completion("b", do="exit"), completion("cc"))
    assert [score.reward for score in scores] == [1.0, None, 2.0]
    assert calls(rewards) == ["3", "1", "1", "1"]


async def test_a_batch_function_may_be_a_coroutine(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer("async_batch")
    assert [score.reward for score in await score_all(scorer, completion("a"), completion("bb"))] == [1.0, 2.0]


async def test_the_same_answer_is_judged_once(make_scorer: MakeScorer, rewards: str) -> None:
    scorer = await make_scorer("counted", workers=2, overlong_tokens=10)
    await score_all(scorer, *[completion("same", num_tokens=95)] * 6, completion("fails"))
    last, failed = await score_all(scorer, completion("same", num_tokens=95), completion("fails"))
    assert sorted(calls(rewards)) == ["fails", "fails", "same"]
    assert last.parts == {"length": 4.0, "tokens": 95.0, "overlong": -0.5}
    assert last.reward == 98.5
    assert failed.failure is DropReason.REWARD_ERROR
    assert (scorer.num_scored, scorer.num_failed) == (7, 2)


async def test_an_answer_that_ran_out_of_time_is_as_overlong_as_one_that_ran_out_of_tokens() -> None:
    scorer = Scorer(RewardSection(overlong_tokens=10), max_new_tokens=100)
    await scorer.start()
    answer = completion("21", answer=21, num_tokens=40)
    ended, cut = await score_all(scorer, answer, replace(answer, finish="wall"))
    assert (ended.reward, cut.reward) == (1.0, 0.0)
    await scorer.close()


async def test_the_cache_can_be_off(make_scorer: MakeScorer, rewards: str) -> None:
    scorer = await make_scorer("counted", cache=False)
    await score_all(scorer, completion("same"), completion("same"))
    assert calls(rewards) == ["same", "same"]


async def test_an_empty_setting_takes_the_default_function() -> None:
    scorer = Scorer(RewardSection(overlong_tokens=10), max_new_tokens=100)
    await scorer.start()
    scores = await score_all(scorer, completion("21", answer=21), completion("20", answer=21), completion("21"))
    assert [score.reward for score in scores] == [1.0, 0.0, None]
    assert scores[0].parts == {"exact": 1.0, "overlong": 0.0}
    assert "not a field of the prompt" in scores[2].detail
    await scorer.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import user_missing_library", "No module named 'user_missing_library'"),
        ("import os; os._exit(9)", "exit code 9"),
        ("def scores(completion): return 1.0", "did you mean 'scores'"),
    ],
)
async def test_a_function_that_cannot_be_loaded_stops_the_start(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    scorer = Scorer(RewardSection(function=f"{tmp_path}/bad.py:score", workers=2), max_new_tokens=10)
    with pytest.raises(RewardError, match=message):
        await scorer.start()
    with pytest.raises(RewardError, match="closed"):
        await scorer.score(completion())


async def test_closing_ends_every_process_and_tells_those_who_wait(rewards: str) -> None:
    setup = Setup(function=f"{rewards}:score", answer_field="answer", timeout_s=60.0)
    pool = JudgePool(setup, num_workers=2, retries=0)
    with pytest.raises(RewardError, match="not started"):
        await pool.run(completion())
    await pool.start()
    pids = [worker.process.pid for worker in pool._workers]
    assert all(is_alive(pid) for pid in pids)
    waiting = asyncio.ensure_future(pool.run(completion(do="hang")))
    assert (await pool.run(completion("abc"))).reward == 3.0
    await pool.close()
    await pool.close()
    assert not any(is_alive(pid) for pid in pids)  # a zombie would still be there
    with pytest.raises(RewardError, match="closed"):
        await waiting
    with pytest.raises(RewardError, match="closed"):
        await pool.run(completion())


async def test_a_worker_that_died_idle_is_replaced_without_blame(rewards: str) -> None:
    setup = Setup(function=f"{rewards}:score", answer_field="answer", timeout_s=60.0)
    pool = JudgePool(setup, num_workers=1, retries=0)
    await pool.start()
    os.kill(pool._workers[0].process.pid, 9)
    await asyncio.sleep(0.2)
    assert (await pool.run(completion("abc"))).reward == 3.0
    assert (pool.num_workers_replaced, pool.num_retried) == (1, 0)
    Path(rewards).write_text("1 / 0")  # from here on no worker can be started
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        await asyncio.gather(pool.run(completion(do="exit")), pool.run(completion("abc")))
    await pool.close()


async def test_a_cancelled_caller_does_not_stop_the_pool(make_scorer: MakeScorer) -> None:
    scorer = await make_scorer(retries=0)
    cancelled = asyncio.ensure_future(scorer.score(completion("x")))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await scorer.score(completion("abc"))).reward == 3.0


@pytest.mark.parametrize("ending", ["await pool.close()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_workers_and_what_they_started_end_with_the_trainer(tmp_path: Path, ending: str) -> None:
    """At once: the worker is idle."""
    rewards, fifo = tmp_path / "rewards.py", tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    rewards.write_text(
        "import atexit, subprocess\n"
        "def score(completion):\n"
        f"    fifo = open({str(fifo)!r}, 'w')\n"
        "    subprocess.Popen(['sleep', '600'], stdout=fifo)\n"
        "    atexit.register(print, 'its own end', file=fifo, flush=True)\n"
        "    return 1.0\n"
    )
    code = f"""
import asyncio, os, signal
from headrace.reward.pool import JudgePool
from headrace.reward.function import Setup
from headrace.types import Completion
async def main():
    setup = Setup(function="{rewards}:score", answer_field="", timeout_s=60.0)
    pool = JudgePool(setup, num_workers=1, retries=0)
    await pool.start()
    await pool.run(Completion(prompt="", text="", fields={{}}, num_tokens=1, finish="eos"))
    {ending}
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    os.set_blocking(reader, True)
    with os.fdopen(reader) as left:  # all of them hold its other end: at its end, they have ended too
        assert left.read() == "its own end\n", "a worker may clear up"


async def test_what_a_worker_started_ends_when_it_is_replaced(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    (tmp_path / "rewards.py").write_text(
        "import os, subprocess\n"
        "def score(completion):\n"
        f"    subprocess.Popen(['sleep', '600'], stdout=open({str(fifo)!r}, 'w'))\n"
        "    os._exit(3)\n"
    )
    scorer = Scorer(RewardSection(function=f"{tmp_path}/rewards.py:score", retries=0), max_new_tokens=10)
    await scorer.start()
    assert "exit code 3" in (await scorer.score(completion())).detail
    await scorer.close()
    ended = asyncio.get_running_loop().run_in_executor(None, os.read, reader, 1)
    assert await asyncio.wait_for(ended, 30) == b"", "nobody holds the other end any more"
    os.close(reader)


@pytest.mark.parametrize("first", ["", "."])
async def test_files_of_the_user_hide_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    for name in ("json", "types", "re", "random", "asyncio", "numpy", "atexit"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")
    (tmp_path / "user_neighbour.py").write_text("HALF = 0.5\n")
    (tmp_path / "user_rewards.py").write_text(
        "import json, random, re, types, numpy\nfrom user_neighbour import HALF\ndef score(c):\n    return HALF\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(first)
    monkeypatch.setenv("PYTHONPATH", str(Path(headrace.__file__).parents[1]))
    for function in ("user_rewards:score", "user_rewards.py:score"):
        scorer = Scorer(RewardSection(function=function), max_new_tokens=10)
        await scorer.start()
        assert (await scorer.score(completion())).reward == 0.5
        await scorer.close()

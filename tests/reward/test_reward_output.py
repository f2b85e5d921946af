"""What reward functions print: passed on, and kept with the verdict of the call that printed it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from reward_completions import completion

from headrace.config import RewardSection
from headrace.reward.printed import MAX_BYTES, Printed
from headrace.reward.scorer import Scorer
from headrace.reward.worker import END_OF_CALL
from headrace.types import DropReason

TALKERS = """
import asyncio, os, subprocess, sys, time
print("imported")

def score(completion):
    print("about", completion.text)
    sys.stderr.write("trouble with " + completion.text)
    match completion.text:
        case "child": subprocess.run(["echo", "from a child"])
        case "crash": os._exit(3)
        case "hang": time.sleep(60)
        case "raise": raise ValueError("no")
        case "long": print("x" * 10_000 + "end")
        case "closed": sys.stdout.close()
        case "quiet": time.sleep(0.05)
    return 1.0

def batch(completions):
    print("all", len(completions))
    return [1.0] * len(completions)

async def later(completion):
    print("later", completion.text)
    await asyncio.sleep(0.01)
    return 1.0
"""


async def scorer_of(tmp_path: Path, function: str) -> Scorer:
    (tmp_path / "talkers.py").write_text(TALKERS)
    section = RewardSection(function=f"{tmp_path}/talkers.py:{function}", retries=0, timeout_s=1.0, cache=False)
    scorer = Scorer(section, max_new_tokens=10)
    await scorer.start()
    return scorer


async def test_each_verdict_has_what_its_call_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scorer = await scorer_of(tmp_path, "score")
    names = ["a", "child", "crash", "b", "hang", "raise", "long", "quiet", "closed"]
    found = dict(zip(names, await asyncio.gather(*(scorer.score(completion(name)) for name in names)), strict=True))
    await scorer.close()
    for name in ("a", "b", "crash", "hang", "raise", "quiet", "closed"):
        assert found[name].output == f"about {name}\n[stderr]\ntrouble with {name}", name
    assert found["child"].output.startswith("about child\nfrom a child\n")
    shown, _, _ = found["long"].output.partition("[stderr]")
    assert shown.endswith("xend\n")
    assert len(shown) == MAX_BYTES
    failures = {name: score.failure for name, score in found.items() if score.failure}
    assert failures == {
        "crash": DropReason.REWARD_ERROR,
        "hang": DropReason.REWARD_TIMEOUT,
        "raise": DropReason.REWARD_ERROR,
    }
    assert found["hang"].seconds >= 1.0 > found["quiet"].seconds >= 0.05 > found["a"].seconds > 0.0
    stdout, stderr = capfd.readouterr()
    assert stdout.count("imported\n") == 3, "by the first process and those in the place of the lost ones"
    assert "about a\n" in stdout
    assert stdout.count("x") == 10_000, "all of it"
    assert "trouble with hang" in stderr
    assert END_OF_CALL.decode() not in stdout + stderr


async def test_the_answers_of_one_call_share_what_it_printed(tmp_path: Path) -> None:
    scorer = await scorer_of(tmp_path, "batch")
    found = await asyncio.gather(*(scorer.score(completion(str(n))) for n in range(3)))
    assert [score.output for score in found] == ["all 3\n"] * 3
    assert (await scorer.score(completion("again"))).output == "all 1\n"
    await scorer.close()


async def test_coroutines_print_side_by_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scorer = await scorer_of(tmp_path, "later")
    found = await asyncio.gather(*(scorer.score(completion(name)) for name in "ab"))
    await scorer.close()
    assert [score.output for score in found] == ["", ""]
    assert all(score.seconds >= 0.01 for score in found)
    assert {"later a", "later b"} < set(capfd.readouterr().out.splitlines())


async def test_marks_arrive_in_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    pipes = [os.pipe() for _ in range(2)]
    printed = Printed(*(os.fdopen(ours, "rb", buffering=0) for ours, _ in pipes))
    for piece in (b"one\0two" + END_OF_CALL[:5], END_OF_CALL[5:] + b"thr", b"ee\0" + END_OF_CALL, b"\0headrace"):
        os.write(pipes[0][1], piece)
        await asyncio.sleep(0.01)
    assert [printed.take(), printed.take(), printed.take()] == ["one\0two", "three\0", ""]
    for _, theirs in pipes:
        os.close(theirs)
    await asyncio.sleep(0.01)
    assert printed.rest() == "\0headrace", "no mark after all"
    printed.close()
    printed.close()
    assert capfd.readouterr().out == "one\0twothree\0\0headrace"

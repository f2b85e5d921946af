"""A run in which something hangs ends by itself, says where, and can be resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broken_runs import SETTINGS, Notes, assert_resumes_to, break_off, on_call
from tiny_runs import Workshop, play, same_bits, weights, worker_of

from headrace import api
from headrace.buffer.buffer import Buffer
from headrace.errors import HungError
from headrace.learner.learner import Learner
from headrace.ledger.files import STACKS
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.watchdog import Watchdog, beside
from headrace.measured import StageClock
from headrace.place.place import Place
from headrace.rollout.engine import Engine

IMPATIENT = ("recovery.hang_s=0.5", "reward.timeout_s=1")


@pytest.fixture
def never() -> Iterator[Callable[..., Any]]:
    """Work that does not return while the test lasts."""
    over = threading.Event()

    def hang_here(*args: Any) -> None:
        over.wait()

    yield hang_here
    over.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "method", "call", "stage"),
    [
        (Engine, "_decode", 40, "rollout"),
        (Learner, "accumulate", 3, "train"),
        (Learner, "finish", 3, "train"),
        (Checkpoints, "write", 3, "checkpoint"),  # the last one, for which the end of the run waits
    ],
)
def test_a_hung_stage_is_named_and_the_run_can_be_resumed(
    workshop: Workshop,
    unbroken4: Path,
    monkeypatch: pytest.MonkeyPatch,
    never: Callable[..., Any],
    where: type,
    method: str,
    call: int,
    stage: str,
):
    with monkeypatch.context() as patched:
        patched.setattr(where, method, on_call(call, getattr(where, method), never))
        message = (
            rf"nothing has moved for 1.5 s \(recovery.hang_s .*\): {stage} has been at work for \d s.*headrace resume"
        )
        run = break_off(workshop, f"hung-{method}", HungError, message, *IMPATIENT)
    assert "in hang_here" in (run / STACKS).read_text()
    assert not (run / "model").exists(), "what hangs may have changed half of the weights"
    assert_resumes_to(run, unbroken4)


def test_control_c_does_not_wait_for_what_hangs(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch, never: Callable[..., Any]
):
    def interrupted_and_hung(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        never()

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "finish", on_call(3, Learner.finish, interrupted_and_hung))
        run = break_off(workshop, "hung-interrupted", HungError, "train has been at work", *IMPATIENT)
    assert_resumes_to(run, unbroken4)


def test_stages_that_wait_for_each_other_are_a_hang_too(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch
):
    async def wait_for_ever(admit: object, buffer: Buffer) -> int:
        await asyncio.Event().wait()
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(Buffer, "admit", on_call(4, Buffer.admit, wait_for_ever))
        run = break_off(workshop, "deadlock", HungError, "no stage is at work, all wait for each other", *IMPATIENT)
    assert "wait_for_ever" in (run / STACKS).read_text(), "coroutines are in no thread's stack"
    assert_resumes_to(run, unbroken4)


def test_a_filter_in_this_process_that_does_not_return_is_told(workshop: Workshop, unbroken4: Path):
    path = workshop.directory / "slow_filter.py"
    path.write_text(
        "import time\nslept = []\n"
        "def slow(group):\n    if not slept:\n        slept.append(1)\n        time.sleep(2.5)\n    return True\n"
    )
    notes = Notes()
    here = ("reward.workers=0", f'buffer.filters=["{path}:slow"]')
    config = workshop.config("slow-filter", *SETTINGS, *IMPATIENT, *here)
    assert api.train(config, notes)["finished"], "it came back in the end, and nothing hangs any more"
    (told,) = notes.texts
    assert "something has held up the whole run for 1.5 s (recovery.hang_s)" in told
    assert "in slow\n" in (workshop.directory / "slow-filter" / STACKS).read_text()
    assert same_bits(weights(workshop.directory / "slow-filter"), weights(unbroken4))


async def test_as_long_as_something_moves_slowly_nothing_hangs(tmp_path: Path):
    moves = 0
    watchdog = Watchdog(0.2, lambda: moves, StageClock(), tmp_path, pytest.fail)
    watchdog.start()
    for moves in range(6):  # noqa: B007 - the watchdog looks at it
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(5)
    watchdog.stop()
    with pytest.raises(HungError, match=r"nothing has moved for 0.2 s"):
        watchdog.check()


async def test_all_work_is_progress(workshop: Workshop):
    places: list[Place] = []
    await play(workshop.config("progress"), lambda place, loop: places.append(place))
    computed_tokens, verdicts, moves, num_workers = places[0].progress()  # type: ignore[misc]
    assert computed_tokens > worker_of(places[0]).engine.sampled_tokens > 0, "prompts are work, too"
    assert num_workers == 1
    assert verdicts >= 3 * 16
    assert moves["train"] >= moves["publish"] == 3
    assert moves["checkpoint"] == 2, "copied, and written"
    assert moves["reward"] >= 3 * 16
    assert "rollout" not in moves, "of the engine only tokens count"


async def test_a_limit_of_zero_watches_nothing(tmp_path: Path):
    watchdog = Watchdog(0.0, lambda: 0, StageClock(), tmp_path, pytest.fail)
    watchdog.start()
    await asyncio.sleep(0.05)
    watchdog.stop()
    watchdog.check()


async def test_work_beside_the_loop_gives_its_result_or_its_error():
    assert await beside(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        await beside(divmod, 7, 0)


HUNG_PROCESSES = """
import os, sys, time
import headrace
from headrace import api, cli
from headrace.learner.learner import Learner

Learner.accumulate = lambda *_: time.sleep(1000)
directory, *settings = sys.argv[1:]
children = []
for how in ("command", "script"):
    children.append(os.fork())
    if not children[-1]:
        words = [*settings, f"run.dir={directory}/hung-{how}"]
        if how == "command":
            cli.app(["train", "-q", *words])
        else:
            headrace.train(headrace.load_config(None, words))
        sys.exit(0)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.slow
def test_the_process_ends_although_a_thread_hangs(workshop: Workshop):
    settings = workshop.overrides("unused", *SETTINGS, *IMPATIENT)
    done = subprocess.run(
        [sys.executable, "-c", HUNG_PROCESSES, str(workshop.directory), *settings],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["2", "1"], done.stderr
    assert (
        "error: nothing has moved for 1.5 s (recovery.hang_s + reward.timeout_s): train has been at work" in done.stderr
    )
    assert "HungError: nothing has moved" in done.stderr

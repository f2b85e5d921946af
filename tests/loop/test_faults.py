"""Faults of every kind: what the user sees, and that a resumed run ends as if nothing had happened."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_runs import SETTINGS, STEPS, Notes, assert_resumes_to, break_off, on_call
from tiny_runs import Workshop, rows_of, same_bits, select, weights, write_prompts

from headrace import api
from headrace.errors import ModelError, RunError, StalledError
from headrace.learner.learner import Learner
from headrace.ledger import database
from headrace.ledger.ledger import Amount, Ledger
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.loop import SKIPPED_STEPS
from headrace.measured import Row
from headrace.policy import tensor_files
from headrace.policy.policy import Policy
from headrace.policy.tensor_files import write_tensors
from headrace.rollout.engine import Engine
from headrace.runs.audit import audit, books

MEDDLE = Callable[..., Any]


def fall_over(*_: object) -> None:
    raise RuntimeError("the kernel fell over")


# A stage that raises


@pytest.mark.parametrize(
    ("where", "method", "call"),
    [(Engine, "_decode", 40), (Learner, "accumulate", 3), (Learner, "finish", 3), (Engine, "weights_changed", 2)],
)
def test_a_stage_that_raises_stops_the_run_with_its_error(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch, where: type, method: str, call: int
):
    with monkeypatch.context() as patched:
        patched.setattr(where, method, on_call(call, getattr(where, method), fall_over))
        run = break_off(workshop, f"raises-{method}", RuntimeError, "the kernel fell over")
    assert_resumes_to(run, unbroken4)


@pytest.mark.parametrize("rule", ["requeue", "resume"])
def test_an_asynchronous_run_outlasts_a_failed_stage_too(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, rule: str
):
    settings = ("loop.max_lag=2", f"recovery.in_flight={rule}")
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_decode", on_call(40, Engine._decode, fall_over))
        run = break_off(workshop, f"raises-{rule}", RuntimeError, "the kernel fell over", *settings)
    assert api.resume(run)["finished"] is True
    assert audit(run) == []
    assert books(run).in_flight == books(run).buffered == Amount()
    assert [row.step for row in rows_of(run)] == list(range(1, STEPS + 1))


def test_a_filter_that_keeps_every_group_changes_no_bit(workshop: Workshop, unbroken4: Path):
    path = workshop.directory / "keeping.py"
    path.write_text("import time\ndef keep(group):\n    time.sleep(0.02 * (group.serial % 3))\n    return True\n")
    run = workshop.directory / "keeping"
    assert api.train(workshop.config("keeping", *SETTINGS, f'buffer.filters=["{path}:keep"]'))["finished"] is True
    assert same_bits(weights(run), weights(unbroken4))


def test_a_run_outlasts_a_filter_that_fails_now_and_then(workshop: Workshop):
    path = workshop.directory / "fragile.py"
    path.write_text(
        "import os\ncalls = []\ndef fragile(group):\n    calls.append(1)\n"
        "    if len(calls) == 5:\n        1 / 0\n    if len(calls) == 7:\n        os._exit(3)\n    return True\n"
    )
    notes = Notes()
    config = workshop.config("fragile", *SETTINGS, "reward.retries=0", f'buffer.filters=["{path}:fragile"]')
    assert api.train(config, notes)["finished"] is True
    run = workshop.directory / "fragile"
    assert audit(run) == []
    dropped = select(run, "SELECT COUNT(*) FROM trajectories WHERE drop_reason = 'filter_error'")
    assert dropped[0][0] >= 8, "two groups of four"
    assert any("dropped because a filter failed" in text and "ZeroDivisionError" in text for text in notes.texts)


def test_answers_that_nobody_needs_are_forgotten(workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch):
    def assert_only_needed_ones_are_kept(num_steps: int) -> None:
        oldest = min(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
        joined = "journal JOIN trajectories ON id = trajectory_id WHERE state = 'trained'"
        kept = {step for (step,) in select(run, f"SELECT trained_step FROM {joined}")}
        assert kept == set(range(oldest + 1, num_steps + 1))

    settings = ("recovery.every_steps=1", "recovery.journal_steps=1")
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "finish", on_call(4, Learner.finish, fall_over))
        run = break_off(workshop, "forgetful", RuntimeError, "fell over", *settings)
    assert_only_needed_ones_are_kept(3)
    assert_resumes_to(run, unbroken4)
    assert_only_needed_ones_are_kept(4)


# Rewards


REWARDS = """
import os, signal
from pathlib import Path

HERE = Path(__file__)

def right(completion):
    return float(completion.text[:1].islower())

def once(name):
    try:
        HERE.with_name(name).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def shot(completion):
    if completion.prompt[0] in "13" and once(f"shot-{completion.prompt[0]}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return right(completion)

def wordy(completion):
    return "very good" if completion.text[:1].isupper() else len(completion.text) / 7

def noted(completion):
    with HERE.with_name("noted").open("a") as file:
        file.write(f"{completion.prompt!r} {completion.text!r} {completion.num_tokens}\\n")
    return right(completion)

def miscounting(completions):
    return [len(c.text) / 7 for c in completions] + [1.0] * ("1" in completions[0].prompt and once("miscounted"))
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


def test_answers_of_a_killed_reward_worker_are_scored_again(workshop: Workshop, unbroken4: Path, rewards: Path):
    summary = api.train(workshop.config("shot", *SETTINGS, f"reward.function={rewards}:shot"))
    run = workshop.directory / "shot"
    assert {path.name for path in rewards.parent.glob("shot-*")} == {"shot-1", "shot-3"}, "two workers were killed"
    assert summary["reward_failure"] == ""
    assert audit(run) == []
    assert books(run) == books(unbroken4)
    assert same_bits(weights(run), weights(unbroken4))


def test_a_verdict_outlasts_the_process_that_asked_for_it(
    workshop: Workshop, unbroken4: Path, rewards: Path, monkeypatch: pytest.MonkeyPatch
):
    """A restart generates the wave again, and asks for none of its verdicts a second time."""

    def fall_over_later(*_: object) -> None:
        time.sleep(0.5)  # verdicts that were asked for come meanwhile
        fall_over()

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_decode", on_call(40, Engine._decode, fall_over_later))
        run = break_off(workshop, "noted", RuntimeError, "fell over", f"reward.function={rewards}:noted")
    assert_resumes_to(run, unbroken4)
    asked = rewards.with_name("noted").read_text().splitlines()
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("function", "said"),
    [("wordy", "returned 'very good' (str)"), ("miscounting", "verdicts for")],
)
def test_nonsense_from_a_reward_is_told_and_dropped(workshop: Workshop, rewards: Path, function: str, said: str):
    summary = api.train(workshop.config(function, "loop.steps=2", f"reward.function={rewards}:{function}"))
    run = workshop.directory / function
    assert summary["finished"]
    assert said in summary["reward_failure"]
    assert audit(run) == []
    assert books(run).dropped["reward_error"].trajectories > 0


# Numbers that are none


def spoil(policy: Policy) -> None:
    with torch.no_grad():
        next(policy.model.parameters())[7, 3] = torch.nan


def test_nan_weights_stop_the_run_at_the_next_token(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch
):
    def spoiled(decode: MEDDLE, engine: Engine, *args: Any) -> Any:
        spoil(engine.policy)
        return decode(engine, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_decode", on_call(40, Engine._decode, spoiled))
        run = break_off(workshop, "nan-token", ModelError, r"not a number \(NaN\).*resume the run")
    assert_resumes_to(run, unbroken4)


def test_nan_weights_stop_the_run_before_a_step_is_taken_with_them(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch
):
    def spoiled(accumulate: MEDDLE, learner: Learner, *args: Any) -> Any:
        spoil(learner.policy)
        return accumulate(learner, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "accumulate", on_call(3, Learner.accumulate, spoiled))
        run = break_off(
            workshop, "nan-step", ModelError, r"step 3: the weights 'model.embed_tokens.weight' are no longer fin"
        )
    assert [row.step for row in rows_of(run)] == [1, 2]
    assert_resumes_to(run, unbroken4)


def test_nan_weights_never_reach_a_checkpoint(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(1, partial(write_tensors, tensors={"master.w": torch.ones(3)}), {})
    with pytest.raises(RunError, match=r"step 2 could not be written: master.w holds what is not a finite number"):
        checkpoints.write(2, partial(write_tensors, tensors={"master.w": torch.tensor([1.0, torch.nan])}), {})
    found = checkpoints.newest(pytest.fail)
    assert found is not None
    assert found.version == 1


def test_one_skipped_step_after_the_other_stops_the_run(workshop: Workshop):
    path = write_prompts(workshop.directory / "all-huge.jsonl", huge=[True])
    extra = (f"prompts.source={path}", "learner.advantage=dr-grpo", "loop.steps=50")
    with pytest.raises(StalledError, match="the last 4 steps were skipped because their gradients were not finite"):
        api.train(workshop.config("all-huge", *extra, reward="huge"))
    run = workshop.directory / "all-huge"
    assert [row.skipped for row in rows_of(run)] == [True] * SKIPPED_STEPS
    assert audit(run) == []


# The disk


def raise_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_without_room_leaves_training_going(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch
):
    notes = Notes()
    monkeypatch.setattr(tensor_files, "save_file", on_call(2, tensor_files.save_file, raise_full))
    assert api.train(workshop.config("full", *SETTINGS), notes)["finished"]
    told = [text for text in notes.texts if "No space left on device" in text]
    assert told == [
        "the checkpoint of step 2 could not be written: No space left on device. Training goes on; the last complete "
        "checkpoint stays"
    ]
    run = workshop.directory / "full"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000000", "step-000004"]
    assert same_bits(weights(run), weights(unbroken4))


def test_books_without_room_stop_the_run_and_are_whole(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill_up(step_begins: MEDDLE, ledger: Ledger, *args: Any) -> Any:
        (num_pages,) = ledger.connection.execute("PRAGMA page_count").fetchone()
        ledger.connection.execute(f"PRAGMA max_page_count = {num_pages}")
        return step_begins(ledger, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "step_begins", on_call(3, Ledger.step_begins, fill_up))
        run = break_off(workshop, "full-books", RunError, r"Is the disk full\?")
    assert_resumes_to(run, unbroken4)


def test_weights_without_room_can_be_written_later(
    workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Policy, "save", raise_full)
        run = break_off(workshop, "full-weights", RunError, r"model could not be written: .*No space left.* resume")
    assert_resumes_to(run, unbroken4)


@contextmanager
def powerless() -> Iterator[None]:
    """Without the powers of root, whom no permission binds."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("inside", ["", "new"])
def test_a_read_only_place_is_told_at_the_start(inside: str):
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        run = Path(name) / inside
        with powerless(), pytest.raises(RunError, match=f"{run}.*Permission denied"):
            api.train(api.load_config(None, [f"run.dir={run}"]))
        assert not list(Path(name).iterdir())


def test_a_run_that_became_read_only_is_left_as_it_is(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        (Path(name) / "config.toml").write_text("")
        (Path(name) / "lock").write_text("")
        os.chmod(Path(name) / "lock", 0o444)
        with powerless(), pytest.raises(RunError, match=f"Cannot write into {name}: Permission denied"):
            api.resume(name)


# Other processes


class Other:
    """Another process, in the way until it is told to go or its time is over."""

    def __init__(self, code: str, *words: object) -> None:
        command = [sys.executable, "-c", f"import sys, time\n{code}", *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        self.process.communicate()


LOCKER = """
import sqlite3
books = sqlite3.connect(sys.argv[1], isolation_level=None)
books.execute("BEGIN IMMEDIATE")
print("ready", flush=True)
time.sleep(float(sys.argv[2])) if float(sys.argv[2]) else sys.stdin.read()
"""

OWNER = """
from pathlib import Path
from headrace.ledger.database import claimed
with claimed(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


class Lock(api.Watcher):
    """Has another process lock the books when step 2 is done."""

    def __init__(self, run: Path, seconds: float) -> None:
        self.run, self.seconds = run, seconds
        self.other: Other | None = None

    def row(self, row: Row) -> None:
        if row.step == 2:
            self.other = Other(LOCKER, self.run / "ledger.sqlite", self.seconds)


def test_books_that_another_process_locks_for_a_moment_are_waited_for(workshop: Workshop, unbroken4: Path):
    run = workshop.directory / "busy"
    lock = Lock(run, 0.3)
    assert api.train(workshop.config("busy", *SETTINGS), lock)["finished"]
    assert lock.other is not None
    lock.other.go()
    assert books(run) == books(unbroken4)


def test_books_that_stay_locked_stop_the_run(workshop: Workshop, unbroken4: Path, monkeypatch: pytest.MonkeyPatch):
    run = workshop.directory / "locked"
    lock = Lock(run, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(database, "LOCK_WAIT_S", 0.2)
        with pytest.raises(RunError, match=r"is locked: another program .* for more than 0.2 s.*headrace resume"):
            api.train(workshop.config("locked", *SETTINGS), lock)
    assert lock.other is not None
    lock.other.go()
    assert audit(run) == []
    assert_resumes_to(run, unbroken4)


def test_a_run_in_use_is_refused_and_its_process_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_decode", on_call(40, Engine._decode, fall_over))
        run = break_off(workshop, "shared", RuntimeError, "fell over")
    before = (run / "ledger.sqlite").read_bytes()
    other = Other(OWNER, run)
    for work in (
        lambda: api.resume(run),
        lambda: api.train(workshop.config("shared")),
        lambda: api.train(workshop.config("shared", "run.overwrite=true")),
    ):
        with pytest.raises(RunError, match=f"is in use: process {other.process.pid} is training there"):
            work()
    other.go()
    assert (run / "ledger.sqlite").read_bytes() == before


# Checkpoints that were damaged


@pytest.fixture(scope="module")
def stopped(workshop: Workshop) -> Path:
    """A run that fell over in its last step; it has the checkpoints of step 0 and of step 2."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "finish", on_call(STEPS, Learner.finish, fall_over))
        return break_off(workshop, "stopped", RuntimeError, "fell over")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {"truncated": truncate, "flipped": flip_a_bit, "gone": Path.unlink}


def copied(run: Path, name: str) -> Path:
    copy = run.parent / name
    subprocess.run(["cp", "-a", str(run), str(copy)], check=True)
    return copy


def tensors_of(run: Path, step: int) -> Path:
    (file,) = (run / "checkpoints" / f"step-{step:06}" / "tensors").glob("*.safetensors")
    return file


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(stopped: Path, unbroken4: Path, damage: str):
    run = copied(stopped, damage)
    DAMAGE[damage](tensors_of(run, 2))
    told = assert_resumes_to(run, unbroken4)
    assert f"the checkpoint {run / 'checkpoints' / 'step-000002'} is damaged and not used: " in told[0]
    assert "resumed at step 4, from the checkpoint of step 0 and 4 steps taken again" in told[1]


def test_a_checkpoint_without_its_manifest_is_none(stopped: Path, unbroken4: Path):
    run = copied(stopped, "unlisted")
    truncate(run / "checkpoints" / "step-000002" / "manifest.json")
    assert "is damaged" in assert_resumes_to(run, unbroken4)[0]


def test_a_checkpoint_that_names_files_elsewhere_is_refused(stopped: Path, unbroken4: Path):
    run = copied(stopped, "straying")
    manifest = run / "checkpoints" / "step-000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tensors/', '"../../tensors/'))
    assert "../../tensors/00001.safetensors is not what was written" in assert_resumes_to(run, unbroken4)[0]


def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_stays_as_it_is(stopped: Path):
    run = copied(stopped, "ruined")
    for step in (0, 2):
        flip_a_bit(tensors_of(run, step))
    before = books(run)
    notes = Notes()
    with pytest.raises(RunError, match="cannot be resumed: it has no checkpoint that can be read"):
        api.resume(run, notes)
    assert len(notes.texts) == 2
    assert books(run) == before
    assert audit(run) == []

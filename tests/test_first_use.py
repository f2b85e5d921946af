"""What a user can do to a run by mistake: nothing is lost, nothing is mixed, and what happened is said."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hand_made import balances
from tiny_runs import Workshop, rows_of, write_prompts
from typer.testing import CliRunner

import headrace
from headrace import api
from headrace.cli import app
from headrace.errors import ConfigError, HeadraceError, ModelError, RewardError, RunError, StalledError
from headrace.ledger import files
from headrace.ledger.database import claimed
from headrace.ledger.journal import read_trajectories
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import changes
from headrace.measured import Row, Sample
from headrace.runs.audit import audit, books
from headrace.runs.facts import read_runs


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def finished(workshop: Workshop) -> Path:
    headrace.train(workshop.config("finished", "loop.steps=2", "recovery.every_steps=1", reward="dense"))
    return workshop.directory / "finished"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def command(*words: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def content(directory: Path) -> dict[str, str]:
    """The digest of every file below, except for the lock."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


# ---- run.overwrite


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("model.path=/no/such/model", HeadraceError),
        ("reward.function=/no/such/file.py:score", RewardError),
        ("prompts.source=/no/such.jsonl", HeadraceError),
    ],
)
def test_a_start_that_fails_leaves_the_run_that_it_was_to_replace(
    workshop: Workshop, run: Path, wrong: str, error: type[Exception]
):
    before = content(run)
    with pytest.raises(error):
        headrace.train(workshop.config("any", f"run.dir={run}", "run.overwrite=true", wrong))
    assert content(run) == before


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_run_does_not_replace_the_model_that_it_starts_from(workshop: Workshop, run: Path, key: str):
    before = content(run)
    with pytest.raises(RunError, match=rf"model\.{key} = .*part of the run"):
        headrace.train(workshop.config("any", f"run.dir={run}", "run.overwrite=true", f"model.{key}={run / 'model'}"))
    assert content(run) == before


def test_a_run_that_starts_replaces_the_earlier_one_and_leave_for_that_is_not_kept(workshop: Workshop, run: Path):
    headrace.train(workshop.config("any", f"run.dir={run}", "run.overwrite=true", "loop.steps=1", reward="dense"))
    assert len(rows_of(run)) == 1
    assert not (run / files.REPLACED).exists()
    assert "overwrite = false" in (run / files.SETTINGS).read_text()
    with pytest.raises(RunError, match="holds an earlier run"):
        headrace.train(headrace.load_config(run / files.SETTINGS))


def test_a_kill_at_any_moment_of_replacing_loses_nothing(
    workshop: Workshop, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every rename and every removal may be the last thing that the process does."""

    class KilledError(BaseException):
        pass

    moves = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(*args: Any, **more: Any) -> Any:
            nonlocal moves
            moves -= 1
            if moves < 0:
                raise KilledError
            return real(*args, **more)

        return move

    before, killed = content(finished), 0
    for number in range(40):
        run = Path(shutil.copytree(finished, tmp_path / f"run{number}"))
        config = workshop.config("any", f"run.dir={run}", "run.overwrite=true")
        with monkeypatch.context() as patched:
            moves = number
            patched.setattr(Path, "rename", counted(Path.rename))
            patched.setattr(shutil, "rmtree", counted(shutil.rmtree))
            try:
                files.prepare_run_dir(config)
                files.undo_start(run)
            except KilledError:
                killed += 1
        with pytest.raises(RunError, match="holds an earlier run"):  # whoever looks next finds the old run
            files.prepare_run_dir(workshop.config("any", f"run.dir={run}"))
        assert content(run) == before, number
        if moves > 0:  # there was nothing left to kill
            break
    assert killed > 8


def test_a_failed_start_leaves_no_directory_to_resume(workshop: Workshop, tmp_path: Path):
    with pytest.raises(ModelError):
        headrace.train(workshop.config("any", f"run.dir={tmp_path / 'new'}", "model.path=/no/such/model"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ModelError):
        headrace.train(workshop.config("any", f"run.dir={tmp_path / 'mine'}", "model.path=/no/such/model"))
    assert content(tmp_path / "mine").keys() == {"notes.txt"}
    with pytest.raises(RunError, match="no run"):
        read_runs(tmp_path)


# ---- resume


@pytest.mark.parametrize("left", ["missing", "empty"])
def test_a_run_without_its_ledger_is_not_started_again_beside_its_checkpoints(run: Path, left: str):
    (run / "summary.json").unlink()
    for file in run.glob("ledger.sqlite*"):
        file.unlink()
    if left == "empty":
        (run / "ledger.sqlite").touch()
    before = content(run)
    with pytest.raises(RunError, match=r"ledger .* is missing or empty") as refused:
        headrace.resume(run)
    assert "checkpoints of steps 2, 1" in str(refused.value)
    assert f"model.path={run / 'model'}" in str(refused.value)
    assert content(run) == before


def test_a_ledger_that_is_deleted_while_the_run_writes_it_ends_the_run(workshop: Workshop, tmp_path: Path):
    run = tmp_path / "run"

    class Deleter(api.Watcher):
        def row(self, row: Row) -> None:
            if row.step == 2:
                (run / "ledger.sqlite").unlink()

    settings = (f"run.dir={run}", "loop.steps=4", "recovery.every_steps=1")
    with pytest.raises(RunError, match=r"was deleted or replaced while the run was writing it") as told:
        headrace.train(workshop.config("any", *settings, reward="dense"), Deleter())
    assert "ledger.rescued.sqlite" in str(told.value)
    (run / "ledger.rescued.sqlite").rename(run / "ledger.sqlite")  # as the message says
    headrace.resume(run)
    assert len(rows_of(run)) == 4
    assert audit(run) == []


def test_settings_that_were_edited_are_refused_unless_asked_for_and_then_booked(run: Path):
    text = (run / files.SETTINGS).read_text()
    (run / files.SETTINGS).write_text(text.replace("grad_clip = 1.0", "grad_clip = 0.5"))
    before = content(run)
    with pytest.raises(RunError, match="has changed since step 2") as refused:
        headrace.resume(run, overrides=["loop.steps=3"])
    assert "learner.grad_clip was 1.0, and is 0.5" in str(refused.value)
    assert f"headrace resume {run} learner.grad_clip=0.5" in str(refused.value)
    assert {**content(run), "ledger.sqlite": ""} == {**before, "ledger.sqlite": ""}
    assert len(rows_of(run)) == 2
    headrace.resume(run, overrides=["loop.steps=3", "learner.grad_clip=0.5"])
    with Ledger.open(run) as ledger:
        booked = {change.key: (change.step, change.before, change.after) for change in changes(ledger)}
    assert booked == {"loop.steps": (2, "2", "3"), "learner.grad_clip": (2, "1.0", "0.5")}
    shown = " ".join(command("show", run).output.split())
    assert "2 learner.grad_clip 1.0 0.5" in shown


def test_supervised_steps_on_examples_of_the_users_own(workshop: Workshop, tmp_path: Path):
    run, worked = tmp_path / "run", tmp_path / "worked.jsonl"
    worked.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    losses: list[float] = []

    class Losses(api.Watcher):
        def progress(self, done: int, total: int, text: str) -> None:
            losses.append(float(text.removeprefix("loss ")))

    settings = [f"run.dir={run}", f"warmstart.source={worked}", "warmstart.lr=0.01", "loop.steps=1"]
    with pytest.raises(ConfigError, match=r"warmstart.source needs warmstart.steps"):
        workshop.config("any", *settings)
    headrace.train(workshop.config("any", *settings, "warmstart.steps=20", reward="dense"), Losses())
    assert losses[19] < 0.1 * losses[0]
    worked.unlink()
    headrace.resume(run, overrides=["loop.steps=2"])
    assert len(rows_of(run)) == 2


def test_reward_code_that_was_edited_is_refused_unless_asked_for(workshop: Workshop, tmp_path: Path):
    run, rewards = tmp_path / "run", tmp_path / "mine.py"
    rewards.write_text("def score(completion):\n    return len(completion.text) % 5 / 5\n")
    headrace.train(workshop.config("any", f"run.dir={run}", "loop.steps=1", f"reward.function={rewards}:score"))
    rewards.write_text("def score(completion):\n    return len(completion.text) % 7 / 7\n")
    with pytest.raises(RunError, match="has changed since step 1") as refused:
        headrace.resume(run, overrides=["loop.steps=2"])
    assert f"reward.function={json.dumps(f'{rewards}:score')}" in str(refused.value)
    headrace.resume(run, overrides=["loop.steps=2", f"reward.function={rewards}:score"])
    assert len(rows_of(run)) == 2


@pytest.mark.parametrize("wrong", ["model.path=/no/such", "reward.function=/no/such.py:score"])
def test_a_restart_that_cannot_begin_changes_nothing(run: Path, wrong: str):
    before = content(run)
    with pytest.raises(HeadraceError):
        headrace.resume(run, overrides=["loop.steps=3", wrong])
    assert {**content(run), "ledger.sqlite": ""} == {**before, "ledger.sqlite": ""}
    with Ledger.open(run) as ledger:
        assert changes(ledger) == []
    assert headrace.resume(run, overrides=["loop.steps=3"])["steps"] == 3


@pytest.mark.parametrize("word", ["run.seed=3", "learner.lora_rank=2", "warmstart.steps=3"])
def test_what_cannot_change_in_a_run_is_refused(run: Path, word: str):
    with pytest.raises(HeadraceError, match="cannot change in the middle of a run"):
        headrace.resume(run, overrides=[word])


def test_a_finished_run_is_lengthened_by_more_steps(run: Path):
    with pytest.raises(RunError, match=rf"has finished its 2 steps.*headrace resume {run} loop.steps=4"):
        headrace.resume(run)
    summary = headrace.resume(run, overrides=["loop.steps=3"])
    assert (summary["steps"], summary["finished"]) == (3, True)
    assert [row.step for row in rows_of(run)] == [1, 2, 3]
    assert audit(run) == []
    with pytest.raises(RunError, match="has finished its 3 steps"):
        headrace.resume(run)


def test_resume_and_eval_work_from_any_directory(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every path was given relative to another working directory."""
    for name in ("prompts.jsonl", "rewards.py"):
        shutil.copy(workshop.directory / name, tmp_path / name)
    shutil.copytree(workshop.model, tmp_path / "tiny")
    (tmp_path / "filters.py").write_text("def keep(group):\n    return True\n")
    monkeypatch.chdir(tmp_path)
    paths = ("run.dir=run", "model.path=tiny", "prompts.source=prompts.jsonl", "reward.function=rewards:dense")
    headrace.train(workshop.config("any", *paths, 'buffer.filters=["filters.py:keep"]', "loop.steps=1"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    headrace.resume("../run", overrides=["loop.steps=2"])
    assert len(rows_of(tmp_path / "run")) == 2
    assert headrace.evaluate_run("../run") is not None


def test_servers_that_a_run_trains_with_are_not_asked_by_somebody_else(run: Path):
    at = ["rollout.engine=vllm", "rollout.command=http://127.0.0.1:9"]
    with claimed(run), pytest.raises(RunError, match=r"is training with the servers of its rollout\.command; wait"):
        headrace.evaluate_run(run, at)
    with pytest.raises(ConfigError, match=r"rollout\.command: the server at http://127\.0\.0\.1:9 cannot be used"):
        headrace.evaluate_run(run, at)
    assert not (run / "served").exists()


def test_a_run_is_evaluated_on_other_prompts_with_other_settings(run: Path, tmp_path: Path):
    other = write_prompts(tmp_path / "other.jsonl", late=[0], huge=[False], slow=[False])
    score = headrace.evaluate_run(run, [f"prompts.eval_source={other}", "prompts.eval_count=50"])
    assert score is not None
    assert score != headrace.evaluate_run(run)
    result = command("eval", run, f"prompts.eval_source={other}", "prompts.eval_count=50")
    assert result.output == f"held-out score {score:.4f}\n"
    assert command("eval", run, "prompts.nonsense=1").exit_code == 2


# ---- the end


def test_a_run_keeps_the_weights_with_the_best_score(workshop: Workshop, tmp_path: Path):
    run = tmp_path / "run"
    settings = ("loop.steps=8", "loop.eval_every=1", "loop.keep_best=true", "learner.lr=1e-2")
    summary = headrace.train(workshop.config("any", f"run.dir={run}", *settings, reward="dense"))
    scores = [row.score for row in rows_of(run)]
    best = max(range(len(scores) - 1), key=scores.__getitem__)
    assert scores[-1] is None, "that of the last step is the run's own"
    assert (summary["best_step"], summary["best_score"]) == (best + 1, scores[best])
    assert headrace.evaluate_run(run, best=True) == pytest.approx(scores[best])
    assert command("export", run, tmp_path / "out", "--best").exit_code == 0
    assert content(run / "best").items() <= content(tmp_path / "out").items()


def test_the_best_weights_need_evaluations():
    with pytest.raises(ConfigError, match=r"loop\.keep_best needs evaluations.*loop\.eval_every"):
        headrace.load_config(None, ["loop.keep_best=true"])


def test_a_run_of_skipped_steps_alone_has_failed(workshop: Workshop, tmp_path: Path):
    prompts = write_prompts(tmp_path / "huge.jsonl", huge=[True], late=[0], slow=[False])
    settings = (f"run.dir={tmp_path / 'run'}", f"prompts.source={prompts}", "loop.steps=2", "learner.advantage=dr-grpo")
    with pytest.raises(StalledError, match="the last 2 steps were skipped"):
        headrace.train(workshop.config("any", *settings, reward="huge"))


# ---- what the model writes


class Samples(api.Watcher):
    def __init__(self) -> None:
        self.found: list[Sample] = []

    def sample(self, sample: Sample) -> None:
        self.found.append(sample)


def test_samples_reach_the_terminal_and_every_sink(workshop: Workshop, tmp_path: Path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    words = [f"run.dir={run}", 'ledger.sinks=["jsonl", "tensorboard"]', "ledger.samples_every=1", "loop.steps=2"]
    result = command("train", *workshop.overrides("any", *words, reward="dense"))
    assert result.exit_code == 0, result.output
    samples = [Sample(**json.loads(line)) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {sample.step for sample in samples} == {1, 2}
    highest, lowest = samples[:2]
    assert highest.prompt == lowest.prompt
    assert highest.reward > lowest.reward
    assert f"reward {highest.reward:.3f}, buffered" in result.output
    assert f"prompt  {highest.prompt}" in result.output
    (events,) = (run / "tensorboard").iterdir()
    assert f"prompt\n    {highest.prompt}".encode() in events.read_bytes()


def test_answers_that_are_all_dropped_can_be_read(workshop: Workshop, tmp_path: Path):
    """With a reward that is always the same there is no step, and still the user sees what the model writes."""
    run, watcher = tmp_path / "run", Samples()
    settings = (f"run.dir={run}", "buffer.patience=1", "ledger.samples_every=1")
    with pytest.raises(StalledError):
        headrace.train(workshop.config("any", *settings, reward="constant"), watcher)
    assert watcher.found
    assert {(sample.reward, sample.fate) for sample in watcher.found} == {(0.5, "dropped: no_signal")}
    assert rows_of(run) == []
    shown = command("show", run).output
    assert "reward 0.500, dropped: no_signal" in shown
    with Ledger.open(run) as ledger:
        kept = read_trajectories(ledger.connection, "t.state = 'dropped'", ())
        asked = {t.prompt_id: ledger.prompt(t.prompt_id) for t in kept}
    assert len(asked) >= 4
    assert all(told["text"].endswith("=") for told in asked.values())
    assert all(told["fields"]["answer"] for told in asked.values())


def test_a_run_leaves_its_curve_as_a_file(workshop: Workshop, tmp_path: Path):
    command("train", *workshop.overrides("any", f"run.dir={tmp_path / 'a&b'}", "loop.steps=2", reward="dense"))
    svg = (tmp_path / "a&b" / "reward.svg").read_text()
    assert "a&amp;b, 2 steps" in svg
    assert svg.count("<circle") == 2  # held-out, before and after
    assert len(svg.partition('points="')[2].partition('"')[0].split()) == 2


# ---- notebooks, and Python


def test_a_reward_may_be_a_python_object_and_a_restart_asks_for_it_again(workshop: Workshop, tmp_path: Path):
    run, seen = tmp_path / "run", []

    class Rows(headrace.Watcher):
        def row(self, row: Row) -> None:
            seen.append(row.step)

    def length(completion: Any) -> float:
        return len(completion.text) / 12

    headrace.train(workshop.config("any", f"run.dir={run}", "loop.steps=1"), Rows(), reward=length)
    assert seen == [1]
    with pytest.raises(RunError, match=r"reward\.function was length, a Python object"):
        headrace.resume(run, overrides=["loop.steps=2"])
    headrace.resume(run, overrides=["loop.steps=2"], reward=length)
    assert len(rows_of(run)) == 2
    assert headrace.evaluate_run(run, reward=lambda completion: 0.25) == 0.25


def test_a_run_from_a_notebook(workshop: Workshop, tmp_path: Path):
    """Where an event loop runs already in the thread that calls."""

    async def cell() -> dict[str, Any]:
        config = workshop.config("any", f"run.dir={tmp_path / 'run'}", "loop.steps=1", reward="dense")
        return headrace.train(config)

    summary = asyncio.run(cell())
    assert summary["finished"]


def test_control_c_in_a_notebook_stops_the_run_in_an_orderly_way(workshop: Workshop, tmp_path: Path):
    run, main = tmp_path / "run", threading.get_ident()

    class Presser(api.Watcher):
        def row(self, row: Row) -> None:
            if row.step == 2:
                signal.pthread_kill(main, signal.SIGINT)

    async def cell() -> dict[str, Any]:
        return headrace.train(workshop.config("any", f"run.dir={run}", "loop.steps=100000", reward="dense"), Presser())

    signal.signal(signal.SIGINT, signal.default_int_handler)
    events = asyncio.new_event_loop()  # not asyncio.run, which has a handler of its own: a kernel has none
    with closing(events):
        summary = events.run_until_complete(cell())
    assert not summary["finished"]
    assert summary["steps"] >= 2
    assert audit(run) == []
    assert balances(books(run))
    headrace.resume(run, overrides=[f"loop.steps={summary['steps'] + 1}"])
    assert len(rows_of(run)) == summary["steps"] + 1

"""The commands, as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import forked
import pytest
import torch
from click.testing import Result
from tiny_runs import Workshop, rows_of, same_bits, weights
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config_file import DEMO, SETTINGS, load_config
from headrace.ledger.files import prepare_run_dir
from headrace.ledger.ledger import Amount
from headrace.runs.audit import audit, books

DEADLINE_S = 240.0  # only to end a test that would wait for ever


def headrace(*words: str | Path, width: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def problem(result: Result) -> str:
    """What a user's mistake is answered with: a message and exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def trained(workshop: Workshop) -> tuple[Path, Result]:
    """A finished run and what training showed."""
    result = headrace("train", *workshop.overrides("run", "loop.steps=2", reward="dense"))
    return workshop.directory / "run", result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "loop.stepz=3"], "unknown setting loop.stepz; did you mean loop.steps?"),
        (["train", "loop.steps=many"], 'loop.steps: expected a whole number at least 0; got "many"'),
        (["train", "no/such/file.toml"], "there is no file no/such/file.toml"),
        (["config", "no/such/file.toml"], "there is no file no/such/file.toml"),
        (["config", "--explain", "lop"], "unknown setting lop; did you mean loop"),
        (["train", "model.path=no/such/model", "run.dir={tmp}/run"], "no such directory or file"),
        (["train", "model.device=tpu", "run.dir={tmp}/run"], "model.device = 'tpu'"),
        (["train", "reward.function=exactly", "run.dir={tmp}/run", "warmstart.steps=0"], "did you mean 'exact'"),
        (["eval", "{tmp}"], "is not a run directory: it has no config.toml"),
        (["export", "{tmp}", "{tmp}/out"], "has no weights"),
        (["audit", "{tmp}"], "holds no run"),
    ],
)
def test_mistakes_are_answered_with_a_message(words: list[str], message: str, tmp_path: Path):
    assert message in problem(headrace(*(word.replace("{tmp}", str(tmp_path)) for word in words)))


def test_without_a_command_there_is_help():
    shown = headrace().output
    assert all(command in shown for command in ("train", "eval", "export", "audit", "config"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_explain_lists_every_setting(width: int):
    """Whole, even in a narrow terminal: a key that is cut cannot be copied."""
    result = headrace("config", "--explain", width=width)
    assert result.exit_code == 0
    words = set(result.output.split())
    assert set(SETTINGS) <= words


def test_explain_one_section_or_one_key():
    shown = headrace("config", "--explain", "loop").output
    assert "loop.max_lag" in shown
    assert "learner.lr" not in shown
    shown = headrace("config", "--explain", "loop.max_lag").output
    assert "how many versions old a new token may be" in " ".join(shown.split())
    assert "loop.steps" not in shown


def test_config_prints_resolved_settings_that_load_back(tmp_path: Path):
    result = headrace("config", "loop.max_lag=2")
    assert result.exit_code == 0
    assert tomllib.loads(result.output)["loop"]["max_lag"] == 2
    (tmp_path / "my.toml").write_text(result.output)
    demo = load_config(DEMO, ["loop.max_lag=2"])
    assert load_config(tmp_path / "my.toml") == demo
    again = headrace("config", tmp_path / "my.toml", "loop.steps=3")
    assert tomllib.loads(again.output)["loop"] == demo.loop.model_dump() | {"steps": 3}


def test_training_shows_how_it_went(trained: tuple[Path, Result]):
    run, result = trained
    assert result.exit_code == 0, result.output
    summary = json.loads((run / "summary.json").read_text())
    shown = result.output
    assert f"{summary['score_before']:.3f}" in shown
    assert f"{summary['score_after']:.3f}" in shown
    assert f"{summary['trained_tokens']:,}" in shown
    assert f"headrace audit {run}" in shown


def test_quiet_training_shows_nothing(workshop: Workshop):
    result = headrace("train", "--quiet", *workshop.overrides("quiet", "loop.steps=1"))
    assert result.exit_code == 0
    assert result.output.strip() == ""
    assert (workshop.directory / "quiet" / "summary.json").exists()


def test_training_from_a_file(workshop: Workshop, tmp_path: Path):
    listing = headrace("config", *workshop.overrides("filed", "loop.steps=1")).output
    (tmp_path / "my.toml").write_text(listing)
    assert headrace("train", tmp_path / "my.toml", "loop.steps=0").exit_code == 0
    assert rows_of(workshop.directory / "filed") == []


def test_an_earlier_run_is_refused_or_replaced(trained: tuple[Path, Result], workshop: Workshop):
    shutil.copytree(trained[0], workshop.directory / "again")
    words = workshop.overrides("again", "loop.steps=1")
    assert "holds an earlier run" in problem(headrace("train", *words))
    assert len(rows_of(workshop.directory / "again")) == 2
    assert headrace("train", *words, "run.overwrite=true").exit_code == 0
    assert len(rows_of(workshop.directory / "again")) == 1


def test_eval_gives_the_score_the_run_ended_with(trained: tuple[Path, Result]):
    result = headrace("eval", trained[0])
    score = json.loads((trained[0] / "summary.json").read_text())["score_after"]
    assert result.exit_code == 0
    assert result.output.strip() == f"held-out score {score:.4f}"


def test_export_loads_in_transformers(trained: tuple[Path, Result], tmp_path: Path):
    out = tmp_path / "out"
    assert headrace("export", trained[0], out).exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(trained[0]).items())
    assert "not an empty directory" in problem(headrace("export", trained[0], out))


def test_audit_of_a_sound_run(trained: tuple[Path, Result]):
    result = headrace("audit", trained[0])
    assert result.exit_code == 0, result.output
    assert "the books balance" in result.output
    assert f"{books(trained[0]).trained.tokens:,}" in result.output


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        ("UPDATE accounts SET tokens = tokens + 1 WHERE name = 'trained'", "account trained holds"),
        ("DELETE FROM rows WHERE step = 2", "tokens trained"),
    ],
)
def test_audit_of_damaged_books(trained: tuple[Path, Result], tmp_path: Path, damage: str, finding: str):
    shutil.copytree(trained[0], tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as connection, connection:
        connection.execute(damage)
    result = headrace("audit", tmp_path / "run")
    assert result.exit_code == 1
    assert finding in result.output
    assert "the books do not balance" in result.output


def test_audit_of_a_file_that_is_no_database(trained: tuple[Path, Result], tmp_path: Path):
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database" * 100)
    assert "damaged" in problem(headrace("audit", tmp_path))


def command(*words: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
    app(list(words))


def stopped_by(number: signal.Signals, workshop: Workshop) -> Path:
    """A run of many steps that got a signal after its third."""
    run, until_s = workshop.directory / f"stopped-{number.name}", time.monotonic() + DEADLINE_S
    extra = ("loop.steps=100000", 'ledger.sinks=["jsonl"]', "loop.max_lag=1")
    words = workshop.overrides(run.name, *extra, reward="dense")
    log, rows = workshop.directory / f"{run.name}.log", run / "rows.jsonl"
    process = forked.start(log, command, "train", *words)
    try:
        while not rows.exists() or rows.read_text().count("\n") < 3:
            assert process.exitcode is None, log.read_text()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.join(DEADLINE_S)
    finally:
        process.kill()
    output = log.read_text()
    assert process.exitcode == 130, output
    assert "Traceback" not in output
    assert f"headrace resume {run}" in output
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_cleanly_and_it_can_be_resumed(workshop: Workshop, number: signal.Signals):
    run = stopped_by(number, workshop)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] is False
    assert summary["score_after"] is None
    assert 3 <= summary["steps"] == summary["version"] == len(rows_of(run))
    assert audit(run) == []
    assert books(run).in_flight == Amount()
    assert not same_bits(weights(run), weights_at(workshop))
    assert headrace("audit", run).exit_code == 0
    result = headrace("resume", run, f"loop.steps={summary['steps'] + 1}")
    assert result.exit_code == 0, result.output
    assert json.loads((run / "summary.json").read_text())["finished"] is True
    assert [row.step for row in rows_of(run)] == list(range(1, summary["steps"] + 2))
    assert audit(run) == []


def test_control_c_before_the_first_checkpoint_leaves_nothing_behind(tmp_path: Path):
    run, log, until_s = tmp_path / "run", tmp_path / "log", time.monotonic() + DEADLINE_S
    process = forked.start(log, command, "train", f"run.dir={run}", "warmstart.steps=100000", "model.threads=1")
    try:
        while not log.exists() or "warm start" not in log.read_text():
            assert process.exitcode is None, log.read_text()
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        process.join(DEADLINE_S)
    finally:
        process.kill()
    assert process.exitcode == 130, log.read_text()
    assert "interrupted; there was no checkpoint yet" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not run.exists()


@pytest.mark.parametrize("interrupt", ["SIG_IGN", "default_int_handler"])  # scripts ignore it for background jobs
def test_sigterm_is_control_c_in_every_part_of_a_command(interrupt: str):
    code = (
        f"import os, signal, time; signal.signal(signal.SIGINT, signal.{interrupt})\n"
        "from headrace.cli.app import prepare_process; prepare_process()\n"
        "try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_runs_that_start_within_one_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = load_config(DEMO)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: prepare_run_dir(config), range(24)))
    assert len(set(found)) == 24
    assert all((run / "config.toml").is_file() for run in found)
    assert {run.parent for run in found} == {Path("runs")}


def weights_at(workshop: Workshop) -> dict[str, torch.Tensor]:
    """The weights every run starts from."""
    model = AutoModelForCausalLM.from_pretrained(workshop.model)
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}

"""Whatever is typed: no traceback, no lost run. Hypothesis makes up commands, settings and values."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_runs import Workshop
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from headrace.config_file import SETTINGS

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
# `dash` serves until it is stopped; what makes work for minutes is not for a fuzzer
QUICK = sorted(set(COMMANDS) - {"dash", "train", "plan", "simulate"})
ODD = [
    "",
    "0",
    "-1",
    "1e999",
    "nan",
    "true",
    "[]",
    "{}",
    '[""]',
    "~",
    "..",
    "/dev/null",
    "/no/such",
    "ü\x00",
    "9" * 30,
    "demo",
]
FUZZ = hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

values = st.sampled_from(ODD) | st.text(max_size=20) | st.integers().map(str) | st.floats().map(str)
keys = st.sampled_from(sorted(SETTINGS)) | st.text(max_size=12)
overrides = st.builds("{}={}".format, keys, values)
options = st.sampled_from(
    ["--best", "--samples", "--explain", "--json", "--quiet", "--trajectory", "--push", "--help", "--port"]
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("fuzz"))
    headrace.train(shop.config("run", "loop.steps=1", reward="dense"))
    return shop


def digest(directory: Path) -> dict[str, str]:
    """Of what a run is: its settings, weights and checkpoints. Opening a ledger may rewrite its header."""
    kept = [
        path for path in directory.rglob("*") if path.is_file() and path.suffix in (".toml", ".safetensors", ".json")
    ]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def typed(*words: str) -> None:
    """Every end is an exit status with words: 0, or 1, 2 and 130 with a message."""
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    assert result.exit_code in (0, 1, 2, 130)
    assert result.exit_code == 0 or result.output.strip(), "a failure without a word"


@FUZZ
@given(
    command=st.sampled_from(QUICK),
    words=st.lists(st.sampled_from(["RUN", "OUT"]) | values | overrides | options, max_size=4),
)
@example(command="eval", words=["RUN", "loop.eval_samples=0"])
@example(command="resume", words=["RUN", "loop.steps=0"])
@example(command="export", words=["RUN", "RUN"])
@example(command="show", words=["RUN", "--trajectory", ""])
def test_no_command_ends_in_a_traceback_or_takes_a_run_away(
    workshop: Workshop,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: list[str],
):
    here = tmp_path_factory.mktemp("here")
    run = Path(shutil.copytree(workshop.directory / "run", here / "run"))
    monkeypatch.chdir(here)
    before = digest(run)
    places = {"RUN": str(run), "OUT": str(here / "out")}
    typed(command, *(places.get(word, word) for word in words))
    after = digest(run)
    if command == "resume":  # it may go on with the run, if it was asked to
        assert before.keys() <= after.keys() | {"summary.json"}
    else:
        assert before.items() <= after.items()  # `trace` adds a file


@FUZZ
@given(words=st.lists(overrides, min_size=1, max_size=3))
@example(words=["run.overwrite=true", "model.path=/no/such"])
@example(words=["~\x00="])
@example(words=["run.overwrite=true", "reward.timeout_s=0.01"])
def test_no_setting_ends_a_start_in_a_traceback_or_takes_the_earlier_run_away(
    workshop: Workshop, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    """`loop.steps=0`: everything is checked and loaded, nothing is trained. A start that succeeds may replace a run."""
    here = tmp_path_factory.mktemp("here")
    run = Path(shutil.copytree(workshop.directory / "run", here / "run"))
    monkeypatch.chdir(here)
    before = digest(run)
    last = [f"run.dir={run}", "loop.steps=0", "place.cluster=local", "ledger.sinks=[]", "prompts.count=50"]
    most = ["rollout.max_new_tokens=12", "prompts.eval_count=4", "loop.eval_samples=1", "warmstart.steps=0"]
    result = CliRunner().invoke(app, ["train", *workshop.overrides("any", *words, *last, *most, reward="dense")])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    assert result.exit_code in (0, 2)
    if result.exit_code:
        assert digest(run) == before

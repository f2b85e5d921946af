"""What every command does alike: help, version, paths, and an output that cannot be written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from headrace import __version__
from headrace.cli import app
from headrace.config_file import explain


def headrace(*words: str, width: int = 80, home: Path | None = None) -> Result:
    env = {"COLUMNS": str(width), "TERM": "dumb"} | ({"HOME": str(home)} if home else {})
    return CliRunner(env=env).invoke(app, list(words))


def test_the_version_is_printed():
    result = headrace("--version")
    assert (result.exit_code, result.output) == (0, f"headrace {__version__}\n")


def test_help_begins_with_the_commands_of_a_first_run():
    named = re.findall(r"^│ (\w+) {2,}\S", headrace("--help").output, re.MULTILINE)
    assert named[:4] == ["train", "resume", "eval", "export"]
    assert len(named) == len(set(named)) == len(app.registered_commands) + len(app.registered_groups)


@pytest.mark.parametrize("width", [60, 80])
def test_explanations_are_readable_in_a_narrow_terminal(width: int):
    """Two lines for most settings, no word broken: a column per word would have many short lines."""
    lines = headrace("config", "--explain", width=width).output.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 3.5 * len(explain())
    words = {word for setting in explain() for word in setting.doc.split()}
    assert words <= set(" ".join(lines).split())


WITH_A_RUN = [
    ["show", "~/none"],
    ["audit", "~/none"],
    ["triage", "~/none"],
    ["trace", "~/none"],
    ["eval", "~/none"],
    ["resume", "~/none"],
    ["export", "~/none", "~/out"],
    ["simulate", "--from=~/none"],
]


@pytest.mark.parametrize("words", WITH_A_RUN, ids=lambda words: words[0])
def test_a_tilde_in_a_run_is_the_home_directory(words: list[str], tmp_path: Path):
    result = headrace(*words, home=tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}/none" in result.stderr


def test_a_tilde_in_a_settings_file_is_the_home_directory(tmp_path: Path):
    (tmp_path / "my.toml").write_text("[loop]\nsteps = 7\n")
    assert "steps = 7\n" in headrace("config", "~/my.toml", home=tmp_path).output


def command(*words: str, output: int) -> tuple[int, str]:
    """Its exit code and its messages, with `output` as its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", *words], stdout=output, stderr=subprocess.PIPE, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("word", ["config", "--help"])
def test_an_output_on_a_full_disk_is_one_sentence(word: str):
    with Path("/dev/full").open("w") as full:
        code, messages = command(word, output=full.fileno())
    assert (code, messages) == (2, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("words", [["config"], ["config", "--explain"]])
def test_a_reader_that_has_read_enough_gets_no_message(words: list[str]):
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    with reader.stdin as closed:
        code, messages = command(*words, output=closed.fileno())
    assert messages == ""
    assert code != 0

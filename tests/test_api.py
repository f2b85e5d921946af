"""What `import headrace` offers, on tiny runs."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Workshop, rows_of, same_bits, weights, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace import api
from headrace.config import Config
from headrace.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    ModelError,
    RunError,
    StalledError,
)
from headrace.ledger.files import prepare_run_dir
from headrace.ledger.journal import row_from_json
from headrace.measured import Row


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("api"))


@dataclass
class Diary(api.Watcher):
    """Everything a watcher is told."""

    entries: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def header(self, config: Config, run_dir: Path, facts: Any) -> None:
        self.entries.append("header")
        self.facts = dict(facts)

    def phase(self, text: str) -> None:
        self.entries.append(text)

    def progress(self, done: int, total: int, text: str) -> None:
        self.entries.append(f"{done}/{total}")

    def row(self, row: Row) -> None:
        self.entries.append("row")
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.entries.append(f"note: {text}")


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    run: Path
    summary: dict[str, Any]
    diary: Diary


@pytest.fixture(scope="module")
def finished(workshop: Workshop) -> Finished:
    diary = Diary()
    extra = ('ledger.sinks=["jsonl"]', "loop.eval_samples=3", "loop.steps=2", "learner.lr=1e-2")
    summary = headrace.train(workshop.config("run", *extra, reward="dense"), diary)
    return Finished(workshop.directory / "run", summary, diary)


def test_a_watcher_is_told_what_happens_in_order(finished: Finished):
    training = f"training; held-out score before: {finished.summary['score_before']:.3f}"
    expected = ["header", "evaluation before", training, "row", "row", "evaluation after"]
    assert finished.diary.entries == expected
    assert finished.diary.rows == rows_of(finished.run)
    assert finished.diary.facts["data"] == "46 prompts to train on, 4 held out"


def test_rows_are_exported_as_they_are_in_the_ledger(finished: Finished):
    lines = (finished.run / "rows.jsonl").read_text().splitlines()
    assert [row_from_json(line) for line in lines] == rows_of(finished.run)


def test_the_settings_of_a_run_load_back(finished: Finished, workshop: Workshop):
    assert headrace.load_config(finished.run / "config.toml").loop.eval_samples == 3
    assert api.files.run_config(finished.run).learner.lr == 1e-2


def test_evaluating_a_run_gives_the_score_it_ended_with(finished: Finished):
    """The saved weights are the trained ones, to the last answer."""
    assert finished.summary["score_after"] != finished.summary["score_before"]
    assert headrace.evaluate_run(finished.run) == finished.summary["score_after"]
    one = headrace.evaluate_run(finished.run, ["loop.eval_samples=1"])
    assert one is not None
    assert 0.0 <= one <= 1.0


def test_evaluating_leaves_the_run_as_it_was(finished: Finished):
    before = {path: path.stat().st_mtime_ns for path in finished.run.rglob("*") if path.is_file()}
    headrace.evaluate_run(finished.run, ["loop.eval_samples=1"])
    assert {path: path.stat().st_mtime_ns for path in finished.run.rglob("*") if path.is_file()} == before


def test_an_export_loads_in_transformers(finished: Finished, tmp_path: Path):
    out = headrace.export(finished.run, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = weights(finished.run)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], trained[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(out)("12+34=")["input_ids"]
    start = load_file(api.files.run_config(finished.run).model.path + "/model.safetensors")
    assert not same_bits(trained, start)


def test_an_export_needs_an_empty_place(finished: Finished, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    headrace.export(finished.run, tmp_path / "empty")
    with pytest.raises(RunError, match="exists and is not an empty directory"):
        headrace.export(finished.run, tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="file"):
        headrace.export(finished.run, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_is_no_run(tmp_path: Path):
    with pytest.raises(RunError, match="is not a run directory"):
        headrace.evaluate_run(tmp_path)
    with pytest.raises(RunError, match="has no weights"):
        headrace.export(tmp_path, tmp_path / "out")


def test_an_earlier_run_is_only_replaced_when_told_to(finished: Finished, workshop: Workshop):
    copy = workshop.directory / "copy"
    shutil.copytree(finished.run, copy)
    with pytest.raises(RunError, match=r"holds an earlier run.*run\.overwrite=true"):
        headrace.train(workshop.config("copy", "loop.steps=1"))
    assert json.loads((copy / "summary.json").read_text()) == finished.summary
    headrace.train(workshop.config("copy", "loop.steps=1", "run.overwrite=true"))
    assert len(rows_of(copy)) == 1
    assert not (copy / "rows.jsonl").exists()  # it was the earlier run's


def test_what_a_stalled_run_learned_is_kept(workshop: Workshop):
    """Two steps go well, then every reward is the same."""
    path = write_prompts(workshop.directory / "dull.jsonl", dull=[False] * 8 + [True])
    extra = (f"prompts.source={path}", "prompts.select=in-order", "buffer.patience=1", "loop.steps=9")
    with pytest.raises(StalledError):
        headrace.train(workshop.config("dull", *extra, reward="dull"))
    run = workshop.directory / "dull"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"], summary["score_after"]) == (False, 2, None)
    assert not same_bits(weights(run), load_file(workshop.model / "model.safetensors"))


def test_an_unnamed_run_gets_a_dated_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = prepare_run_dir(Config())
    assert run.parent == Path("runs")
    assert headrace.load_config(run / "config.toml") == Config()


def test_a_run_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        prepare_run_dir(headrace.load_config(None, [f"run.dir={tmp_path / 'file' / 'run'}"]))


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("model.path=no/such/model", ModelError, "no such directory or file"),
        ("prompts.source=no/such/file.jsonl", DataError, "file.jsonl"),
        ("prompts.eval_count=50", DataError, "leaves none to train on"),
        ("rollout.max_new_tokens=400", ConfigError, "the model's context of 256"),
        ('buffer.filters=["no_module:keep"]', ConfigError, "buffer.filters"),
        ("warmstart.steps=3", DataError, "needs records with an answer"),
    ],
)
def test_mistakes_leave_the_directory_free(workshop: Workshop, override: str, error: type[Exception], message: str):
    """A run that never began does not have to be overwritten."""
    name = "".join(filter(str.isalnum, override))
    with pytest.raises(error, match=message):
        headrace.train(workshop.config(name, override))
    headrace.train(workshop.config(name, "loop.steps=0"))


def test_a_missing_library_leaves_the_directory_free(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "headrace.ledger.sink_wandb", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[wandb\]'"):
        headrace.train(workshop.config("unsunk", 'ledger.sinks=["wandb"]'))
    headrace.train(workshop.config("unsunk", "loop.steps=0"))


def test_answers_that_nobody_can_score_have_no_score(workshop: Workshop):
    summary = headrace.train(workshop.config("unscored", "loop.steps=0", reward="broken"))
    assert summary["score_before"] is None
    assert summary["score_after"] is None
    assert headrace.evaluate_run(workshop.directory / "unscored") is None


def test_a_warm_start_is_part_of_the_run(workshop: Workshop):
    path = write_prompts(workshop.directory / "worked.jsonl", worked=["abc"], huge=[False] * 4 + [True] * 4 + [False])
    diary = Diary()
    extra = (f"prompts.source={path}", "prompts.select=in-order", "learner.advantage=dr-grpo")
    warm = ("warmstart.steps=2", "warmstart.examples=2")
    headrace.train(workshop.config("warm", *extra, *warm, "loop.steps=2", reward="huge"), diary)
    assert diary.entries[:4] == [
        "header",
        "warm start: 2 supervised steps on worked examples",
        "1/2",
        "2/2",
    ]
    assert [entry for entry in diary.entries if entry.startswith("note")] == [
        "note: step 2: the gradient was not finite; the weights stay as they were"
    ]

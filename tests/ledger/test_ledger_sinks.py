from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import fields

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from headrace.config import Config, LedgerSection
from headrace.errors import MissingExtraError
from headrace.ledger.journal import row_from_json
from headrace.ledger.sinks import open_sinks, scalars
from headrace.measured import ROW_METRICS, Row, Sample


def with_sinks(*names: str) -> Config:
    return Config(ledger=LedgerSection(sinks=names))


def test_scalars_of_a_row(make_row):
    row = make_row(3, trained_tokens=10, dropped_tokens={"no_signal": 4}, score=0.75)
    values = scalars(row)
    assert values["reward/mean"] == 0.25
    assert values["lag/max"] == 1.0
    assert values["stage_s/rollout"] == 1.5
    assert values["stage_s/reference"] == 0.0
    assert values["dropped_tokens/no_signal"] == 4.0
    assert values["eval/score"] == 0.75
    assert values["goodput/trained_tokens_per_s"] == 5.0
    assert all(type(value) is float for value in values.values())
    assert "eval/score" not in scalars(make_row(3))


def test_every_field_of_a_row_is_shown(make_row):
    plain = [field.name for field in fields(make_row(1)) if field.name not in ("step", "dropped_tokens", "stage_s")]
    numbers = {name: float(1000 + i) for i, name in enumerate(plain)}
    assert set(numbers.values()) <= set(scalars(make_row(1, **numbers)).values())


def test_every_number_of_a_row_is_declared_once():
    several = {"step", "dropped_tokens", "stage_s"}  # the x-axis, and what holds more than one number
    assert {field.name for field in fields(Row)} - set(ROW_METRICS) == several
    labels = [metric.label for metric in ROW_METRICS.values()]
    exported = [metric.exported or name for name, metric in ROW_METRICS.items()]
    assert len(set(labels)) == len(set(exported)) == len(ROW_METRICS)
    assert min(len(metric.help) for metric in ROW_METRICS.values()) > 0


def test_no_sinks_by_default(tmp_path):
    assert open_sinks(Config(), tmp_path) == []


def test_jsonl_has_complete_rows_at_once(tmp_path, make_row):
    (sink,) = open_sinks(with_sinks("jsonl"), tmp_path)
    rows = [make_row(1, dropped_tokens={"stale": 2}), make_row(2, grad_norm=math.inf, score=0.5)]
    for row in rows:
        sink.row(row)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [row_from_json(line) for line in lines] == rows
    assert json.loads(lines[0])["stage_s"]["rollout"] == 1.5

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(lines[1], parse_constant=refuse)
    sink.close()


def test_tensorboard_file_is_read_back(tmp_path, make_row):
    (sink,) = open_sinks(with_sinks("tensorboard").but(run={"seed": 7}), tmp_path)
    sink.row(make_row(1, reward_mean=0.5))
    sink.row(make_row(2, reward_mean=0.75, loss=math.nan))
    sink.sample(SAMPLE)
    sink.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    found, config, sample = {}, "", ""
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.tag == "config/text_summary":
                config = value.tensor.string_val[0].decode()
            elif value.tag == "sample/text_summary":
                sample = value.tensor.string_val[0].decode()
            else:
                found[event.step, value.tag] = value.tensor.float_val[0]
    assert found[1, "reward/mean"] == 0.5
    assert found[2, "reward/mean"] == 0.75
    assert math.isnan(found[2, "learner/loss"])
    assert {tag for step, tag in found if step == 1} == set(scalars(make_row(1)))
    assert '"seed": 7' in config
    assert "    prompt\n    1+1=" in sample


SAMPLE = Sample(step=4, prompt="1+1=", answer="<b>3", reward=0.5, fate="dropped: no_signal")


def test_wandb_gets_project_config_rows_and_samples(tmp_path, make_row, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)), finish=lambda: calls.append(("finish",))
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(("init", options)) or run
    fake.Html = lambda text, inject: text
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "headrace.ledger.sink_wandb", raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for _ in range(2):  # as a run and its restart do
        (sink,) = open_sinks(with_sinks("wandb").but(rollout={"command": "http://:KEY@a:8000"}), tmp_path)
        sink.sample(SAMPLE)
        sink.row(make_row(4))
        sink.close()
    monkeypatch.delitem(sys.modules, "headrace.ledger.sink_wandb")
    id = calls[0][1]["id"]
    where = {"project": "mine", "name": tmp_path.name, "dir": str(tmp_path), "id": id, "resume": "allow"}
    sample = "<pre>reward 0.5, dropped: no_signal\n\nprompt\n1+1=\n\nanswer\n&lt;b&gt;3</pre>"
    logged = [("log", 4, {"sample": sample}), ("log", 4, scalars(make_row(4)))]
    config = with_sinks("wandb").but(rollout={"command": "http://a:8000"}).model_dump(mode="json")
    assert calls == [("init", where | {"config": config}), *logged, ("finish",)] * 2


@pytest.mark.parametrize("library", ["wandb", "tensorboard"])
def test_a_missing_library_is_named_with_its_remedy(tmp_path, monkeypatch, library):
    for name in [name for name in sys.modules if library in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"headrace.ledger.sink_{library}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install -e '\.\[{library}\]'"):
        open_sinks(with_sinks("jsonl", library), tmp_path)

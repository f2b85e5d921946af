"""Before the first step: do engine and learner agree?"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from tiny_runs import Workshop, rows_of, same_bits, timeless, weights

from headrace import api
from headrace.errors import ModelError
from headrace.loop import self_check
from headrace.measured import Mismatch
from headrace.policy.policy import Policy
from headrace.runs.audit import audit


class Notes(api.Watcher):
    """What a user is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


TBA = ("learner.loss=tba", "learner.kl_coef=0.1", "learner.kl_in=reward")


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("rollout.top_p=0.8", "rollout.temperature=0.7"),
        ("rollout.temperature=[0.7,1.5]",),
        ("rollout.temperature=[0.7,1.5]", *TBA),
    ],
)
def test_a_sound_run_is_told_nothing_and_its_summary_has_the_number(workshop: Workshop, extra: tuple[str, ...]):
    notes = Notes()
    summary = api.train(workshop.config("-".join(("sound", *extra)), "loop.steps=1", *extra, reward="dense"), notes)
    assert notes.notes == []
    assert 0 < summary["mismatch_before"] < 1e-5
    kept = json.loads((workshop.directory / "-".join(("sound", *extra)) / "summary.json").read_text())
    assert kept["mismatch_before"] == summary["mismatch_before"]


def warm_learner(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The learner computes with another temperature than the engine."""
    stock = Policy.logprobs

    def warmer(self: Policy, ids, plan, at, temperature, *replay):  # type: ignore[no-untyped-def]
        return stock(self, ids, plan, at, factor * temperature, *replay)

    monkeypatch.setattr(Policy, "logprobs", warmer)


def test_a_learner_that_computes_something_else_is_told_at_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    warm_learner(monkeypatch, 1.05)
    notes = Notes()
    summary = api.train(workshop.config("wrong", "loop.steps=1", reward="dense"), notes)
    (note,) = notes.notes
    assert f"{summary['mismatch_before']:.2g} nats away from the engine's on average" in note
    assert "Rounding in float32 explains at most 0.001" in note


def test_a_learner_far_from_the_engine_does_not_train(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    warm_learner(monkeypatch, 8.0)
    message = r"the run does not start: .* are (0\.\d+|\d) nats away .* Try model\.dtype=float32"
    with pytest.raises(ModelError, match=message):
        api.train(workshop.config("far", "loop.steps=1", reward="dense"))
    assert not (workshop.directory / "far" / "model").exists()


def test_no_run_starts_beyond_the_limit_and_none_is_refused_below():
    assert self_check.verdict(Mismatch(count=10, mean_abs=self_check.FAR), "float32")
    for distance in (1.01 * self_check.FAR, math.inf, math.nan):
        with pytest.raises(ModelError, match="10 sampled tokens"):
            self_check.verdict(Mismatch(count=10, mean_abs=distance), "float32")
    assert max(self_check.LARGE.values()) < self_check.FAR


def test_what_could_not_be_checked_is_told(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.policy.probe.MOST_FLOP", {"cpu": 0.0})
    path = workshop.directory / "windowed"
    shutil.copytree(workshop.model, path)
    config = json.loads((path / "config.json").read_text())
    window = {"sliding_window": 20, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    (path / "config.json").write_text(json.dumps(config | window))
    notes = Notes()
    api.train(workshop.config("windowed-run", "loop.steps=1", f"model.path={path}", reward="dense"), notes)
    (note,) = notes.notes
    assert note.startswith("Qwen3ForCausalLM has a sliding window of 20 tokens")


def test_an_exact_run_is_exact(workshop: Workshop):
    summary = api.train(
        workshop.config("exact", "loop.steps=1", "model.exact=true", "rollout.top_p=0.8", reward="dense")
    )
    assert summary["mismatch_before"] == 0


def test_an_exact_run_that_is_not_does_not_start(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    warm_learner(monkeypatch, 1.000001)
    with pytest.raises(ModelError, match=r"model\.exact = true, but .* sampled tokens are \d.*e-\d+ nats away"):
        api.train(workshop.config("inexact", "loop.steps=1", "model.exact=true", reward="dense"))
    assert not (workshop.directory / "inexact" / "model").exists()


def test_the_least_difference_is_refused_in_exact_mode():
    assert self_check.verdict(Mismatch(count=10), "float32", exact=True) == ""
    for distance in (1e-12, math.nan):
        with pytest.raises(ModelError, match="10 sampled tokens"):
            self_check.verdict(Mismatch(count=10, mean_abs=distance), "float32", exact=True)


def test_the_check_leaves_no_trace_in_the_run(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    def train(name: str) -> Path:
        api.train(workshop.config(name, "loop.steps=2", reward="dense"))
        return workshop.directory / name

    checked = train("checked")

    async def nothing(*_: object) -> float:
        return 0.0

    monkeypatch.setattr(api, "_self_check", nothing)
    unchecked = train("unchecked")
    assert same_bits(weights(checked), weights(unchecked))
    assert [timeless(row) for row in rows_of(checked)] == [timeless(row) for row in rows_of(unchecked)]
    assert audit(checked) == []


@pytest.mark.parametrize(("dtype", "limit"), self_check.LARGE.items())
def test_the_warning_begins_where_rounding_ends(dtype: str, limit: float):
    assert self_check.verdict(Mismatch(count=10, mean_abs=0.99 * limit), dtype) == ""
    text = self_check.verdict(Mismatch(count=10, mean_abs=2 * limit), dtype)
    assert "10 sampled tokens" in text
    assert ("model.dtype=float32" in text) == (dtype in ("bfloat16", "float16"))

"""summary.json: totals that agree with the ledger, and seconds that are those of the steps."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import NUM_PROMPTS, Workshop, rows_of, select, write_prompts

from headrace import api
from headrace.measured import STAGES, Row
from headrace.runs.audit import books

PUBLIC = {
    "score_before",
    "score_after",
    "wall_s",
    "steps",
    "version",
    "generated_tokens",
    "trained_tokens",
    "dropped_tokens",
    "goodput_tokens_per_s",
    "mean_lag_seen",
    "max_lag_seen",
    "stage_s",
    "wall",
}


@dataclass
class Stopwatch(api.Watcher):
    """When the training phase began, and when each row came."""

    began_s: float = 0.0
    rows_s: list[float] = field(default_factory=list)

    def phase(self, text: str) -> None:
        if text.startswith("training"):
            self.began_s = time.monotonic()

    def row(self, row: Row) -> None:
        self.rows_s.append(time.monotonic())


@dataclass(frozen=True)
class Finished:
    """A run with a pull towards the reference, and slow verdicts on the held-out answers."""

    run: Path
    summary: dict[str, Any]
    watch: Stopwatch


@pytest.fixture(scope="module")
def finished(workshop: Workshop) -> Finished:
    path = write_prompts(workshop.directory / "examiner.jsonl", late=[0] * (NUM_PROMPTS - 4) + [1])
    watch = Stopwatch()
    extra = (f"prompts.source={path}", "learner.kl_coef=0.1", "loop.max_lag=1", "loop.steps=4", "loop.eval_every=2")
    summary = api.train(workshop.config("summed", *extra, "reward.cache=false", reward="late"), watch)
    return Finished(workshop.directory / "summed", summary, watch)


def test_what_is_returned_is_what_is_written(finished: Finished):
    assert json.loads((finished.run / "summary.json").read_text()) == finished.summary


def test_public_keys(finished: Finished):
    assert finished.summary.keys() >= PUBLIC
    assert set(finished.summary["stage_s"]) == set(STAGES) == {"rollout", "reward", "reference", "train", "publish"}
    assert finished.summary["finished"] is True


def test_tokens_are_those_of_the_books(finished: Finished):
    summary, held = finished.summary, books(finished.run)
    assert summary["generated_tokens"] == held.generated.tokens > 0
    assert summary["trained_tokens"] == held.trained.tokens > 0
    assert summary["dropped_tokens"] == {reason: amount.tokens for reason, amount in held.dropped.items()}
    assert summary["generated_tokens"] == summary["trained_tokens"] + sum(summary["dropped_tokens"].values())


def test_numbers_are_those_of_the_rows(finished: Finished):
    summary, rows = finished.summary, rows_of(finished.run)
    assert summary["steps"] == len(rows) == 4
    assert summary["version"] == rows[-1].version == 4
    assert summary["trained_tokens"] == sum(row.trained_tokens for row in rows)
    assert summary["max_lag_seen"] == max(row.lag_max for row in rows)
    (lag,) = select(finished.run, "SELECT MAX(lag) FROM trajectories WHERE state = 'trained'")[0]
    assert summary["max_lag_seen"] == lag <= 1
    mean = "SELECT SUM(lag * num_tokens) * 1.0 / SUM(num_tokens) FROM trajectories WHERE state = 'trained'"
    assert summary["mean_lag_seen"] == pytest.approx(select(finished.run, mean)[0][0])
    assert summary["loop_s"] == pytest.approx(sum(row.wall_s for row in rows))
    assert summary["goodput_tokens_per_s"] == pytest.approx(summary["trained_tokens"] / summary["loop_s"])
    for stage in STAGES:
        assert summary["stage_s"][stage] == pytest.approx(sum(getattr(row.stage_s, stage) for row in rows))
    assert summary["wall"] == max(STAGES, key=summary["stage_s"].__getitem__)


def test_evaluations_are_in_no_row(finished: Finished):
    """The steps' seconds fit between the start of training and the last row, less the evaluation in between."""
    assert finished.summary["loop_s"] <= finished.watch.rows_s[-1] - finished.watch.began_s
    assert finished.summary["wall_s"] > finished.summary["loop_s"] + 3 * 0.2  # each evaluation waits for a verdict


def test_no_stage_is_busier_than_the_clock(finished: Finished):
    for row in rows_of(finished.run):
        assert all(0 <= getattr(row.stage_s, stage) <= row.wall_s + 1e-9 for stage in STAGES)


def test_every_stage_was_measured(finished: Finished):
    assert all(finished.summary["stage_s"][stage] > 0 for stage in STAGES)


def test_divergence_from_the_reference_is_told(finished: Finished):
    """The first step starts from the reference itself; later ones have left it."""
    rows = rows_of(finished.run)
    assert rows[0].kl_reference == pytest.approx(0.0, abs=1e-9)
    assert rows[-1].kl_reference > 1e-7


def test_a_run_without_steps(workshop: Workshop):
    summary = api.train(workshop.config("stepless", "loop.steps=0"))
    assert summary["steps"] == summary["version"] == summary["trained_tokens"] == 0
    assert summary["goodput_tokens_per_s"] == 0.0
    assert summary["score_before"] == summary["score_after"]  # the same noise, the same weights
    assert summary["stage_s"] == dict.fromkeys(STAGES, 0.0)


def test_drafts_change_speed_and_nothing_else(workshop: Workshop):
    extra = ("loop.steps=1", "rollout.temperature=0.05", "rollout.max_new_tokens=80", "rollout.stop=[]")
    dense = "buffer.drop=nothing"
    plain, drafted = (
        api.train(workshop.config(f"draft{n}", *extra, dense, f"rollout.speculate={n}", reward="dense")) for n in (0, 8)
    )
    assert plain["drafted_tokens"] == 0 < drafted["accepted_tokens"] <= drafted["drafted_tokens"]
    for key in ("generated_tokens", "trained_tokens", "score_before"):
        assert drafted[key] == plain[key]

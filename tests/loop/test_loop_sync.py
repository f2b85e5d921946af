"""Strictly on-policy: nothing old is trained on, and a seed decides the run to the last bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_runs import NUM_PROMPTS, Workshop, play, rows_of, same_bits, select, timeless, weights, write_prompts

from headrace import api
from headrace.buffer.buffer import LagPolicy
from headrace.loop.loop import Loop
from headrace.place.place import Place
from headrace.runs.audit import audit
from headrace.types import Item


@dataclass(frozen=True)
class Twins:
    """Two runs with one seed, whose rewards came in whatever order, and one with another seed."""

    one: Path
    other: Path
    stranger: Path


@pytest.fixture(scope="module")
def twins(workshop: Workshop) -> Twins:
    dirs = []
    for name, seed in (("one", 7), ("other", 7), ("stranger", 8)):
        # the prompts come in one order, so that what a seed changes is what is sampled
        extra = (f"run.seed={seed}", "prompts.select=in-order", "reward.workers=2", "loop.steps=4", "loop.eval_every=2")
        api.train(workshop.config(name, *extra, reward="jittery"))
        dirs.append(workshop.directory / name)
    return Twins(*dirs)


def test_answers_were_scored_in_different_orders(twins: Twins):
    """Or the tests below would show nothing."""
    order = "SELECT id FROM trajectories ORDER BY scored_s"
    assert select(twins.one, order) != select(twins.other, order)


def test_one_seed_gives_one_run(twins: Twins):
    assert [timeless(row) for row in rows_of(twins.one)] == [timeless(row) for row in rows_of(twins.other)]
    assert same_bits(weights(twins.one), weights(twins.other))
    summaries = [json.loads((run / "summary.json").read_text()) for run in (twins.one, twins.other)]
    for name in ("score_before", "score_after", "generated_tokens", "trained_tokens", "dropped_tokens"):
        assert summaries[0][name] == summaries[1][name]


def test_one_seed_gives_the_same_answers_trained_on_in_the_same_steps(twins: Twins):
    content = "SELECT id, num_tokens, reward, finish, spans, state, trained_step, lag FROM trajectories ORDER BY id"
    assert select(twins.one, content) == select(twins.other, content)


def test_rows_are_measured_against_the_limits_of_a_device(workshop: Workshop, twins: Twins, monkeypatch: Any):
    assert all(row.mfu is row.bandwidth_share is None for row in rows_of(twins.one)), "of a CPU they are not known"
    for name in ("policy.policy", "rollout.engine"):
        monkeypatch.setattr(f"headrace.{name}.limits", lambda device: (1e9, 1e10))
    api.train(workshop.config("measured", "loop.steps=2"))
    weights_of = sum(tensor.numel() for tensor in weights(workshop.directory / "measured").values())
    for row in rows_of(workshop.directory / "measured"):
        assert row.mfu is not None
        assert row.bandwidth_share is not None
        computed = row.mfu * row.stage_s.train * 1e9 / (6 * weights_of)
        assert row.trained_tokens < computed < 10 * row.trained_tokens, "prompts and attention are computed too"
        read = row.bandwidth_share * row.stage_s.rollout * 1e10 / (4 * weights_of)
        assert row.length_max <= read + 1 <= row.generated_tokens, "at least once a token of the longest answer"


def test_the_run_had_replacement_waves(twins: Twins):
    """Groups without signal were dropped in some step, and others took their places in it, or started with them."""
    rows = rows_of(twins.one)
    assert any(row.dropped_tokens.get("no_signal") for row in rows)
    assert all(row.num_groups >= 4 and row.num_trajectories == 4 * row.num_groups for row in rows)
    waves = select(twins.one, "SELECT version, COUNT(*) FROM attempts GROUP BY wave")
    assert any(size > 4 for _, size in waves), "more than a step needs, since some would be dropped"
    assert len(waves) > len(rows), "a second wave in some step"


def test_another_seed_gives_another_run(twins: Twins):
    assert not same_bits(weights(twins.one), weights(twins.stranger))
    assert [timeless(row) for row in rows_of(twins.one)] != [timeless(row) for row in rows_of(twins.stranger)]


def test_every_trained_token_is_of_the_version_it_updates(twins: Twins):
    for run in (twins.one, twins.other, twins.stranger):
        trained = select(run, "SELECT trained_step, lag, spans FROM trajectories WHERE state = 'trained'")
        assert len(trained) == sum(row.num_trajectories for row in rows_of(run)) >= 4 * 16
        for step, lag, spans in trained:
            assert lag == 0
            assert [version for version, _, _ in json.loads(spans)] == [step - 1]
        assert all(row.lag_max == 0 and row.lag_mean == 0.0 for row in rows_of(run))
        assert audit(run) == []


def test_the_engine_and_the_learner_agree_on_what_was_sampled(twins: Twins):
    for row in rows_of(twins.one):
        assert row.mismatch_mean < 1e-5
        assert row.ratio_outside == 0.0


def test_training_moves_the_weights(twins: Twins, workshop: Workshop):
    rows = rows_of(twins.one)
    assert all(row.grad_norm > 0 and not row.skipped for row in rows)
    start = load_file(workshop.model / "model.safetensors")
    assert not same_bits(weights(twins.one), start)


# Evaluation


def test_rows_do_not_depend_on_how_long_an_evaluation_takes(workshop: Workshop):
    """A slow verdict on a held-out answer changes nothing: what comes of later groups belongs to later rows."""
    runs = []
    for name, late in (("quick_eval", 0), ("slow_eval", 1)):
        path = workshop.directory / f"{name}.jsonl"
        write_prompts(path, late=[0] * (NUM_PROMPTS - 4) + [late])
        extra = (f"prompts.source={path}", "loop.steps=2", "loop.eval_every=1", "reward.workers=2")
        api.train(workshop.config(name, *extra, "reward.cache=false", reward="late"))
        runs.append(workshop.directory / name)
    rows = [rows_of(run) for run in runs]
    assert [row.score is None for row in rows[0]] == [False, True]
    assert [timeless(row) for row in rows[0]] == [timeless(row) for row in rows[1]]
    assert same_bits(weights(runs[0]), weights(runs[1]))


# Streaming


@pytest.fixture(scope="module")
def slow_last(workshop: Workshop) -> tuple[str, ...]:
    """Settings under which the first step's last group comes long after its others."""
    path = write_prompts(workshop.directory / "slow_last.jsonl", late=[0, 0, 0, 1, 0], huge=[False], slow=[False])
    return (
        f"prompts.source={path}",
        "prompts.select=in-order",
        "learner.micro_batch_tokens=40",
        "reward.workers=2",
        "loop.steps=2",
    )


async def test_gradients_accumulate_while_groups_are_still_under_way(
    workshop: Workshop, slow_last: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    waiting: list[tuple[int, int]] = []  # groups in flight, and the version, at each micro-batch

    def watch(place: Place, loop: Loop) -> None:
        accumulate = loop.stages.ranks.accumulate

        def spy(items: list[Item]) -> Any:
            waiting.append((len(loop.stages.buffer.in_flight), loop.version))
            return accumulate(items)

        monkeypatch.setattr(loop.stages.ranks, "accumulate", spy)

    await play(workshop.config("streamed", *slow_last, reward="late"), watch)
    first_step = [in_flight for in_flight, version in waiting if version == 0]
    assert first_step[0] > 0
    assert len(first_step) > 2

    def patiently(self: LagPolicy, buffered: list[Any], in_flight: dict[int, int]) -> Any:
        return None if in_flight else stock(self, buffered, in_flight)

    streamed, waiting[:] = list(waiting), []
    stock = LagPolicy.select
    monkeypatch.setattr(LagPolicy, "select", patiently)
    await play(workshop.config("waited", *slow_last, reward="late"), watch)
    assert all(in_flight == 0 for in_flight, _ in waiting)
    assert len(waiting) == len(streamed)
    one, other = workshop.directory / "streamed", workshop.directory / "waited"
    assert same_bits(weights(one), weights(other))
    assert [timeless(row) for row in rows_of(one)] == [timeless(row) for row in rows_of(other)]
    assert select(one, "SELECT DISTINCT lag FROM trajectories WHERE state = 'trained'") == [(0,)]  # at no cost

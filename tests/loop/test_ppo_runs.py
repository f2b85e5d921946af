"""Whole runs with a critic and several updates per version."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import killed_runs
from tiny_runs import Workshop, rows_of, same_bits, weights

from headrace import api
from headrace.errors import ConfigError
from headrace.policy.demo import build_demo
from headrace.runs.audit import audit, books

PPO = ("learner.advantage=gae", "learner.epochs=2", "learner.minibatches=2", "loop.groups_per_step=4")


def test_one_answer_per_prompt_is_enough_for_a_critic(workshop: Workshop):
    api.train(workshop.config("single", *PPO, "rollout.samples=1", "loop.steps=3", reward="dense"))
    run = workshop.directory / "single"
    assert audit(run) == []
    assert "no_signal" not in books(run).dropped
    assert all(row.value_loss > 0 for row in rows_of(run))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["critic", "own-critic", "updates"])
def test_a_killed_run_ends_with_the_bits_of_an_unbroken_one(workshop: Workshop, tmp_path: Path, kind: str):
    settings = ("learner.epochs=2", "learner.minibatches=2") if kind == "updates" else PPO
    if kind == "own-critic":
        build_demo(tmp_path / "critic", seed=1, chat=False)
        settings += (f"learner.critic={tmp_path}/critic",)
    steps = ("loop.steps=8", "recovery.every_steps=3")
    for run, unbroken in killed_runs(workshop, f"ppo-{kind}", (*settings, *steps)):
        assert audit(run) == []
        assert same_bits(weights(run), weights(unbroken))
        losses = [[(row.loss, row.value_loss) for row in rows_of(one)] for one in (run, unbroken)]
        assert losses[0] == losses[1]


def test_a_function_that_is_not_there_is_named_before_anything_is_sampled(workshop: Workshop, tmp_path: Path):
    (tmp_path / "own.py").write_text("def loss(x): ...")
    config = workshop.config("no-function", f"learner.loss={tmp_path}/own.py:lost")
    with pytest.raises(ConfigError, match=r"learner\.loss.*has no function 'lost'; did you mean 'loss'"):
        api.train(config)

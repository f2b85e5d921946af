"""On-policy distillation: the reference of the KL is a teacher, another model with the same vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from doubles import tiny_model
from kills import num_kills_that_hit
from tiny_runs import Workshop, rows_of, same_bits, weights

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError, ModelError
from headrace.policy.demo import chat_tokenizer
from headrace.runs.audit import audit

DISTILLING = ("learner.kl_coef=1", "learner.kl_estimator=k2", "buffer.drop=nothing", "learner.lr=3e-3")


@pytest.fixture(scope="module")
def teacher(workshop: Workshop) -> Path:
    """The model after training on a reward."""
    settings = ("loop.steps=30", "learner.lr=1e-2")
    api.train(workshop.config("teacher", *settings, reward="dense"))
    return api.export(workshop.directory / "teacher", workshop.directory / "taught-by")


@pytest.mark.slow
def test_a_policy_comes_near_its_teacher(workshop: Workshop, teacher: Path):
    settings = (*DISTILLING, f"learner.teacher={teacher}", "loop.steps=40")
    api.train(workshop.config("taught", *settings, reward="constant"))  # it learns from the teacher alone
    run = workshop.directory / "taught"
    assert audit(run) == []
    kl = [row.kl_reference for row in rows_of(run)]
    assert np.mean(kl[-5:]) < 0.5 * np.mean(kl[:5])
    assert not (run / "reference").exists(), "the teacher's weights are where they were"


def test_a_killed_run_ends_with_the_bits_of_an_unbroken_one(workshop: Workshop, teacher: Path):
    settings = (*DISTILLING, f"learner.teacher={teacher}", "loop.steps=8", "recovery.every_steps=3")
    api.train(workshop.config("unbroken-taught", *settings))
    overrides = workshop.overrides("killed-taught", *settings)
    assert num_kills_that_hit(workshop, "killed-taught", overrides, [0.5, 0.4, 0.3])
    run, unbroken = (workshop.directory / name for name in ("killed-taught", "unbroken-taught"))
    assert audit(run) == []
    assert same_bits(weights(run), weights(unbroken))


def test_a_teacher_needs_a_weight():
    with pytest.raises(ConfigError, match=r"learner\.teacher needs learner\.kl_coef"):
        load_config(None, ["learner.teacher=x"])


def test_another_vocabulary_is_refused(workshop: Workshop, tmp_path: Path):
    tiny_model(tmp_path / "chat", tokenizer=chat_tokenizer())
    config = workshop.config("foreign", *DISTILLING, f"learner.teacher={tmp_path / 'chat'}", "loop.steps=1")
    with pytest.raises(ModelError, match=r"learner\.teacher = .* has another vocabulary"):
        api.train(config)


def test_a_teacher_that_is_not_there_is_named(workshop: Workshop, tmp_path: Path):
    config = workshop.config("nobody", *DISTILLING, f"learner.teacher={tmp_path / 'nobody'}", "loop.steps=1")
    with pytest.raises(ModelError, match=r"learner\.teacher = .*nobody': no such directory"):
        api.train(config)

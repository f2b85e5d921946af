"""On-policy distillation: the reference of the KL is a teacher, another model with the same vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles import tiny_model
from hand_made import group_of, trajectory
from kills import num_kills_that_hit
from tiny_runs import Workshop, rows_of, same_bits, weights

from headrace import api
from headrace.config_file import load_config
from headrace.errors import ConfigError, ModelError
from headrace.learner.ranks import teacher_logprobs
from headrace.policy.demo import chat_tokenizer
from headrace.runs.audit import audit
from headrace.types import Segment

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


ELSEWHERE = """
import torch
from headrace.config import ModelSection
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import load_policy

POLICY = load_policy(ModelSection(path={path!r}, device="cpu"))

@torch.no_grad()
def logprobs(sequences):
    found = []
    for ids in map(torch.tensor, sequences):
        plan, at = PackedPlan([len(ids)], ids.device), torch.arange(1, len(ids))
        found.append([None, *POLICY.logprobs(ids, plan, at, 1.0)[0].tolist()])
    return found
"""


def test_a_function_teaches_as_the_model_that_it_asks(workshop: Workshop, teacher: Path, tmp_path: Path):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE.format(path=str(teacher)))
    kinds = {"model": teacher, "function": f"{tmp_path}/elsewhere.py:logprobs"}
    for name, spec in kinds.items():
        api.train(workshop.config(f"by-{name}", *DISTILLING, f"learner.teacher={spec}", "loop.steps=4"))
    runs = [workshop.directory / f"by-{name}" for name in kinds]
    model, function = ([row.kl_reference for row in rows_of(run)] for run in runs)
    (tmp_path / "elsewhere.py").unlink()
    assert api.evaluate_run(runs[1]) is not None, "without its teacher"
    assert function == pytest.approx(model, rel=1e-4)
    assert min(model) > 0.01
    for name, of_model in weights(runs[0]).items():
        torch.testing.assert_close(weights(runs[1])[name], of_model, rtol=1e-3, atol=1e-4)


def teacher_of(tmp_path: Path, function: str) -> str:
    (tmp_path / "own.py").write_text(function)
    return f"{tmp_path}/own.py:logprobs"


def test_a_function_is_asked_for_each_branch_of_an_episode(tmp_path: Path):
    digits = "lambda tokens: list(accumulate(tokens, lambda number, digit: 10 * number + digit))"
    teacher = teacher_of(
        tmp_path, f"from itertools import accumulate\ndef logprobs(asked):\n    return map({digits}, asked)"
    )
    branched = replace(trajectory(prompt=[5, 6], answer=[7, 8, 9, 3]), segments=(Segment(start=4, after=1),))
    (found,) = teacher_logprobs(teacher, group_of(branched))
    assert found.tolist() == [567, 5678, 569, 5693]


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ("[[0.0] * len(s) for s in asked][1:]", "must return a log-prob for each token"),
        ("[[0.0] * (len(s) + 1) for s in asked]", "must return a log-prob for each token"),
        ("None", "must return a log-prob for each token"),
        ("1 / 0", "ZeroDivisionError"),
        ("[[float('nan')] * len(s) for s in asked]", "not all finite numbers"),
    ],
)
def test_what_a_function_returns_is_checked(tmp_path: Path, returns: str, told: str):
    teacher = teacher_of(tmp_path, f"def logprobs(asked):\n    return {returns}\n")
    with pytest.raises(ModelError, match=told):
        teacher_logprobs(teacher, group_of(trajectory(index=0), trajectory(index=1)))


@pytest.mark.parametrize("setting", ["rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=5"])
def test_a_function_knows_the_whole_distribution_only(setting: str):
    with pytest.raises(ConfigError, match=r"learner\.teacher is a function"):
        load_config(None, ["learner.teacher=x.py:f", "learner.kl_coef=1", setting])


def test_a_file_that_fails_says_so_and_nothing_else(workshop: Workshop, tmp_path: Path):
    (tmp_path / "own.py").write_text("raise ValueError('set TEACHER')")
    config = workshop.config("unset", *DISTILLING, f"learner.teacher={tmp_path}/own.py:f", "loop.steps=1")
    with pytest.raises(ConfigError, match=r"learner\.teacher: .*cannot be imported") as raised:
        api.train(config)
    assert "set TEACHER" in str(raised.value)
    assert "During handling" not in str(raised.value)
    assert not (workshop.directory / "unset").exists()


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

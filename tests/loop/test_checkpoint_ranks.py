"""Checkpoints of a learner in several ranks: written side by side, and read by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import group_of, trajectory
from rank_work import Outcome, learner_of, load, on_ranks, take_step

from headrace.config import LearnerSection
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Sharding
from headrace.loop.checkpoint import Checkpoint, Checkpoints
from headrace.policy.policy import Policy
from headrace.policy.tensor_files import copies, read_tensors, write_tensors
from headrace.types import Group

SECTION = LearnerSection(lr=1e-3, micro_batch_tokens=64)


def group(serial: int) -> Group:
    rng = np.random.default_rng(serial)
    answers = [
        trajectory(serial=serial, index=i, answer=rng.integers(3, 90, size=n), logprobs=-rng.random(n), reward=float(i))
        for i, n in enumerate((5, 9, 2, 12))
    ]
    return group_of(*answers, serial=serial)


def outcome(learner: Learner, *stats: Any) -> Outcome:
    return Outcome({name: weight.clone() for name, weight in learner.weights(torch.float32)}, list(stats))


def step_and_write(sharding: Sharding | None, model: Path, into: Path, spoil: int = -1) -> Outcome:
    """One step, a checkpoint of it that is written beside the next, and where that one leads."""
    learner = learner_of(load(model, sharding), SECTION, sharding)
    take_step(learner, [group(0)])
    kept = copies(learner.tensors())
    if sharding is not None and sharding.rank == spoil:
        next(part for name, part in kept.items() if name.startswith("mean.")).to_local().fill_(np.nan)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as beside:
        writing = beside.submit(write_tensors, into, kept, None if sharding is None else sharding.writers)
        stats = take_step(learner, [group(1)])
        writing.result()
    return outcome(learner, stats)


def load_and_step(sharding: Sharding | None, model: Path, checkpoint: Checkpoint) -> Outcome:
    learner = learner_of(load(model, sharding), SECTION, sharding)
    read_tensors(checkpoint.tensors, learner.tensors())
    learner.loaded(checkpoint.version)
    return outcome(learner, take_step(learner, [group(1)]))


@pytest.fixture
def model(policy: Policy, tmp_path: Path) -> Path:
    policy.save(tmp_path / "model")
    return tmp_path / "model"


Many = int | tuple[int, int]


def work(ranks: Many, task: Callable[..., Outcome], *args: Any) -> Outcome:
    """By ranks, or by one process that knows of none."""
    return on_ranks(ranks, task, *args)[0] if ranks else task(None, *args)


@pytest.mark.parametrize(("writers", "readers"), [(2, 0), (2, 1), (2, 4), (0, 2), (5, 3), ((2, 2), 3), (2, (2, 2))])
def test_any_number_of_ranks_goes_on_from_a_checkpoint(model: Path, tmp_path: Path, writers: Many, readers: Many):
    checkpoints, unbroken = Checkpoints(tmp_path, 1), []
    checkpoints.write(1, lambda into: unbroken.append(work(writers, step_and_write, model, into)), {"a": 1})
    checkpoint = checkpoints.newest(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.facts == {"a": 1}
    resumed = work(readers, load_and_step, model, checkpoint)
    assert resumed.stats[0].grad_norm == pytest.approx(unbroken[0].stats[0].grad_norm, rel=1e-5)
    assert resumed.stats[0].lr == unbroken[0].stats[0].lr
    for name, weight in unbroken[0].weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=1e-6)


def refused(sharding: Sharding, model: Path, into: Path) -> str:
    with pytest.raises(ValueError, match="not a finite number") as error:
        step_and_write(sharding, model, into, spoil=1)
    return str(error.value)


def test_a_number_that_is_not_finite_stops_all_writers(model: Path, tmp_path: Path):
    first, second = on_ranks(2, refused, model, tmp_path / "tensors")
    assert "another rank" in first
    assert "mean." in second
    assert not (tmp_path / "tensors").exists()

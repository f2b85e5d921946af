"""A directory of runs: two small real ones, and one for each way in which a run can be out of order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from big_ledger import make_big_ledger
from page_runs import broken_runs
from tiny_runs import Workshop

from headrace import api

STEPS = 6


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """What whole runs are made from."""
    return Workshop(tmp_path_factory.mktemp("dashboard"))


@pytest.fixture(scope="session")
def real_run(workshop: Workshop) -> Path:
    """A finished run with lag, drops and held-out scores."""
    settings = (f"loop.steps={STEPS}", "loop.max_lag=2", "loop.eval_every=2", "run.dollars_per_hour=3600")
    api.train(workshop.config("runs/real", *settings))
    return workshop.directory / "runs" / "real"


@pytest.fixture(scope="session")
def site_dir(workshop: Workshop, real_run: Path) -> Iterator[Path]:
    """The real run, another, and the broken ones."""
    runs = real_run.parent
    api.train(workshop.config("runs/other", "loop.steps=3", "learner.lr=1e-4", "reward.cache=false", reward="chatty"))
    with broken_runs(runs, real_run):
        yield runs


@pytest.fixture(scope="session")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten thousand steps and more than a hundred thousand trajectories."""
    return make_big_ledger(tmp_path_factory.mktemp("long") / "large")

from __future__ import annotations

from pathlib import Path

import pytest
from insight_runs import hand_made_run
from tiny_runs import Workshop

from headrace import api
from headrace.measured import Row


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of a real loop, one version ahead, with a checkpoint after every other step."""
    workshop = Workshop(tmp_path_factory.mktemp("insight"))
    settings = ("loop.steps=6", "loop.max_lag=1", "recovery.every_steps=2", "loop.eval_every=3")
    api.train(workshop.config("run", *settings))
    return workshop.directory / "run"


class Clumsy(api.Watcher):
    """Ends a run with an error after its second step."""

    def row(self, row: Row) -> None:
        if row.step == 2:
            raise OSError("stumbled")


@pytest.fixture(scope="session")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps; after two of them the process ended, and a restart took both again."""
    workshop = Workshop(tmp_path_factory.mktemp("insight"))
    with pytest.raises(OSError, match="stumbled"):
        api.train(workshop.config("run", "loop.steps=4", "recovery.every_steps=3"), Clumsy())
    api.resume(workshop.directory / "run")
    return workshop.directory / "run"


@pytest.fixture
def known_run(tmp_path: Path) -> Path:
    """Three steps whose every second and token is known: see `hand_made_run`."""
    return hand_made_run(tmp_path / "run")

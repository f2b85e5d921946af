from __future__ import annotations

from pathlib import Path

import pytest
from broken_runs import SETTINGS
from tiny_runs import Workshop

from headrace import api


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """What whole runs are made from."""
    return Workshop(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def unbroken4(workshop: Workshop) -> Path:
    """A run of four steps in which nothing goes wrong."""
    api.train(workshop.config("unbroken4", *SETTINGS))
    return workshop.directory / "unbroken4"

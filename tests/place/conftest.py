"""One Ray for all tests of a process, and a workshop for their runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_runs
from tiny_runs import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A cluster on this machine that runs join instead of starting their own; a process has one at a time.

    Its GPU is only counted.
    """
    with ray_runs.local_ray(num_gpus=1):
        yield


@pytest.fixture(scope="session")
def local_run(workshop: Workshop) -> Path:
    """Three strictly on-policy steps in one process."""
    return ray_runs.train(workshop, "local", "loop.max_lag=0").run_dir

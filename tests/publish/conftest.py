"""The transports, each in a frame that lets one test speak to all of them; and processes to kill."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for egress.py, which counts bytes there too

import forked
from transports import CollectiveFrame, DiskFrame, Frame


@pytest.fixture(scope="module")
def ray_frame() -> Iterator[Callable[[], Frame]]:
    """One Ray for all tests of a module, started when the first of them asks; a process has one at a time."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    module = import_module("transports_ray")
    with module.local_ray():
        yield module.ObjectStoreFrame


@pytest.fixture
def collective() -> Iterator[CollectiveFrame]:
    """That one alone."""
    made = CollectiveFrame(forked.context)
    yield made
    made.close()


@pytest.fixture(params=["disk", "collective", "object_store"])
def frame(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Frame]:
    """A transport."""
    made: Any
    match request.param:
        case "disk":
            made = DiskFrame(forked.context, tmp_path)
        case "collective":
            made = CollectiveFrame(forked.context)
        case "object_store":
            made = request.getfixturevalue("ray_frame")()
    yield made
    made.close()

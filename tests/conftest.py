"""Tiny policies for every test, and the order in which files are handed out.

Nothing here imports torch: the process that hands out the tests would import it, for seconds, before any test begins.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes share two cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_worker_niceness", "0")  # by itself, Ray lets its workers wait for everybody else
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # every process of every test would compile torch again, for 8 s
    sys.dont_write_bytecode = False

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.policy.policy import Policy

# The files that take longest, longest first: if one of them began last, one process would wait for the other.
LONGEST = [
    "place/test_ray.py",
    "publish/test_contract.py",
    "dashboard/test_dashboard_browser.py",
    "rollout/test_exact_engine.py",
    "loop/test_kills.py",
    "learner/test_sharding.py",
    "loop/test_watchdog.py",
    "loop/test_faults.py",
    "rollout/test_engine_mix.py",
    "reward/test_reward_scorer.py",
    "loop/test_loop_ends.py",
    "learner/test_learner_step.py",
    "test_import_changes_nothing.py",
    "place/test_processes.py",
    "loop/test_checkpoint_ranks.py",
    "rollout/test_speculation.py",
    "loop/test_loop_async.py",
]


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # by itself, xdist would begin with the files that hold the most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here, places = Path(__file__).parent, {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(here).as_posix(), len(LONGEST)))


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    """`make_policy("Llama", seed=1, dtype=torch.float64, sliding_window=8)`: a tiny random policy."""
    return import_module("tiny_policies").tiny_policy  # type: ignore[no-any-return]


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    """A tiny Qwen3."""
    return make_policy()

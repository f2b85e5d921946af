"""Who may read a run is decided by the umask, for every file of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tiny_runs import Workshop

from headrace import api
from headrace.policy.demo import build_demo


def modes(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in files}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_of_a_run_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int):
    workshop = Workshop(tmp_path)
    extra = ("loop.steps=1", "learner.kl_coef=0.1", 'ledger.sinks=["jsonl"]')
    before = os.umask(umask)
    try:
        api.train(workshop.config("run", *extra, reward="dense"))
        api.export(tmp_path / "run", tmp_path / "run" / "exported")
        build_demo(tmp_path / "run" / "start", seed=0)
    finally:
        os.umask(before)
    found = modes(tmp_path / "run")
    weights = [name for name in found if name.endswith(".safetensors")]
    assert {name.partition("/")[0] for name in weights} == {"model", "checkpoints", "reference", "exported", "start"}
    assert {"config.toml", "summary.json", "ledger.sqlite", "rows.jsonl"} <= found.keys()
    assert {name: found[name] for name in found if found[name] != mode} == {}

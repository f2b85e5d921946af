"""Runs that are out of order, each in its own way, beside a real one."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hand_made import group, row

from headrace.ledger.database import claimed
from headrace.ledger.files import run_config, save_settings
from headrace.ledger.ledger import Ledger
from headrace.measured import StageSpan

# By name, what the page must say of it; where it says nothing, it can be read in part.
BROKEN = {
    "damaged": "damaged, or not a Headrace ledger",
    "other-version": "this is headrace",
    "empty": "has no ledger yet",
    "starting": "has no ledger yet",
    "half": "",
    "bad-row": "",
    "no-settings": "",
    "written": "",
}


@contextmanager
def broken_runs(runs: Path, real_run: Path) -> Iterator[None]:
    """Make them in `runs`; while the context lasts, one of them is being written."""
    for name in ("damaged", "other-version", "half", "bad-row", "no-settings"):
        shutil.copytree(real_run, runs / name)
    (runs / "damaged" / "ledger.sqlite").write_bytes(b"no database at all " * 500)
    _execute(runs / "other-version", "UPDATE meta SET value = '0' WHERE key = 'schema'")
    _execute(runs / "bad-row", "UPDATE rows SET data = 'nonsense' WHERE step = 2")
    size = (runs / "half" / "ledger.sqlite").stat().st_size
    os.truncate(runs / "half" / "ledger.sqlite", size // 2)
    (runs / "no-settings" / "config.toml").unlink()
    for name in ("empty", "starting", "written"):
        (runs / name).mkdir()
    for name in ("starting", "written"):
        save_settings(run_config(real_run), runs / name)
    with claimed(runs / "starting"), claimed(runs / "written"), Ledger.create(runs / "written") as ledger:
        taken = group(0)
        ledger.started(4)
        ledger.sampled(9)
        ledger.buffered(taken)
        ledger.trained(taken, version=0)
        ledger.spans([StageSpan(stage="train", start_s=0.5, end_s=1.0, version=0)])
        ledger.row(row(1, generated_tokens=9, trained_tokens=6))
        yield


def _execute(run_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as connection, connection:
        connection.execute(statement)

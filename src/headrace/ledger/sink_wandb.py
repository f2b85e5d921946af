"""Rows as Weights & Biases history."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from headrace.ledger.row_json import scalars
from headrace.types import Row


class WandbSink:
    """Logs each row's numbers to a run named like the run's directory; a restart goes on with the same one."""

    def __init__(self, run_dir: Path, config_dict: Mapping[str, Any], project: str) -> None:
        kept = run_dir / "wandb" / "headrace-id"
        id = kept.read_text() if kept.exists() else secrets.token_hex(8)
        self._run: Any = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=dict(config_dict),
            id=id,
            resume="allow",
        )
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(id)

    def write(self, row: Row) -> None:
        """Log the row's numbers at its step."""
        self._run.log(scalars(row), step=row.step)

    def close(self) -> None:
        """Finish the run on the service."""
        self._run.finish()

"""Rows as Weights & Biases history."""

import html
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from headrace.ledger.sinks import as_text, scalars
from headrace.measured import Row, Sample
from headrace.roles import Sink


class WandbSink(Sink):
    """Logs rows to a run named like the run's directory; a restart continues the same one."""

    def __init__(self, run_dir: Path, config_dict: Mapping[str, Any]) -> None:
        kept = run_dir / "wandb" / "headrace-id"
        id = kept.read_text() if kept.exists() else secrets.token_hex(8)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "headrace"),
            name=run_dir.resolve().name,
            dir=str(run_dir),
            config=dict(config_dict),
            id=id,
            resume="allow",
        )
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(id)

    def row(self, row: Row) -> None:
        self._run.log(scalars(row), step=row.step)

    def sample(self, sample: Sample) -> None:
        shown = wandb.Html(f"<pre>{html.escape(as_text(sample))}</pre>", inject=False)
        self._run.log({"sample": shown}, step=sample.step)

    def close(self) -> None:
        self._run.finish()

"""Rows as TensorBoard scalars."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from headrace.ledger.sinks import as_text, scalars
from headrace.measured import Row, Sample
from headrace.roles import Sink


class TensorboardSink(Sink):
    """Writes an event file under `tensorboard/`, with the settings as text."""

    def __init__(self, run_dir: Path, config_dict: Mapping[str, Any]) -> None:
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))
        self._text("config", json.dumps(config_dict, indent=2, default=str), 0)

    def row(self, row: Row) -> None:
        for tag, value in scalars(row).items():
            self._writer.add_scalar(tag, value, row.step)
        self._writer.flush()  # rows are seconds apart, and TensorBoard shows them live

    def sample(self, sample: Sample) -> None:
        self._text("sample", as_text(sample), sample.step)

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, textwrap.indent(text, "    "), step)  # a Markdown code block
        self._writer.flush()

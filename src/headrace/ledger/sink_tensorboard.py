"""Rows as TensorBoard scalars, with TensorBoard's own writer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from headrace.ledger.sinks import as_text, scalars
from headrace.row import Row, Sample


class TensorboardSink:
    """Writes an event file under `tensorboard/`, with the settings as text."""

    def __init__(self, run_dir: Path, config_dict: Mapping[str, Any]) -> None:
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._add(0, [_text("config", json.dumps(config_dict, indent=2, default=str))])

    def write(self, row: Row) -> None:
        self._add(row.step, [Summary.Value(tag=tag, simple_value=x) for tag, x in scalars(row).items()])

    def sample(self, sample: Sample) -> None:
        self._add(sample.step, [_text("sample", as_text(sample))])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()  # rows are seconds apart, and TensorBoard shows them live


def _text(tag: str, text: str) -> Any:
    indented = "\n".join(f"    {line}" for line in text.splitlines())  # a Markdown code block
    return Summary.Value(
        tag=f"{tag}/text_summary",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(
            dtype=DT_STRING,
            string_val=[indented.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        ),
    )

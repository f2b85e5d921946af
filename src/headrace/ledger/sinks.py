"""Where rows go besides the ledger: the sinks that the settings ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config import LedgerSection
from headrace.ledger.sink_jsonl import JsonlSink
from headrace.roles import Sink
from headrace.types import Row
from headrace.user_code import load_optional


def open_sinks(
    section: LedgerSection, run_dir: Path, config_dict: Mapping[str, Any], past: Sequence[Row] = ()
) -> list[Sink]:
    """Open every sink in `ledger.sinks`, or none: if one fails, those already open are closed.

    `past` are the rows of a run that goes on: a text file is written anew, the others have them already.
    """
    opened: list[Sink] = []
    try:
        for name in section.sinks:
            opened.append(_open_sink(name, section, run_dir, config_dict))
            for row in past if name == "jsonl" else ():
                opened[-1].write(row)
    except BaseException:
        for sink in opened:
            sink.close()
        raise
    return opened


def _open_sink(name: str, section: LedgerSection, run_dir: Path, config_dict: Mapping[str, Any]) -> Sink:
    if name == "jsonl":
        return JsonlSink(run_dir)
    module = load_optional(f"headrace.ledger.sink_{name}", name, name)
    if name == "tensorboard":
        return module.TensorboardSink(run_dir, config_dict)  # type: ignore[no-any-return]
    return module.WandbSink(run_dir, config_dict, section.wandb_project)  # type: ignore[no-any-return]

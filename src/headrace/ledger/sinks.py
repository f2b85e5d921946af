"""Where rows are exported besides the ledger: the sinks in `ledger.sinks`."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from headrace.config import Config
from headrace.config_file import without_keys
from headrace.ledger.journal import row_to_json
from headrace.measured import ROW_METRICS, STAGES, Row, Sample
from headrace.roles import Sink
from headrace.user_code import load_optional


class JsonlSink(Sink):
    """Writes `rows.jsonl` and `samples.jsonl`, one JSON object per line."""

    def __init__(self, run_dir: Path, _: object) -> None:
        self._rows = (run_dir / "rows.jsonl").open("w", encoding="utf-8", buffering=1)
        self._samples = (run_dir / "samples.jsonl").open("a", encoding="utf-8", buffering=1)

    def row(self, row: Row) -> None:
        self._rows.write(row_to_json(row) + "\n")

    def sample(self, sample: Sample) -> None:
        self._samples.write(json.dumps(asdict(sample)) + "\n")

    def close(self) -> None:
        self._rows.close()
        self._samples.close()


def open_sinks(config: Config, run_dir: Path, past: Sequence[Row] = ()) -> list[Sink]:
    """Open every sink in `ledger.sinks`, or none: if one fails, those already open are closed.

    `past` are the rows of a resumed run: rows.jsonl is written anew, the other sinks have them
    already.
    """
    opened: list[Sink] = []
    settings = config.but(rollout={"command": without_keys(config.rollout.command)}).model_dump(mode="json")
    with ExitStack() as undo:
        for name in config.ledger.sinks:
            kind: Callable[..., Sink] = JsonlSink
            if name != "jsonl":
                module = load_optional(f"headrace.ledger.sink_{name}", name, name)
                kind = getattr(module, f"{name.capitalize()}Sink")
            opened.append(kind(run_dir, settings))
            undo.callback(opened[-1].close)
            for row in past if name == "jsonl" else ():
                opened[-1].row(row)
        undo.pop_all()
    return opened


def as_text(sample: Sample) -> str:
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    return f"reward {reward}, {sample.fate}\n\nprompt\n{sample.prompt}\n\nanswer\n{sample.answer}"


def scalars(row: Row) -> dict[str, float]:
    """Named as `reward/mean`, `stage_s/rollout`, `dropped_tokens/no_signal`; without None."""
    goodput = row.trained_tokens / row.wall_s if row.wall_s > 0 else 0.0
    values = {"goodput/trained_tokens_per_s": goodput}
    values |= {metric.label: getattr(row, name) for name, metric in ROW_METRICS.items()}
    values |= {f"stage_s/{stage}": getattr(row.stage_s, stage) for stage in STAGES}
    values |= {f"dropped_tokens/{reason}": tokens for reason, tokens in row.dropped_tokens.items()}
    return {name: float(value) for name, value in values.items() if value is not None}

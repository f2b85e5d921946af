"""A run's numbers for Prometheus, in its text format: what `/metrics` of the page answers.

Totals only ever grow, also over restarts, since they come from the ledger. The other numbers are of the newest row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from headrace import __version__
from headrace.errors import RunError
from headrace.ledger.ledger import Amount, Books
from headrace.row import ROW_METRICS
from headrace.runs.columns import RowColumns, reading
from headrace.runs.facts import RunFacts, RunState, read_run
from headrace.types import STAGES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT_STEPS = 10  # rates are over these, so that they follow the run without jumping


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family of samples, by their labels."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Mapping[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {_escaped(self.help)}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples.items():
            inside = ",".join(f'{name}="{_escaped(text, quote=True)}"' for name, text in labels)
            yield f"{self.name}{{{inside}}} {_number(value)}" if inside else f"{self.name} {_number(value)}"


def metrics_text(run_dir: Path) -> str:
    """The exposition of a run, also while it goes on."""
    return "".join(f"{line}\n" for metric in read_metrics(run_dir) for line in metric.lines())


def read_metrics(run_dir: Path) -> list[Metric]:
    """A run's numbers; what it has not measured yet is left out."""
    facts = read_run(run_dir)
    if facts.state is RunState.UNREADABLE:
        raise RunError(facts.problem)
    with reading(run_dir) as connection:
        rows = RowColumns.read(connection)
        accounts = connection.execute("SELECT name, tokens, trajectories FROM accounts").fetchall()
        lost = connection.execute(
            "SELECT COUNT(*), COALESCE(SUM(redone_steps), 0), COALESCE(SUM(lost_tokens), 0) FROM restarts"
        ).fetchone()
    books = Books.of({name: (tokens, trajectories) for name, tokens, trajectories in accounts})
    restarts = (
        _one("restarts_total", lost[0], "Times the run was resumed."),
        _one("redone_steps_total", lost[1], "Steps that restarts took again."),
        _one("lost_tokens_total", lost[2], "Tokens that were gone with a process that died."),
    )
    found: dict[str, Metric] = {}
    for metric in (*_of_run(facts), *_of_books(books), *_of_rows(rows), *restarts):
        found.setdefault(metric.name, metric)  # the accounts know their totals better than the rows
    return list(found.values())


def _of_run(facts: RunFacts) -> Iterator[Metric]:
    labels = (("run", facts.path.resolve().name), ("state", str(facts.state)), ("version", __version__))
    yield Metric(
        name="headrace_info",
        kind="gauge",
        help="The run, how it stands, and the version that tells it.",
        samples={labels: 1.0},
    )
    yield _one("running", facts.state is RunState.RUNNING, "Whether a process trains the run.")
    yield _one("step", facts.steps, "Steps that are complete.")
    yield _one("steps_wanted", facts.wanted_steps, "Steps that the run is to take.")
    if facts.score_after is not None:
        yield _one("held_out_score", facts.score_after, "Mean reward on held-out prompts, when last measured.")


def _of_books(books: Books) -> Iterator[Metric]:
    """Tokens and trajectories of every account."""
    for unit in ("tokens", "trajectories"):

        def held(amount: Amount, unit: str = unit) -> int:
            return int(getattr(amount, unit))

        yield _one(f"generated_{unit}_total", held(books.generated), f"{unit.capitalize()} generated.")
        yield _one(f"trained_{unit}_total", held(books.trained), f"{unit.capitalize()} trained on.")
        yield Metric(
            name=f"headrace_dropped_{unit}_total",
            kind="counter",
            help=f"{unit.capitalize()} not trained on, by reason.",
            samples={(("reason", reason),): held(amount) for reason, amount in sorted(books.dropped.items())},
        )
        yield _one(f"buffered_{unit}", held(books.buffered), f"{unit.capitalize()} scored and not yet trained on.")
        yield _one(f"in_flight_{unit}", held(books.in_flight), f"{unit.capitalize()} being generated or scored.")


def _of_rows(rows: RowColumns) -> Iterator[Metric]:
    stage_s = rows.stage_total_s()
    yield Metric(
        name="headrace_stage_seconds_total",
        kind="counter",
        help="Seconds that each stage was busy.",
        samples={(("stage", stage),): getattr(stage_s, stage) for stage in STAGES},
    )
    for name, metric in ROW_METRICS.items():
        values = rows.column(name)
        if metric.exported.endswith("_total"):
            yield _one(metric.exported, float(values[np.isfinite(values)].sum()), _sentence(metric.help))
        elif len(values):
            yield _one(metric.exported or name, values[-1], _sentence(f"{metric.help}, of the last step"))
    if not len(rows):
        return
    yield _one("step_seconds", rows.column("wall_s")[-1], "Seconds of the last step.")
    wall_s = rows.column("wall_s")[-RECENT_STEPS:].sum()
    if wall_s > 0:
        goodput = rows.column("trained_tokens")[-RECENT_STEPS:].sum() / wall_s
        yield _one("goodput_tokens_per_second", goodput, f"Trained tokens per second, last {RECENT_STEPS} steps.")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _one(name: str, value: float, help: str) -> Metric:
    """A metric without labels; by its name it is a counter or a gauge."""
    kind: Literal["counter", "gauge"] = "counter" if name.endswith("_total") else "gauge"
    return Metric(name=f"headrace_{name}", kind=kind, help=help, samples={(): value})


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))

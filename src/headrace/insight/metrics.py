"""A run's numbers for Prometheus, in its text format: what `/metrics` of the page answers.

Totals only grow, over restarts too: they come from the ledger. Others are of the newest row.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from headrace import __version__
from headrace.errors import RunError
from headrace.ledger.ledger import Books
from headrace.measured import ROW_METRICS, STAGES
from headrace.runs.columns import RowColumns, reading
from headrace.runs.facts import RunFacts, RunState, read_run

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT_STEPS = 10  # rates are over these, so that they follow the run without jumping

Labels = tuple[tuple[str, str], ...]
Family = tuple[str, str, float | Mapping[Labels, float]]  # name, help, value or values by label


def metrics_text(run_dir: Path) -> str:
    """The exposition of a run, also while it goes on; what it has not measured yet is left out."""
    facts = read_run(run_dir)
    if facts.state is RunState.UNREADABLE:
        raise RunError(facts.problem)
    with reading(run_dir) as connection:
        rows = RowColumns.read(connection)
        accounts = connection.execute("SELECT name, tokens, trajectories FROM accounts").fetchall()
        restarted = "COUNT(*), COALESCE(SUM(redone_steps), 0), COALESCE(SUM(lost_tokens), 0)"
        restarts, redone, lost = connection.execute(f"SELECT {restarted} FROM restarts").fetchone()
    books = Books.of({name: (tokens, trajectories) for name, tokens, trajectories in accounts})
    found: dict[str, str] = {}
    for family in (
        *_of_run(facts),
        *_of_books(books),
        *_of_rows(rows),
        ("restarts_total", "Times the run was resumed.", restarts),
        ("redone_steps_total", "Steps that restarts took again.", redone),
        ("lost_tokens_total", "Tokens that were gone with a process that died.", lost),
    ):
        found.setdefault(family[0], family_text(*family))  # accounts know totals better than rows
    return "".join(found.values())


def family_text(name: str, help: str, samples: float | Mapping[Labels, float]) -> str:
    """One family of samples as the format wants it; by its name it is a counter or a gauge."""
    name, kind = f"headrace_{name}", "counter" if name.endswith("_total") else "gauge"
    text = f"# HELP {name} {_escaped(help)}\n# TYPE {name} {kind}\n"
    for labels, value in (samples if isinstance(samples, Mapping) else {(): samples}).items():
        inside = ",".join(f'{label}="{_escaped(said, quote=True)}"' for label, said in labels)
        text += f"{name}{{{inside}}} {_number(value)}\n" if inside else f"{name} {_number(value)}\n"
    return text


def _of_run(facts: RunFacts) -> Iterator[Family]:
    run = {"run": facts.path.resolve().name, "state": str(facts.state), "version": __version__}
    yield "info", "The run, how it stands, and the version that tells it.", {tuple(run.items()): 1.0}
    yield "running", "Whether a process trains the run.", facts.state is RunState.RUNNING
    yield "step", "Steps that are complete.", facts.steps
    yield "steps_wanted", "Steps that the run is to take.", facts.wanted_steps
    if facts.score_after is not None:
        yield "held_out_score", "Mean reward on held-out prompts, when last measured.", facts.score_after


def _of_books(books: Books) -> Iterator[Family]:
    for unit in ("tokens", "trajectories"):
        title, reasons = unit.capitalize(), sorted(books.dropped.items())
        yield f"generated_{unit}_total", f"{title} generated.", getattr(books.generated, unit)
        yield f"trained_{unit}_total", f"{title} trained on.", getattr(books.trained, unit)
        dropped: dict[Labels, float] = {(("reason", why),): getattr(held, unit) for why, held in reasons}
        yield f"dropped_{unit}_total", f"{title} not trained on, by reason.", dropped
        buffered, in_flight = getattr(books.buffered, unit), getattr(books.in_flight, unit)
        yield f"buffered_{unit}", f"{title} scored and not yet trained on.", buffered
        yield f"in_flight_{unit}", f"{title} being generated or scored.", in_flight


def _of_rows(rows: RowColumns) -> Iterator[Family]:
    stage_s = rows.stages(np.nansum)
    by_stage: dict[Labels, float] = {(("stage", stage),): getattr(stage_s, stage) for stage in STAGES}
    yield "stage_seconds_total", "Seconds that each stage was busy.", by_stage
    for name, metric in ROW_METRICS.items():
        values, help = rows.column(name), f"{metric.help[0].upper()}{metric.help[1:]}"
        exported = metric.exported or (f"{name}_total" if metric.over == "sum" else name)
        if exported.endswith("_total"):
            yield exported, f"{help}.", float(values[np.isfinite(values)].sum())
        elif len(values):
            yield exported, f"{help}, of the last step.", float(values[-1])
    if not len(rows):
        return
    wall_s, trained_tokens = rows.column("wall_s"), rows.column("trained_tokens")
    yield "step_seconds", "Seconds of the last step.", float(wall_s[-1])
    if (recent_s := wall_s[-RECENT_STEPS:].sum()) > 0:
        goodput = float(trained_tokens[-RECENT_STEPS:].sum() / recent_s)
        said = f"Trained tokens per second, last {RECENT_STEPS} steps."
        yield "goodput_tokens_per_second", said, goodput


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))

"""A run for other programs: its numbers for Prometheus, and a timeline that trace viewers open.

`/metrics` of the page answers in Prometheus' text format. Totals only grow, over restarts too: they
come from the ledger. Others are of the newest row.

In the timeline, which ui.perfetto.dev and chrome://tracing open, each stage of each worker has a
track, and another one where its spans overlap: on one track spans must lie inside each other or
apart. Times are microseconds on the run's clock.
"""

import json
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from headrace import __version__
from headrace.errors import RunError
from headrace.insight.reading import DEVICE, REWARD
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Books
from headrace.measured import STAGES
from headrace.row import ROW_METRICS
from headrace.runs.columns import Columns, RowColumns, read_spans, read_steps, reading
from headrace.runs.facts import RunFacts, RunState, read_run

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT_STEPS = 10  # rates are over these, so that they follow the run without jumping

Labels = tuple[tuple[str, str], ...]
Family = tuple[str, str, float | Mapping[Labels, float]]  # name, help, value or values by label
TRACE_FILE = "trace.json"
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"
COUNTER_S = 0.001  # a counter is written at most once in this time

Event = dict[str, Any]

_RUN = "run"  # the process whose tracks are of the run as a whole
_STEPS = "steps"  # its one thread
_HELD = (("in_flight", "trajectories"), ("in_flight", "tokens"), ("buffered", "tokens"))  # counted
_STEP_NUMBERS = ("reward_mean", "lag_mean", "trained_tokens", "generated_tokens", "num_groups", "loss", "grad_norm")


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


# ---- the timeline


def write_trace(run_dir: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write a run's timeline, also of one that goes on; returns the file and its number of events."""
    path = out or run_dir / TRACE_FILE
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a directory; name a file with --out")
    with reading(run_dir) as connection:
        spans = read_spans(connection)
        found = [*_stage_events(spans), *_marks(connection, spans)]
        found += [*_account_events(connection), *_step_events(connection)]
    events = list(_numbered(sorted(found, key=lambda event: int(event["ts"]))))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            run = json.dumps({"run": str(run_dir.resolve())})
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {run}, "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, events)) + "\n]}\n")
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path, len(events)


def _numbered(events: list[Event]) -> Iterator[Event]:
    """Processes and threads by number; before the first event of each, its name."""
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str], int] = {}
    for event in events:
        process, thread = event["pid"], event["tid"]
        unnamed = [] if process in pids else [("process", process, 0)]
        if (process, thread) not in tids:
            unnamed.append(("thread", thread, len(tids) + 1))
        pid = pids.setdefault(process, len(pids) + 1)
        tid = tids.setdefault((process, thread), len(tids) + 1)
        for kind, name, number in unnamed:
            about: Event = {"ph": "M", "pid": pid, "tid": number}
            order = number or (_RUN, DEVICE, REWARD).index(process.split(" (")[0])
            yield {"name": f"{kind}_name", **about, "args": {"name": name}}
            yield {"name": f"{kind}_sort_index", **about, "args": {"sort_index": order}}
        yield event | {"pid": pid, "tid": tid}


def _stage_events(spans: Columns) -> Iterator[Event]:
    """Every span, on the first free track of its stage and worker."""
    spans = spans[np.lexsort((-spans["end_s"], spans["start_s"]))]
    names = ("stage", "worker", "version", "start_s", "end_s", "detail")
    tracks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # until when each is taken
    columns = [spans[name].tolist() for name in names]
    for stage, worker, version, start_s, end_s, detail in zip(*columns, strict=True):
        start_us, end_us = _us(start_s), max(_us(start_s), _us(end_s))
        taken_us = tracks[stage, worker]
        free = (i for i, until_us in enumerate(taken_us) if until_us <= start_us)
        number = next(free, len(taken_us))
        taken_us[number : number + 1] = [end_us]
        args: Event = {"version": None if math.isnan(version) else int(version)}
        if detail:
            args["detail"] = detail
        kind, pool = "stage" if stage in STAGES else "other", REWARD if stage == REWARD else DEVICE
        track = {"pid": f"{pool} ({worker})", "tid": f"{stage} {number + 1}" if number else stage}
        yield _event(stage, "X", start_s, args, cat=kind, dur=end_us - start_us, **track)


def _marks(connection: sqlite3.Connection, spans: Columns) -> Iterator[Event]:
    """Where each version was published, and where the run was resumed."""
    published = spans[spans["stage"] == "publish"]
    for version, end_s in zip(published["version"], published["end_s"].tolist(), strict=True):
        yield _event(f"version {version:.0f}", "i", end_s, {"version": int(version)}, s="p")
    names = [f.name for f in fields(Restart)]
    for values in connection.execute(f"SELECT {', '.join(names)} FROM restarts ORDER BY at_s, number"):
        restart = dict(zip(names, values, strict=True))
        yield _event(f"restart {restart.pop('number')}", "i", restart.pop("at_s"), restart, s="g")


def _step_events(connection: sqlite3.Connection) -> Iterator[Event]:
    """Every step, and lag, reward and goodput as they stand at its end."""
    rows = RowColumns.read(connection)
    for start_s, end_s, step, _ in read_steps(connection, rows).tolist():
        at = step - int(rows.column("step")[0])
        row = {name: float(rows.column(name)[at]) for name in (*_STEP_NUMBERS, "lag_max", "wall_s")}
        known = {name: value if math.isfinite(value) else None for name, value in row.items()}
        args, dur = {name: known[name] for name in _STEP_NUMBERS}, _us(end_s) - _us(start_s)
        yield _event(f"step {step}", "X", start_s, args, cat="step", dur=dur)
        yield _event("lag", "C", end_s, {"mean": known["lag_mean"], "max": known["lag_max"]})
        yield _event("reward", "C", end_s, {"mean": known["reward_mean"]})
        if row["wall_s"] > 0:
            goodput = round(row["trained_tokens"] / row["wall_s"], 3)
            yield _event("goodput, tokens per second", "C", end_s, {"trained": goodput})


def _account_events(connection: sqlite3.Connection) -> Iterator[Event]:
    """What is in flight and what is buffered, whenever it changes."""
    moved = "SUM(((credit = '{0}') - (debit = '{0}')) * {1}) OVER (ORDER BY id)"
    sums = ", ".join(moved.format(account, unit) for account, unit in _HELD)
    held, written, last_s, due_s = [0] * len(_HELD), [0] * len(_HELD), 0.0, 0.0
    found = connection.execute(f"SELECT at_s, {sums} FROM transfers ORDER BY id")
    for at_s, *amounts in chain(found, [(math.inf,)]):
        if at_s >= due_s:  # what changed meanwhile
            for (account, unit), amount, before in zip(_HELD, held, written, strict=True):
                if amount != before:
                    yield _event(f"{unit} {account.replace('_', ' ')}", "C", last_s, {unit: amount})
            written, due_s = held, at_s + COUNTER_S
        held, last_s = amounts, max(last_s, at_s)


def _event(name: str, kind: str, at_s: float, args: Event, **more: Any) -> Event:
    """An event of the run as a whole; a counter has the values that are known."""
    if kind == "C":
        args = {key: value for key, value in args.items() if value is not None}
    return {"name": name, "ph": kind, "ts": _us(at_s), "pid": _RUN, "tid": _STEPS, "args": args, **more}


def _us(at_s: float) -> int:
    return round(at_s * 1e6)

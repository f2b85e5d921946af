"""A run as a timeline that ui.perfetto.dev and chrome://tracing open, in their JSON format.

Each stage of each worker has a track, and another one where its spans overlap: on one track spans
must lie inside each other or apart. Times are microseconds on the run's clock.
"""

import json
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import RunError
from headrace.insight.reading import DEVICE, REWARD
from headrace.ledger.journal import Restart
from headrace.measured import STAGES
from headrace.runs.columns import Columns, RowColumns, read_spans, read_steps, reading

TRACE_FILE = "trace.json"
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"
COUNTER_S = 0.001  # a counter is written at most once in this time

Event = dict[str, Any]

_RUN = "run"  # the process whose tracks are of the run as a whole
_STEPS = "steps"  # its one thread
_HELD = (("in_flight", "trajectories"), ("in_flight", "tokens"), ("buffered", "tokens"))  # counted
_STEP_NUMBERS = ("reward_mean", "lag_mean", "trained_tokens", "generated_tokens", "num_groups", "loss", "grad_norm")


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

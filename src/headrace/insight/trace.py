"""A run as a timeline that ui.perfetto.dev and chrome://tracing open: the trace event format, as a JSON object.

Each stage of each worker has a track, and another one where its spans overlap: on one track spans must lie inside each
other or apart. Times are microseconds on the run's clock.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import RunError
from headrace.insight.reading import DEVICE, REWARD
from headrace.ledger.journal import Restart
from headrace.runs.columns import Columns, RowColumns, StepTimes, read_spans, reading
from headrace.types import STAGES

TRACE_FILE = "trace.json"
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"
COUNTER_US = 1000  # a counter is written at most once in this time

Event = dict[str, Any]

_RUN = "run"  # the process whose tracks are of the run as a whole
_STEPS = "steps"  # its one thread
_STEP_NUMBERS = ("reward_mean", "lag_mean", "trained_tokens", "generated_tokens", "num_groups", "loss", "grad_norm")


def write_trace(run_dir: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write a run's timeline, also while the run goes on; returns the file and how many events it has."""
    path = out or run_dir / TRACE_FILE
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a directory; name a file with --out")
    with reading(run_dir) as connection:
        events = trace_events(connection)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"run": str(run_dir.resolve())}))
            file.write(', "traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")
        unfinished.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path, len(events)


def trace_events(connection: sqlite3.Connection) -> list[Event]:
    """All events by time; a track's names come before its first event."""
    rows, spans = RowColumns.read(connection), read_spans(connection)
    times = StepTimes.read(connection, rows)
    found = [*_stage_events(spans), *_version_events(spans), *_restart_events(connection)]
    found += _account_events(connection)
    if times is not None:
        found += [*_step_events(rows, times), *_step_counters(rows, times)]
    return list(_numbered(sorted(found, key=lambda event: int(event["ts"]))))


def _numbered(events: list[Event]) -> Iterator[Event]:
    """Processes and threads by number; before the first event of each, its name."""
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str], int] = {}
    for event in events:
        process, thread = event["pid"], event["tid"]
        if process not in pids:
            pid = pids[process] = len(pids) + 1
            yield _name("process_name", pid, 0, name=process)
            order = next(i for i, kind in enumerate((_RUN, DEVICE, REWARD)) if process.startswith(kind))
            yield _name("process_sort_index", pid, 0, sort_index=order)
        if (process, thread) not in tids:
            tid = tids[process, thread] = len(tids) + 1
            yield _name("thread_name", pids[process], tid, name=thread)
            yield _name("thread_sort_index", pids[process], tid, sort_index=tid)
        yield event | {"pid": pids[process], "tid": tids[process, thread]}


def _stage_events(spans: Columns) -> Iterator[Event]:
    """Every span, on the first free track of its stage and worker."""
    spans = spans.where(np.lexsort((-spans["end_s"], spans["start_s"])))
    names = ("stage", "worker", "version", "start_s", "end_s", "detail")
    tracks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # until when each is taken
    for stage, worker, version, start_s, end_s, detail in zip(*(spans[name].tolist() for name in names), strict=True):
        start_us, end_us = _us(start_s), max(_us(start_s), _us(end_s))
        taken_us = tracks[stage, worker]
        number = next((i for i, until_us in enumerate(taken_us) if until_us <= start_us), len(taken_us))
        taken_us[number : number + 1] = [end_us]
        args: Event = {"version": None if math.isnan(version) else int(version)}
        yield {
            "name": stage,
            "cat": "stage" if stage in STAGES else "other",
            "ph": "X",
            "ts": start_us,
            "dur": end_us - start_us,
            "pid": f"{REWARD if stage == REWARD else DEVICE} ({worker})",
            "tid": f"{stage} {number + 1}" if number else stage,
            "args": args | ({"detail": detail} if detail else {}),
        }


def _version_events(spans: Columns) -> Iterator[Event]:
    """A mark where each version was published."""
    published = spans.where(spans["stage"] == "publish")
    for version, end_s in zip(published["version"].tolist(), published["end_s"].tolist(), strict=True):
        yield _mark(f"version {version:.0f}", end_s, "p", {"version": int(version)})


def _restart_events(connection: sqlite3.Connection) -> Iterator[Event]:
    names = [f.name for f in fields(Restart)]
    for values in connection.execute(f"SELECT {', '.join(names)} FROM restarts ORDER BY at_s, number"):
        restart = dict(zip(names, values, strict=True))
        yield _mark(f"restart {restart.pop('number')}", restart.pop("at_s"), "g", restart)


def _step_events(rows: RowColumns, times: StepTimes) -> Iterator[Event]:
    """Every step, from the row before it to its own."""
    columns = {name: rows.column(name) for name in _STEP_NUMBERS}
    first = int(rows.column("step")[0])
    spans = zip(times.steps.tolist(), times.starts_s.tolist(), times.ends_s.tolist(), strict=True)
    for step, start_s, end_s in spans:
        yield {
            "name": f"step {step}",
            "cat": "step",
            "ph": "X",
            "ts": _us(start_s),
            "dur": _us(end_s) - _us(start_s),
            "pid": _RUN,
            "tid": _STEPS,
            "args": {name: _finite(values[step - first]) for name, values in columns.items()},
        }


def _step_counters(rows: RowColumns, times: StepTimes) -> Iterator[Event]:
    """Lag, reward and goodput, as they stand at the end of every step."""
    first = int(rows.column("step")[0])
    lag_mean, lag_max, reward = (rows.column(name) for name in ("lag_mean", "lag_max", "reward_mean"))
    trained, wall_s = rows.column("trained_tokens"), rows.column("wall_s")
    for step, end_s in zip(times.steps.tolist(), times.ends_s.tolist(), strict=True):
        i = step - first
        yield _counter("lag", end_s, {"mean": _finite(lag_mean[i]), "max": _finite(lag_max[i])})
        yield _counter("reward", end_s, {"mean": _finite(reward[i])})
        if wall_s[i] > 0:
            yield _counter("goodput, tokens per second", end_s, {"trained": round(float(trained[i] / wall_s[i]), 3)})


def _account_events(connection: sqlite3.Connection) -> Iterator[Event]:
    """What is in flight and what is buffered, whenever it changes."""
    held = {("in_flight", "trajectories"): 0, ("in_flight", "tokens"): 0, ("buffered", "tokens"): 0}
    titles = {
        ("in_flight", "trajectories"): "trajectories in flight",
        ("in_flight", "tokens"): "tokens in flight",
        ("buffered", "tokens"): "tokens buffered",
    }
    written = dict(held)
    due_s = last_s = 0.0

    def changed(at_s: float) -> Iterator[Event]:
        for key, amount in held.items():
            if written.get(key) != amount:
                written[key] = amount
                yield _counter(titles[key], at_s, {key[1]: amount})

    found = connection.execute("SELECT at_s, debit, credit, tokens, trajectories FROM transfers ORDER BY id")
    for at_s, debit, credit, tokens, trajectories in found:
        if at_s >= due_s:
            yield from changed(last_s)
            due_s = at_s + COUNTER_US / 1e6
        last_s = max(last_s, at_s)
        for account, sign in ((debit, -1), (credit, 1)):
            for unit, amount in (("tokens", tokens), ("trajectories", trajectories)):
                if (account, unit) in held:
                    held[account, unit] += sign * amount
    yield from changed(last_s)


def _counter(name: str, at_s: float, values: dict[str, float | None]) -> Event:
    known = {key: value for key, value in values.items() if value is not None}
    return {"name": name, "ph": "C", "ts": _us(at_s), "pid": _RUN, "tid": _STEPS, "args": known}


def _mark(name: str, at_s: float, scope: str, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "i", "s": scope, "ts": _us(at_s), "pid": _RUN, "tid": _STEPS, "args": args}


def _name(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _us(at_s: float) -> int:
    return round(at_s * 1e6)


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return float(value) if math.isfinite(value) else None

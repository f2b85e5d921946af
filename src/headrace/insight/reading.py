"""What a run's ledger says: a record for triage, for Prometheus, and a timeline for trace viewers.

The first steps of a run are unlike the others (caches fill, programs are compiled), so by default
the record is about the steps after them. Nothing is written, and the run may go on meanwhile.

`/metrics` of the page answers in Prometheus' text format. Totals only grow, over restarts too: they
come from the ledger. Others are of the newest row.

In the timeline, which ui.perfetto.dev and chrome://tracing open, each stage of each worker has a
track, and another one where its spans overlap: on one track spans must lie inside each other or
apart. Times are microseconds on the run's clock.
"""

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from headrace import __version__
from headrace.config import Config
from headrace.errors import RunError
from headrace.ledger.files import run_config, write_whole
from headrace.ledger.journal import Restart
from headrace.ledger.ledger import Books, Ledger
from headrace.measured import ROW_METRICS, STAGES, STALL, StageTimes
from headrace.runs import columns as tables
from headrace.runs.columns import Columns, Numbers, RowColumns, reading
from headrace.runs.facts import RunFacts, RunState, read_run
from headrace.types import BoolArray, FinishReason

DEVICE, REWARD = "device", "reward"  # pools: engine and learner take turns on the one
MOST_SPANS = 100_000  # of a longer run only the last steps are looked at this closely
MOST_ANSWERS = 200_000  # of a longer run the newest
TAIL_SHARE = 0.05  # of a step's answers: the last ones, that the others have to wait for
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RATE_STEPS = 10  # rates are over these, so that they follow the run without jumping
_COUNTED, _HELD = Path(__file__).with_name("reading.sql").read_text(encoding="utf-8").split(";")
Labels = tuple[tuple[str, str], ...]
Family = tuple[str, str, float | Mapping[Labels, float]]  # name, help, value or values by label
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})  # of a label
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"
COUNTER_S = 0.001  # a counter is written at most once in this time
Event = dict[str, Any]
_RUN = "run"  # the process whose tracks are of the run as a whole
_STEPS = "steps"  # its one thread
_STEP_NUMBERS = ("reward_mean", "lag_mean", "trained_tokens", "generated_tokens", "num_groups", "loss", "grad_norm")


class Spread:
    """A distribution in a few numbers."""

    def __init__(self, values: Numbers) -> None:
        self.count, self.mean, self.max = len(values), float(values.mean()), float(values.max())
        self.cv = float(values.std()) / self.mean if self.mean else 0.0  # deviation over mean
        self.p50, self.p95, self.p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()

    @classmethod
    def of(cls, values: Numbers) -> "Spread | None":
        """Of those that are known; None if none is."""
        known = values[np.isfinite(values)]
        return cls(known) if len(known) else None


class Occupancy:
    """How the stages of some steps lay side by side. Seconds are totals over these steps.

    Everything is measured on the time that rows count, without what came between two steps.
    """

    def __init__(self, times: Columns, spans: Columns, config: Config) -> None:
        steps, stage = (times["start_s"], times["end_s"]), spans["stage"]
        starts_s, ends_s = (tables.elapsed_s(spans[side], steps) for side in ("start_s", "end_s"))

        def busy_s(of: BoolArray, at_once: int = 1) -> float:
            return tables.covered_s((starts_s[of], ends_s[of]), at_once=at_once)

        works, scores = np.isin(stage, STAGES), stage == REWARD
        self.num_steps, self.wall_s = len(times), float((steps[1] - steps[0]).sum())
        self.busy_s = busy_s(works)  # at least one stage was busy
        self.stage_s = StageTimes(**{name: busy_s(stage == name) for name in STAGES})
        self.idle_shares: dict[str, float] = {}  # of a pool, or of each worker where it has several
        for pool, of_pool in ((DEVICE, works & ~scores), (REWARD, scores)):
            workers = np.unique(spans["worker"][of_pool])
            num = max(1, config.reward.workers) if pool == REWARD and len(workers) == 1 else 1
            for worker in workers:
                work_s = busy_s(of_pool & (spans["worker"] == worker), num)
                idle = max(0.0, 1.0 - work_s / (self.wall_s * num)) if self.wall_s else 0.0
                self.idle_shares[f"{pool} {worker}" if len(workers) > 1 else pool] = idle
        self.stall_s = busy_s((stage == "checkpoint") & (spans["detail"] == STALL))  # training waited for one
        total_s = sum(asdict(self.stage_s).values())
        # saved by stages side by side, of the sum of their times: 0.5 is two all the time
        self.overlap_share = 1.0 - self.busy_s / total_s if total_s else 0.0


class Reading:
    """One run. `num_steps` and restarts are of all of it, the rest is about its `measured_steps`.

    Measured are the steps after `after_step` (all, if there are no more), or their `last_steps`.
    """

    def __init__(self, run_dir: Path, *, last_steps: int | None = None, after_step: int = 2) -> None:
        read_run(run_dir).readable()
        self.run_dir, self.config = run_dir, run_config(run_dir)
        with reading(run_dir) as connection:
            counted = connection.execute(_COUNTED).fetchone()
            self.num_steps, last_step, self.num_restarts, self.redone_steps, last_rowid = counted
            after = after_step if last_step > after_step else 0
            if last_steps is not None:
                after = max(after, last_step - last_steps)
            rows = RowColumns(connection, after_step=after)
            times = tables.read_steps(connection, rows)
            since_s = float(times["start_s"][0]) if len(times) and after else 0.0
            found = tables.read_trajectories(connection, since_s=since_s, newest=MOST_ANSWERS)
            # if there are very many spans, the last steps only
            looked_at = times[-max(1, (times["after_rowid"] >= last_rowid - MOST_SPANS).sum()) :]
            after_rowid = int(looked_at["after_rowid"][0]) if len(times) else last_rowid
            spans = tables.read_spans(connection, after_rowid=after_rowid)
        # those that came to their own end: the others would have been longer
        answers = found[found["finish"] != FinishReason.ABORT]
        tokens, signal, wall_s = rows.column("trained_tokens"), signal_of(answers), rows.column("wall_s")
        self.measured_steps = range(last_step + 1 - len(rows), last_step + 1)
        self.wall_s, self.step_s = float(np.nansum(wall_s)), Spread.of(wall_s)
        self.stage_spreads = {stage: Spread.of(rows.column(f"stage_s.{stage}")) for stage in STAGES}
        means_s = {stage: spread.mean for stage, spread in self.stage_spreads.items() if spread}
        self.stage_s = StageTimes(**means_s) if means_s else None  # per step
        self.occupancy = Occupancy(looked_at, spans, self.config) if len(times) and len(spans) else None
        self.trained_tokens, self.dropped_tokens = int(np.nansum(tokens)), rows.dropped_tokens()
        self.answer_tokens = Spread.of(answers["num_tokens"])  # sampled, per answer
        # of each step: from the end of 95 in 100 answers to that of the last; and its share of it
        self.tail_s = Spread.of(tails_s(answers["finished_s"], times))
        mean_s = self.step_s.mean if self.step_s else 0.0
        self.tail_share = min(1.0, self.tail_s.mean / mean_s) if self.tail_s and mean_s else None
        # from an answer's end to its verdict, the wait for a worker included
        self.verdict_s = Spread.of(answers["scored_s"] - answers["finished_s"])
        self.no_signal_share = 1.0 - float(signal.mean()) if len(signal) else None  # of the groups
        self.lag_mean = float(np.average(rows.column("lag_mean"), weights=tokens)) if tokens.sum() else None
        self.lag_max = int(rows.column("lag_max").max()) if tokens.sum() else None
        self.ratio_outside = tables.mean(rows.column("ratio_outside"))
        self.effective_samples = tables.mean(rows.column("effective_samples"))
        self.preemptions = int(np.nansum(rows.column("preemptions")))
        self.goodput_tokens_per_s = self.trained_tokens / self.wall_s if self.wall_s else None
        self.decided_tokens = decided = self.trained_tokens + sum(self.dropped_tokens.values())
        self.useful_share = self.trained_tokens / decided if decided else None


def signal_of(answers: Columns) -> BoolArray:
    """[G] whether the rewards of a group differ, of the groups with at least two verdicts."""
    groups, begins = tables.by_group(answers[np.isfinite(answers["reward"])])
    rewards = groups["reward"]
    differ: BoolArray = np.maximum.reduceat(rewards, begins) > np.minimum.reduceat(rewards, begins)
    return differ[np.diff(begins, append=len(rewards)) > 1]


def tails_s(finished_s: Numbers, times: Columns) -> Numbers:
    """Of each step the seconds from the end of all but its last answers to the end of the last.

    The last are one in twenty, and at least one. A step's answers are those that finished in it.
    """
    finished_s = np.sort(finished_s)  # the unknown come last, after every step
    ends = np.searchsorted(finished_s, times["end_s"], side="right")
    counts = ends - np.searchsorted(finished_s, times["start_s"], side="right")
    num_tail = np.maximum(1, np.floor(TAIL_SHARE * counts)).astype(np.int64)
    last, num_tail = ends[counts >= 2] - 1, num_tail[counts >= 2]
    tails: Numbers = finished_s[last] - finished_s[last - num_tail]
    return tails


def metrics_text(run_dir: Path) -> str:
    """A run for Prometheus, also while it goes on; what it has not measured yet is left out."""
    facts = read_run(run_dir).readable()
    with reading(run_dir) as connection:
        rows, ledger = RowColumns(connection), Ledger(connection, run_dir, None)
        books, restarts = ledger.totals(), ledger.restarts()
    found: dict[str, str] = {}
    for family in _families(facts, books, rows, restarts):
        found.setdefault(family[0], family_text(*family))  # accounts know totals better than rows
    return "".join(found.values())


def family_text(name: str, help: str, samples: float | Mapping[Labels, float]) -> str:
    """One family of samples as the format wants it; by its name it is a counter or a gauge."""
    name, kind = f"headrace_{name}", "counter" if name.endswith("_total") else "gauge"
    text = f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
    for labels, value in (samples if isinstance(samples, Mapping) else {(): samples}).items():
        inside = ",".join(f'{label}="{said.translate(_ESCAPES)}"' for label, said in labels)
        text += f"{name}{{{inside}}} {_number(value)}\n" if inside else f"{name} {_number(value)}\n"
    return text


def _families(facts: RunFacts, books: Books, rows: RowColumns, restarts: list[Restart]) -> Iterator[Family]:
    run = {"run": facts.path.resolve().name, "state": str(facts.state), "version": __version__}
    yield "info", "The run, how it stands, and the version that tells it.", {tuple(run.items()): 1.0}
    yield "running", "Whether a process trains the run.", facts.state is RunState.RUNNING
    yield "step", "Steps that are complete.", facts.steps
    yield "steps_wanted", "Steps that the run is to take.", facts.wanted_steps
    if facts.score_after is not None:
        yield "held_out_score", "Mean reward on held-out prompts, when last measured.", facts.score_after
    for unit in ("tokens", "trajectories"):
        title, reasons = unit.capitalize(), sorted(books.dropped.items())
        yield f"generated_{unit}_total", f"{title} generated.", getattr(books.generated, unit)
        yield f"trained_{unit}_total", f"{title} trained on.", getattr(books.trained, unit)
        dropped: dict[Labels, float] = {(("reason", why),): getattr(held, unit) for why, held in reasons}
        yield f"dropped_{unit}_total", f"{title} not trained on, by reason.", dropped
        buffered, in_flight = getattr(books.buffered, unit), getattr(books.in_flight, unit)
        yield f"buffered_{unit}", f"{title} scored and not yet trained on.", buffered
        yield f"in_flight_{unit}", f"{title} being generated or scored.", in_flight
    busy_s = {stage: float(np.nansum(rows.column(f"stage_s.{stage}"))) for stage in STAGES}
    by_stage: dict[Labels, float] = {(("stage", stage),): s for stage, s in busy_s.items()}
    yield "stage_seconds_total", "Seconds that each stage was busy.", by_stage
    for name, metric in ROW_METRICS.items():
        values, help = rows.column(name), f"{metric.help[0].upper()}{metric.help[1:]}"
        exported = metric.exported or (f"{name}_total" if metric.over == "sum" else name)
        if exported.endswith("_total"):
            yield exported, f"{help}.", float(values[np.isfinite(values)].sum())
        elif len(values):
            yield exported, f"{help}, of the last step.", float(values[-1])
    wall_s, trained_tokens = rows.column("wall_s"), rows.column("trained_tokens")
    if len(rows):
        yield "step_seconds", "Seconds of the last step.", float(wall_s[-1])
    if (recent_s := wall_s[-RATE_STEPS:].sum()) > 0:
        goodput = float(trained_tokens[-RATE_STEPS:].sum() / recent_s)
        yield "goodput_tokens_per_second", f"Trained tokens per second, last {RATE_STEPS} steps.", goodput
    yield "restarts_total", "Times the run was resumed.", len(restarts)
    yield "redone_steps_total", "Steps that restarts took again.", sum(r.redone_steps for r in restarts)
    lost_tokens = sum(restart.lost_tokens for restart in restarts)
    yield "lost_tokens_total", "Tokens that were gone with a process that died.", lost_tokens


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def write_trace(run_dir: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write a run's timeline, also while it goes on; returns the file and its number of events."""
    path = out or run_dir / "trace.json"
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a directory; name a file with --out")
    with reading(run_dir) as connection:
        spans, restarts = tables.read_spans(connection), Ledger(connection, run_dir, None).restarts()
        of_run = _run_events(connection, spans, restarts)
        found = [*_stage_events(spans), *of_run, *_account_events(connection)]
    events = list(_numbered(sorted(found, key=lambda event: int(event["ts"]))))
    about = {"displayTimeUnit": "ms", "otherData": {"run": str(run_dir.resolve())}}
    try:
        write_whole(path, json.dumps(about | {"traceEvents": events}))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
    return path, len(events)


def _numbered(events: list[Event]) -> Iterator[Event]:
    """Processes and threads by number, after the names of all of them."""
    tids = {key: i for i, key in enumerate(dict.fromkeys((e["pid"], e["tid"]) for e in events), 1)}
    pids = {key: i for i, key in enumerate(dict.fromkeys(process for process, _ in tids), 1)}
    named = [("process", process, pid, 0) for process, pid in pids.items()]
    named += [("thread", thread, pids[process], tid) for (process, thread), tid in tids.items()]
    for kind, name, pid, tid in named:
        order = tid or (_RUN, DEVICE, REWARD).index(name.split(" (")[0])
        for key, value in (("name", name), ("sort_index", order)):
            yield {"name": f"{kind}_{key}", "ph": "M", "pid": pid, "tid": tid, "args": {key: value}}
    for event in events:
        yield event | {"pid": pids[event["pid"]], "tid": tids[event["pid"], event["tid"]]}


def _stage_events(spans: Columns) -> Iterator[Event]:
    """Every span, on the first free track of its stage and worker."""
    spans = spans[np.lexsort((-spans["end_s"], spans["start_s"]))]
    tracks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # until when each is taken
    for _, stage, worker, version, start_s, end_s, detail in spans.tolist():
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


def _run_events(connection: sqlite3.Connection, spans: Columns, restarts: list[Restart]) -> Iterator[Event]:
    """Where versions were published and the run was resumed; every step, with lag, reward and goodput at its end."""
    published = spans[spans["stage"] == "publish"]
    for version, end_s in zip(published["version"], published["end_s"].tolist(), strict=True):
        yield _event(f"version {version:.0f}", "i", end_s, {"version": int(version)}, s="p")
    for restart in map(asdict, restarts):
        yield _event(f"restart {restart.pop('number')}", "i", restart.pop("at_s"), restart, s="g")
    rows = RowColumns(connection)
    first = int(rows.column("step")[0]) if len(rows) else 0
    numbers = {name: rows.column(name) for name in (*_STEP_NUMBERS, "lag_max", "wall_s")}
    for start_s, end_s, step, _ in tables.read_steps(connection, rows).tolist():
        row = {name: float(values[step - first]) for name, values in numbers.items()}
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
    found = connection.execute(_HELD)
    names = [name for name, *_ in found.description[1:]]
    held, written, last_s, due_s = [0] * len(names), [0] * len(names), 0.0, 0.0
    for at_s, *amounts in chain(found, [(math.inf,)]):
        if at_s >= due_s:  # what changed meanwhile
            for name, amount, before in zip(names, held, written, strict=True):
                if amount != before:
                    yield _event(name, "C", last_s, {name.split()[0]: amount})
            written, due_s = held, at_s + COUNTER_S
        held, last_s = amounts, max(last_s, at_s)


def _event(name: str, kind: str, at_s: float, args: Event, **more: Any) -> Event:
    """An event of the run as a whole; a counter has the values that are known."""
    if kind == "C":
        args = {key: value for key, value in args.items() if value is not None}
    return {"name": name, "ph": kind, "ts": _us(at_s), "pid": _RUN, "tid": _STEPS, "args": args, **more}


def _us(at_s: float) -> int:
    return round(at_s * 1e6)

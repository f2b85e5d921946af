"""What the page asks of the books besides curves: accounts, spans, lag, rewards, trajectories.

Nothing here looks at a whole table when it is asked again: it reads accounts, the newest entries, or a page of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from headrace.dashboard.series import looking_into, when_created
from headrace.ledger.clock import union_length
from headrace.ledger.ledger import Books
from headrace.runs.columns import Columns, read_spans, read_trajectories
from headrace.types import STAGES

MOST_SPANS = 20_000  # of a timeline
FINEST = 800  # parts of a timeline that can be told apart; spans that are closer are drawn as one
MOST_LAG_BUCKETS = 32
NUM_REWARDS = 1000  # of the first and of the newest answers
MOST_BARS = 20  # of a histogram
PAGE_SIZE = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stage was busy, in one worker; spans that lie close together are one bar."""

    lane: str
    stage: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every worker did in the last seconds of a run; `busy` is the share of them by lane."""

    start_s: float
    end_s: float
    lanes: tuple[str, ...]
    busy: Mapping[str, float]
    bars: Sequence[Bar]


@dataclass(slots=True, kw_only=True)
class LagShares:
    """Trained tokens by step and lag; grows with the run, reading each transfer once."""

    created: str = ""  # when the ledger was: another run may take the place of one
    width: int = 1  # steps in a bucket
    last_id: int = 0  # of the transfers that were read
    tokens: Counter[tuple[int, int]] = field(default_factory=Counter)  # by bucket and lag


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShape:
    """How the rewards of the first answers and of the newest are distributed, as shares of each."""

    labels: tuple[str, ...]
    first: tuple[float, ...]
    newest: tuple[float, ...]
    num_first: int
    num_newest: int
    parts: Mapping[str, tuple[float, float]]  # the mean of each, first and newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which trajectories to list; `older_than` and `newer_than` are places in the list."""

    state: str | None = None
    reason: str | None = None
    step: int | None = None  # they were trained in
    older_than: int | None = None
    newer_than: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One trajectory in a list; the names are those of its columns."""

    rowid: int
    id: str
    num_tokens: int
    reward: float | None
    finish: str | None
    state: str
    drop_reason: str | None
    lag: int | None
    trained_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some lines, the newest first, and whether there are more on either side."""

    lines: Sequence[Line]
    has_newer: bool
    has_older: bool


def read_accounts(run_dir: Path) -> Books:
    """What became of everything generated."""
    with looking_into(run_dir) as connection:
        found = connection.execute("SELECT name, tokens, trajectories FROM accounts")
        return Books.of({name: (tokens, trajectories) for name, tokens, trajectories in found})


def read_elapsed_s(run_dir: Path) -> float:
    """Seconds on the run's clock when something was last booked; pauses between two processes do not count."""
    with looking_into(run_dir) as connection:
        (span_s,) = connection.execute("SELECT MAX(end_s) FROM spans").fetchone()
        moved = connection.execute("SELECT at_s FROM transfers ORDER BY id DESC LIMIT 1").fetchone()
    return max(float(span_s or 0.0), float(moved[0]) if moved else 0.0)


def read_timeline(run_dir: Path, num_steps: int) -> Timeline:
    """About the last so many steps; an evaluation between them takes its part of the time."""
    with looking_into(run_dir) as connection:
        (end_s,) = connection.execute("SELECT MAX(end_s) FROM spans").fetchone()
        (length_s,) = connection.execute(
            "SELECT SUM(wall_s) FROM (SELECT wall_s FROM rows ORDER BY step DESC LIMIT ?)", (num_steps,)
        ).fetchone()
        if end_s is None:
            return Timeline(start_s=0.0, end_s=0.0, lanes=(), busy={}, bars=())
        start_s = max(0.0, end_s - length_s) if length_s else 0.0
        spans = read_spans(connection, since_s=start_s, newest=MOST_SPANS)
    if len(spans) == MOST_SPANS:
        start_s = float(spans["end_s"].min())
    by_lane: dict[tuple[str, str], list[tuple[float, float]]] = {}
    columns = (spans[name].tolist() for name in ("stage", "worker", "start_s", "end_s"))
    for stage, worker, begun_s, ended_s in zip(*columns, strict=True):
        by_lane.setdefault((stage, worker), []).append((max(begun_s, start_s), ended_s))
    names = _lane_names(by_lane)
    length_s = max(end_s - start_s, 1e-9)
    bars = [
        Bar(lane=names[key], stage=key[0], start_s=begin, end_s=end)
        for key in names
        for begin, end in _joined(by_lane[key], gap_s=length_s / FINEST)
    ]
    busy = {names[key]: union_length(by_lane[key]) / length_s for key in names}
    return Timeline(start_s=start_s, end_s=end_s, lanes=tuple(names.values()), busy=busy, bars=bars)


def update_lag_shares(run_dir: Path, shares: LagShares) -> None:
    """Read the transfers that came since the last look."""
    with looking_into(run_dir) as connection:
        (last_id, last_step) = connection.execute(
            "SELECT COALESCE(MAX(id), 0), (SELECT COALESCE(MAX(step), 0) FROM rows) FROM transfers"
        ).fetchone()
        if (created := when_created(connection)) != shares.created:
            shares.created, shares.width, shares.last_id, shares.tokens = created, 1, 0, Counter()
        while last_step > shares.width * MOST_LAG_BUCKETS:
            shares.width *= 2
            halved: Counter[tuple[int, int]] = Counter()
            for (bucket, lag), tokens in shares.tokens.items():
                halved[bucket // 2, lag] += tokens
            shares.tokens = halved
        found = connection.execute(
            "SELECT (step - 1) / ?1, COALESCE(lag, 0), SUM(tokens) FROM transfers "
            "WHERE id > ?2 AND id <= ?3 AND credit = 'trained' GROUP BY 1, 2",
            (shares.width, shares.last_id, last_id),
        )
        for bucket, lag, tokens in found:
            shares.tokens[bucket, lag] += tokens
        shares.last_id = last_id


def read_rewards(run_dir: Path) -> RewardShape:
    """The rewards of the first answers beside those of the newest; of a short run, of its two halves."""
    with looking_into(run_dir) as connection:
        (num_answers,) = connection.execute("SELECT COALESCE(MAX(rowid), 0) FROM trajectories").fetchone()
        num_each = min(NUM_REWARDS, (num_answers + 1) // 2)
        both = read_trajectories(connection, oldest=num_each), read_trajectories(connection, newest=num_each)
    first, newest = (found.where(np.isfinite(found["reward"])) for found in both)
    labels, shares = _histogram(first["reward"].tolist(), newest["reward"].tolist())
    parts_first, parts_newest = _part_means(first), _part_means(newest)
    return RewardShape(
        labels=labels,
        first=shares[0],
        newest=shares[1],
        num_first=len(first),
        num_newest=len(newest),
        parts={name: (parts_first[name], parts_newest[name]) for name in parts_first if name in parts_newest},
    )


def read_page(run_dir: Path, wanted: Wanted) -> Page:
    """One page of trajectories."""
    conditions: dict[str, str | int | None] = {
        "rowid < ?": wanted.older_than,
        "rowid > ?": wanted.newer_than,
        "state = ?": wanted.state,
        "drop_reason = ?": wanted.reason,
        "trained_step = ?": wanted.step,
    }
    given = {text: value for text, value in conditions.items() if value is not None}
    backwards = wanted.newer_than is not None
    names = [field.name for field in fields(Line)]
    query = (
        f"SELECT {', '.join(names)} FROM trajectories WHERE {' AND '.join(given) or '1'} "
        f"ORDER BY rowid {'ASC' if backwards else 'DESC'} LIMIT {PAGE_SIZE + 1}"
    )
    with looking_into(run_dir) as connection:
        found = connection.execute(query, tuple(given.values())).fetchall()
    more, found = len(found) > PAGE_SIZE, found[:PAGE_SIZE]
    lines = [Line(**dict(zip(names, values, strict=True))) for values in (found[::-1] if backwards else found)]
    return Page(
        lines=lines,
        has_newer=more if backwards else wanted.older_than is not None,
        has_older=True if backwards else more,
    )


def _lane_names(lanes: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Stages in the order of a step, then whatever else there is; the worker only where a stage has several."""
    order = {stage: place for place, stage in enumerate(STAGES)}
    keys = sorted(lanes, key=lambda key: (order.get(key[0], len(order)), key))
    num_workers = Counter(stage for stage, _ in keys)
    return {key: key[0] if num_workers[key[0]] == 1 else f"{key[0]} · {key[1]}" for key in keys}


def _joined(spans: Iterable[tuple[float, float]], *, gap_s: float) -> list[tuple[float, float]]:
    """Spans in order, those that are closer than a gap as one."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if joined and start_s <= joined[-1][1] + gap_s:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((start_s, end_s))
    return joined


def _histogram(
    first: Sequence[float], newest: Sequence[float]
) -> tuple[tuple[str, ...], tuple[tuple[float, ...], tuple[float, ...]]]:
    """The middle of each bar, and the share of each side in it. Rewards of a few values have a bar each."""
    values = sorted({*first, *newest})
    if len(values) <= MOST_BARS:
        labels = tuple(f"{value:g}" for value in values)
        places: dict[float, int] = {value: place for place, value in enumerate(values)}
    else:
        low, width = values[0], (values[-1] - values[0]) / MOST_BARS
        labels = tuple(f"{low + (place + 0.5) * width:.3g}" for place in range(MOST_BARS))
        places = {value: min(int((value - low) / width), MOST_BARS - 1) for value in values}
    shares = []
    for side in (first, newest):
        counts = Counter(places[value] for value in side)
        shares.append(tuple(counts[place] / max(len(side), 1) for place in range(len(labels))))
    return labels, (shares[0], shares[1])


def _part_means(found: Columns) -> dict[str, float]:
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for text in found["reward_parts"].tolist():
        for name, value in json.loads(text).items():
            if isinstance(value, int | float):
                sums[name] += value  # type: ignore[assignment]
                counts[name] += 1
    return {name: sums[name] / counts[name] for name in sums}

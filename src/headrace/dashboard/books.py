"""What the page asks of the books besides curves: accounts, spans, lag, rewards, trajectories.

Nothing here looks at a whole table when it is asked again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from headrace.dashboard.series import looking_into, when_created
from headrace.errors import HeadraceError
from headrace.ledger.ledger import Books
from headrace.runs.audit import books
from headrace.runs.columns import Columns, Numbers, one, read_spans, read_trajectories, union
from headrace.runs.show import TokenTexts, TrajectoryDetails, read_trajectory, token_texts
from headrace.types import STAGES

MOST_SPANS = 20_000  # of a timeline
FINEST = 800  # parts of a timeline that can be told apart; spans that are closer are drawn as one
NUM_REWARDS = 1000  # of the first and of the newest answers
MOST_BARS = 20  # of a histogram
PAGE_SIZE = 25
PAGE_COLUMNS = ("answer", "reward", "tokens", "fate", "step", "lag", "ended by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every worker did in the last seconds of a run, a lane each; `busy` is its share of them."""

    start_s: float
    end_s: float
    lanes: tuple[str, ...]
    busy: Mapping[str, float]
    bars: Sequence[tuple[str, str, float, float]]  # lane, stage, start, end; close spans are one bar


@dataclass(slots=True, kw_only=True)
class LagShares:
    """Trained tokens by step and lag; grows with the run, reading each transfer once."""

    created: str = ""  # when the ledger was: another run may take the place of one
    last_id: int = 0  # of the transfers that were read
    tokens: Counter[tuple[int, int]] = field(default_factory=Counter)  # by step and lag


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
class Page:
    """Some trajectories, the newest first, and whether there are more on either side."""

    places: Sequence[int]  # in the list of all
    rows: Sequence[tuple[str, ...]]  # under PAGE_COLUMNS
    has_newer: bool
    has_older: bool


def read_accounts(run_dir: Path) -> Books:
    with looking_into(run_dir):
        return books(run_dir)


def read_elapsed_s(run_dir: Path) -> float:
    """Seconds on the run's clock when something was last booked; pauses between processes do not count."""
    with looking_into(run_dir) as connection:
        span_s = one(connection, "SELECT MAX(end_s) FROM spans")
        moved_s = one(connection, "SELECT at_s FROM transfers ORDER BY id DESC LIMIT 1")
    return max(float(span_s or 0.0), float(moved_s or 0.0))


def read_timeline(run_dir: Path, num_steps: int) -> Timeline:
    """About the last `num_steps` steps; an evaluation between them takes its part of the time."""
    last = "SELECT SUM(wall_s) FROM (SELECT wall_s FROM rows ORDER BY step DESC LIMIT ?)"
    with looking_into(run_dir) as connection:
        end_s, length_s = one(connection, "SELECT MAX(end_s) FROM spans"), one(connection, last, num_steps)
        if end_s is None:
            return Timeline(start_s=0.0, end_s=0.0, lanes=(), busy={}, bars=())
        start_s = max(0.0, end_s - length_s) if length_s else 0.0
        spans = read_spans(connection, since_s=start_s, newest=MOST_SPANS)
    if len(spans) == MOST_SPANS:
        start_s = float(spans["end_s"].min())
    length_s = max(end_s - start_s, 1e-9)
    gap_s, bars, busy = length_s / FINEST, [], {}
    lanes = set(zip(spans["stage"], spans["worker"], strict=True))
    for (stage, worker), name in _lane_names(lanes).items():
        own = spans.where((spans["stage"] == stage) & (spans["worker"] == worker))
        starts_s, ends_s = union((np.maximum(own["start_s"], start_s), own["end_s"]))
        busy[name] = float((ends_s - starts_s).sum()) / length_s
        starts_s, ends_s = union((starts_s, ends_s + gap_s))
        drawn = zip(starts_s.tolist(), (ends_s - gap_s).tolist(), strict=True)
        bars += [(name, stage, begin, end) for begin, end in drawn]
    return Timeline(start_s=start_s, end_s=end_s, lanes=tuple(busy), busy=busy, bars=bars)


def update_lag_shares(run_dir: Path, shares: LagShares) -> None:
    """Read the transfers that came since the last look."""
    with looking_into(run_dir) as connection:
        last_id = one(connection, "SELECT COALESCE(MAX(id), 0) FROM transfers")
        if (created := when_created(connection)) != shares.created:
            shares.created, shares.last_id, shares.tokens = created, 0, Counter()
        found = connection.execute(
            "SELECT step, COALESCE(lag, 0), SUM(tokens) FROM transfers "
            "WHERE id > ? AND id <= ? AND credit = 'trained' GROUP BY 1, 2",
            (shares.last_id, last_id),
        )
        for step, lag, tokens in found:
            shares.tokens[step, lag] += tokens
        shares.last_id = last_id


def read_rewards(run_dir: Path) -> RewardShape:
    """The rewards of the first answers beside those of the newest; of a short run, of its two halves."""
    with looking_into(run_dir) as connection:
        num_answers = one(connection, "SELECT COALESCE(MAX(rowid), 0) FROM trajectories")
        num_each = min(NUM_REWARDS, (num_answers + 1) // 2)
        first = read_trajectories(connection, oldest=num_each)
        newest = read_trajectories(connection, newest=num_each)
    first, newest = (found.where(np.isfinite(found["reward"])) for found in (first, newest))
    labels, shares = _histogram(first["reward"], newest["reward"])
    before, now = _part_means(first), _part_means(newest)
    return RewardShape(
        labels=labels,
        first=shares[0],
        newest=shares[1],
        num_first=len(first),
        num_newest=len(newest),
        parts={name: (before[name], now[name]) for name in before if name in now},
    )


def read_page(run_dir: Path, wanted: Wanted) -> Page:
    conditions: dict[str, str | int | None] = {
        "rowid < ?": wanted.older_than,
        "rowid > ?": wanted.newer_than,
        "state = ?": wanted.state,
        "drop_reason = ?": wanted.reason,
        "trained_step = ?": wanted.step,
    }
    given = {text: value for text, value in conditions.items() if value is not None}
    backwards = wanted.newer_than is not None
    query = (
        "SELECT rowid, id, reward, num_tokens, state, drop_reason, trained_step, lag, finish "
        f"FROM trajectories WHERE {' AND '.join(given) or '1'} "
        f"ORDER BY rowid {'ASC' if backwards else 'DESC'} LIMIT {PAGE_SIZE + 1}"
    )
    with looking_into(run_dir) as connection:
        found = connection.execute(query, tuple(given.values())).fetchall()
    more, found = len(found) > PAGE_SIZE, found[:PAGE_SIZE]
    found = found[::-1] if backwards else found
    rows = []
    for _, id, reward, num_tokens, state, reason, step, lag, finish in found:
        fate = f"dropped: {reason}" if state == "dropped" else state
        known = ("" if number is None else str(number) for number in (step, lag))
        earned = "-" if reward is None else f"{reward:g}"
        rows.append((id, earned, f"{num_tokens:,}", fate, *known, finish or "-"))
    return Page(
        places=[line[0] for line in found],
        rows=rows,
        has_newer=more if backwards else wanted.older_than is not None,
        has_older=backwards or more,
    )


def read_answer(run_dir: Path, id: str) -> tuple[TrajectoryDetails, TokenTexts | None]:
    """One trajectory, and what its tokens say; None where the run's tokenizer cannot be read."""
    with looking_into(run_dir):  # what is wrong with the file is said in words
        found = read_trajectory(run_dir, id)
    try:
        return found, token_texts(run_dir)
    except HeadraceError:
        return found, None  # the settings, which say where the tokenizer is, cannot be read


def _lane_names(lanes: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Stages in the order of a step, then whatever else there is; the worker only where a stage has several."""
    order = {stage: place for place, stage in enumerate(STAGES)}
    keys = sorted(lanes, key=lambda key: (order.get(key[0], len(order)), key))
    num_workers = Counter(stage for stage, _ in keys)
    return {key: key[0] if num_workers[key[0]] == 1 else f"{key[0]} · {key[1]}" for key in keys}


def _histogram(first: Numbers, newest: Numbers) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """The middle of each bar, and the share of each side in it; few values have a bar each."""
    values = np.unique(np.concatenate([first, newest]))
    edges, labels = np.append(values, np.inf), tuple(f"{value:g}" for value in values)
    if len(values) > MOST_BARS:
        edges = np.linspace(values[0], values[-1], MOST_BARS + 1)
        labels = tuple(f"{middle:.3g}" for middle in (edges[1:] + edges[:-1]) / 2)
    sides = (first, newest)
    counts = [np.histogram(side, edges)[0] if len(values) else np.empty(0) for side in sides]
    return labels, [tuple((side / max(side.sum(), 1)).tolist()) for side in counts]


def _part_means(found: Columns) -> dict[str, float]:
    values = defaultdict(list)
    for text in found["reward_parts"].tolist():
        for name, value in json.loads(text).items():
            if isinstance(value, int | float):
                values[name].append(value)
    return {name: fmean(found) for name, found in values.items()}

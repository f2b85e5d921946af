"""What the page asks of a run's ledger: curves over its steps, accounts, spans, lag, rewards, and its answers.

Nothing here looks at a whole table when it is asked again: every row is read once. A curve has a
point for each step while they are few, and one for 2, 4, 8 ... of them when they are many.
"""

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import HeadraceError, RunError
from headrace.ledger.database import FILE_NAME
from headrace.ledger.ledger import Books, Ledger
from headrace.measured import ROW_METRICS, STAGES
from headrace.runs import show
from headrace.runs.columns import Ints, Numbers, RowColumns, mean, one, query, read_spans, reading, union
from headrace.runs.facts import UnknownNameError
from headrace.runs.report import count, or_dash
from headrace.types import Trajectory

Points = list[tuple[float, float | None]]
Asked = tuple[show.TokenTexts | None, str | None, Mapping[str, str]]
MOST_POINTS = 400  # of a curve
# What a curve may be drawn along: the column that is added up, and how much of it is one unit.
AXES = {"step": ("", 1), "trained tokens": ("trained_tokens", 1), "hours": ("wall_s", 3600)}
RECENT_STEPS = 20  # what "now" is in the overview

_DERIVED = ("reward_low", "reward_high", "backlog_change", "waiting_s")
# How the numbers of several rows become one; what a row adds up becomes the mean of its steps.
_OVER = {name: metric.over for name, metric in ROW_METRICS.items() if metric.over != "sum"}
_COLUMNS = ("step", *ROW_METRICS, *_DERIVED, *(f"stage_s.{stage}" for stage in STAGES))
MOST_SPANS = 20_000  # of a timeline
FINEST = 800  # parts of a timeline that can be told apart; spans that are closer are drawn as one
NUM_REWARDS = 1000  # of the first and of the newest answers
PAGE_SIZE = 25
PAGE_COLUMNS = ("answer", "reward", "tokens", "fate", "step", "lag", "ended by", "text")
MOST_CHARACTERS = 200  # of a text in a list
MOST_PROMPT_TOKENS = 4000  # of a prompt's text
_SQL = Path(__file__).with_name("books.sql").read_text(encoding="utf-8")
LAGS, PARTS, _REWARDS, _PART_MEANS, ELAPSED, _PAGE, _GROUP, _NEIGHBOURS, _CREATED, _LAST_S = _SQL.split(";")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The rows of a run by column, up to the newest."""

    created: str = ""  # when the ledger was: another run may take the place of one
    columns: Mapping[str, Numbers] = field(default_factory=lambda: dict.fromkeys(_COLUMNS, np.empty(0)))
    last_step: int = 0
    num_damaged: int = 0  # rows that cannot be read

    @property
    def width(self) -> int:
        return steps_together(self.last_step, MOST_POINTS)

    def curve(self, name: str, scale: float = 1.0, by: str = "step") -> Points:
        """The points of one curve, with gaps, along one of `AXES`; `goodput` is trained tokens per second."""
        if name == "goodput":
            return self.ratio(self.columns["trained_tokens"], self.columns["wall_s"], by)
        return self._points(self.columns[name] * scale, by, _OVER.get(name, "mean"))

    def ratio(self, values: Numbers, of: Numbers, by: str) -> Points:
        both = zip(self._points(values, by), self._points(of, by), strict=True)
        return [(x, value / num if value and num else value) for (x, value), (_, num) in both]

    def _points(self, values: Numbers, by: str, over: str = "mean") -> Points:
        """A number for the finite values of each `width` steps, at the last of them; a gap where there is none."""
        begins = np.flatnonzero(np.diff((self.places("step") - 1) // self.width, prepend=-1))
        ends = np.append(begins[1:], len(values))[: len(begins)] - 1
        found = values[ends]  # over == "last"
        if over == "mean":
            known = np.isfinite(values)
            counts = np.add.reduceat(known, begins, dtype=np.int64)
            found = np.add.reduceat(np.where(known, values, 0.0), begins) / np.where(counts > 0, counts, np.nan)
        elif over != "last":
            largest = {"max": np.fmax, "min": np.fmin}[over]  # of those that are numbers
            found = largest.reduceat(np.where(np.isfinite(values), values, np.nan), begins)
        both = zip(self.places(by)[ends].tolist(), found.tolist(), strict=True)
        return [(place, value if math.isfinite(value) else None) for place, value in both]

    def places(self, by: str) -> Numbers | Ints:
        """Where each row stands on one of `AXES`."""
        if by == "step":
            return self.columns["step"].astype(np.int64)
        column, per = AXES[by]
        return np.asarray(np.nancumsum(self.columns[column]) / per)

    def goodput(self, num_steps: int = 0) -> float | None:
        tokens, wall_s = self.columns["trained_tokens"], self.columns["wall_s"]
        taken_s = np.nansum(wall_s[-num_steps:])
        return float(np.nansum(tokens[-num_steps:]) / taken_s) if taken_s else None

    def now(self, name: str) -> float | None:
        """The mean of the last steps that have the number."""
        return mean(self.columns[name][-RECENT_STEPS:])


def steps_together(last_step: int, most: int) -> int:
    """1, 2, 4, 8 ...: so many that there are at most `most` of them."""
    return int(2 ** max(0, math.ceil(math.log2(max(last_step, 1) / most))))


def read_series(run_dir: Path, before: Series) -> Series:
    """The rows as they are now; `before` is what the last look found, or an empty Series."""
    with looking_into(run_dir) as connection:
        created = str(one(connection, _CREATED))
        last_step = one(connection, "SELECT COALESCE(MAX(step), 0) FROM rows")
        if created != before.created or last_step < before.last_step:
            before = Series(created=created)
        if last_step == before.last_step:
            return before
        rows = RowColumns(connection, after_step=before.last_step, strict=False)
        new = {name: rows.column(name) for name in _COLUMNS if name not in _DERIVED}
        columns = {name: np.append(before.columns[name], more) for name, more in new.items()}
        columns |= zip(_DERIVED, _derived(columns), strict=True)
        num_damaged = before.num_damaged + int(rows.damaged.sum())
        return replace(before, columns=columns, last_step=last_step, num_damaged=num_damaged)


def _derived(of: Mapping[str, Numbers]) -> Iterator[Numbers]:
    """Those in `_DERIVED`. What waits is as much as comes in a second times how long it waits."""
    yield from (of["reward_mean"] + sign * of["reward_std"] for sign in (-1, 1))
    yield np.diff(of["backlog_tokens"], prepend=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        yield of["backlog_tokens"] * of["wall_s"] / of["generated_tokens"]


@contextmanager
def looking_into(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """One view of the books. Whatever is wrong with them is said in words."""
    if not (run_dir / FILE_NAME).is_file():
        raise RunError(f"{run_dir.name} has no ledger yet: it is just starting, or ended before its first step.")
    try:
        with reading(run_dir) as connection:
            yield connection
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise RunError(f"The ledger of {run_dir.name} holds something that cannot be read ({error}).") from error


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over a run's transfers, by step and something else; each is read once, as it comes."""

    created: str = ""  # when the ledger was: another run may take the place of one
    last_id: int = 0  # of the transfers that were read
    sums: Counter[tuple[int, Any]] = field(default_factory=Counter)
    counts: Counter[tuple[int, Any]] = field(default_factory=Counter)

    def update(self, run_dir: Path, query: str) -> "Tally":
        """Read what is new; a copy, which other threads do not change."""
        with looking_into(run_dir) as connection:
            last_id = one(connection, "SELECT COALESCE(MAX(id), 0) FROM transfers")
            if (created := str(one(connection, _CREATED))) != self.created:
                self.created, self.last_id, self.sums, self.counts = created, 0, Counter(), Counter()
            for step, key, total, num in connection.execute(query, (self.last_id, last_id)):
                self.sums[step, key] += total
                self.counts[step, key] += num
            self.last_id = last_id
        return replace(self, sums=self.sums.copy(), counts=self.counts.copy())

    def means(self, series: Series, by: str = "step") -> dict[str, Points]:
        """By key, the mean of each step or, of a long run, of a few, as `Series.curve` has them."""
        steps, found, both = series.places("step").tolist(), {}, (self.sums, self.counts)
        for key in sorted({key for _, key in self.sums}):
            total, num = (np.array([held.get((step, key), math.nan) for step in steps]) for held in both)
            found[key] = [point for point in series.ratio(total, num, by) if point[1] is not None]
        return found


def read_accounts(run_dir: Path) -> Books:
    with looking_into(run_dir) as connection:
        return Ledger(connection, run_dir, None).totals()


class Timeline:
    """What every worker did in about the last `num_steps` steps; an evaluation between them takes its part."""

    def __init__(self, run_dir: Path, num_steps: int) -> None:
        with looking_into(run_dir) as connection:
            self.end_s = one(connection, "SELECT MAX(end_s) FROM spans") or 0.0
            length_s = one(connection, _LAST_S, num_steps)
            self.start_s = max(0.0, self.end_s - length_s) if length_s else 0.0
            spans = read_spans(connection, since_s=self.start_s, newest=MOST_SPANS)
        if len(spans) == MOST_SPANS:
            self.start_s = float(spans["end_s"].min())
        length_s = max(self.end_s - self.start_s, 1e-9)
        self.busy: dict[str, float] = {}  # by lane (a stage, or one worker of it), the share of these seconds
        self.bars: list[tuple[str, str, float, float]] = []  # lane, stage, start, end; close spans are one bar
        # stages in the order of a step, then whatever else; the worker only if there are several
        order, gap_s = {stage: place for place, stage in enumerate(STAGES)}, length_s / FINEST
        lanes = set(zip(spans["stage"].tolist(), spans["worker"].tolist(), strict=True))
        num_workers = Counter(stage for stage, _ in lanes)
        for stage, worker in sorted(lanes, key=lambda lane: (order.get(lane[0], len(order)), lane)):
            name = stage if num_workers[stage] == 1 else f"{stage} · {worker}"
            own = spans[(spans["stage"] == stage) & (spans["worker"] == worker)]
            starts_s, ends_s = union((np.maximum(own["start_s"], self.start_s), own["end_s"]))
            self.busy[name] = float((ends_s - starts_s).sum()) / length_s
            starts_s, ends_s = union((starts_s, ends_s + gap_s))
            drawn = zip(starts_s.tolist(), (ends_s - gap_s).tolist(), strict=True)
            self.bars += [(name, stage, begin, end) for begin, end in drawn]


class Rewards:
    """Rewards of the first answers and of the newest; of a short run, those of its two halves."""

    def __init__(self, run_dir: Path) -> None:
        with looking_into(run_dir) as connection:
            last = one(connection, "SELECT COALESCE(MAX(rowid), 0) FROM trajectories")
            num_each = min(NUM_REWARDS, (last + 1) // 2)
            sides = ((1, num_each), (last - num_each + 1, last))
            self.first, self.newest = (query(connection, _REWARDS, *side)["reward"] for side in sides)
            before, now = (dict(connection.execute(_PART_MEANS, side)) for side in sides)
        # of each part of the rewards, both means
        self.parts = {name: (before[name], now[name]) for name in before if name in now}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which trajectories to list; each is the name of a value in an address."""

    state: str | None = None
    reason: str | None = None
    step: int | None = None  # they were trained in
    least: float | None = None  # reward
    most: float | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Wanted":
        numbers = {"step": int, "least": float, "most": float}
        read = {name: number(query, name, kind) for name, kind in numbers.items()}
        return cls(state=query.get("state") or None, reason=query.get("reason") or None, **read)

    def conditions(self) -> dict[str, Any]:
        found: dict[str, Any] = {"state = ?": self.state, "drop_reason = ?": self.reason, "trained_step = ?": self.step}
        found |= {"reward >= ?": self.least, "reward <= ?": self.most}
        return {text: value for text, value in found.items() if value is not None}


def number(query: Mapping[str, str], name: str, kind: type = int) -> Any:
    """The number that an address gives as `name`, if it does."""
    if not (text := query.get(name)):
        return None
    try:
        value = kind(text)
    except ValueError:
        raise UnknownNameError(f"{name}={text} in the address is not a number.") from None
    if not (math.isfinite(value) and abs(value) < 2**63):
        raise UnknownNameError(f"{name}={text} in the address is out of range.")
    return value


class Page:
    """Trajectories before the place `older`, or after the place `newer`, or the newest; the newest come first."""

    def __init__(self, run_dir: Path, wanted: Wanted, *, older: int | None = None, newer: int | None = None) -> None:
        given, backwards = wanted.conditions(), newer is not None
        if older is not None or backwards:
            given |= {"rowid > ?": newer} if backwards else {"rowid < ?": older}
        query = _PAGE.format(" AND ".join(given) or "1", "ASC" if backwards else "DESC")
        with looking_into(run_dir) as connection:
            found = connection.execute(query, (*given.values(), PAGE_SIZE + 1)).fetchall()
            more, found = len(found) > PAGE_SIZE, found[:PAGE_SIZE]
            texts = show.read_texts(connection, [line[1] for line in found])
        found = found[::-1] if backwards else found
        self.places = [line[0] for line in found]  # in the list of all
        self.has_newer, self.has_older = more if backwards else older is not None, backwards or more
        self.rows: list[tuple[str, ...]] = []  # under PAGE_COLUMNS
        for _, id, reward, num_tokens, fate, step, lag, finish in found:
            text = " ".join(texts.get(id, "(not kept)").split())
            text = text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
            self.rows.append((id, or_dash(reward, "g"), f"{num_tokens:,}", fate, step, lag, finish, text))


class Answer:
    """One trajectory, what its tokens say, and its neighbours among the `wanted`."""

    def __init__(self, run_dir: Path, id: str, wanted: Wanted) -> None:
        with looking_into(run_dir) as connection:
            self.found, given = show.TrajectoryDetails(run_dir, id), wanted.conditions()
            place = one(connection, "SELECT rowid FROM trajectories WHERE id = ?", id)
            among = " AND ".join(("", *given))
            self.newer, self.older = (
                one(connection, f"SELECT id FROM trajectories WHERE rowid {side}", place, *given.values())
                for side in (f"> ?{among} ORDER BY rowid", f"< ?{among} ORDER BY rowid DESC")
            )
        self.texts, self.prompt, self.fields = _asked(run_dir, self.found.prompt_id, self.found.whole)


class GroupAnswers:
    """All answers to one prompt; the facts of each begin with its reward."""

    def __init__(self, run_dir: Path, serial: int) -> None:
        with looking_into(run_dir) as connection:
            found = connection.execute(_GROUP, (serial,)).fetchall()
            if not found:
                first, last = connection.execute("SELECT MIN(serial), MAX(serial) FROM trajectories").fetchone()
                known = "none is complete yet" if first is None else f"they go from {first} to {last}"
                raise UnknownNameError(f"There is no group {serial} in {run_dir.name}: {known}.")
            said = show.read_texts(connection, [line[0] for line in found])
            self.newer, self.older = connection.execute(_NEIGHBOURS, (serial,)).fetchone()
        self.prompt_id, whole = found[0][1], None
        with suppress(RunError, StopIteration):  # its tokens are damaged, or no answer's are kept
            whole = show.TrajectoryDetails(run_dir, next(iter(said))).whole
        _, self.prompt, self.fields = _asked(run_dir, self.prompt_id, whole)
        several_attempts = len({line[2] for line in found}) > 1
        self.answers: list[tuple[str, dict[str, str], str | None]] = []  # id, facts, text
        for id, _, attempt, reward, parts, finish, num_tokens, reason, fate in found:
            facts, numbers = {"reward": or_dash(reward, "g")}, json.loads(parts).items()
            facts |= {f"part {name}": f"{value:g}" for name, value in numbers if isinstance(value, int | float)}
            fate = f"dropped: {reason}: {show.why_dropped(reason)}" if reason else fate
            facts |= {"ended by": finish, "length": count(num_tokens, "token"), "fate": fate}
            facts |= {"attempt": str(attempt)} if several_attempts else {}
            self.answers.append((id, facts, said.get(id)))


def _asked(run_dir: Path, prompt_id: str, whole: Trajectory | None) -> Asked:
    """The run's tokenizer, the prompt's text and its fields; None for what cannot be had."""
    texts, prompt = None, None
    with suppress(HeadraceError):  # the settings, which say where the tokenizer is, cannot be read
        texts = show.token_texts(run_dir)
    if whole is not None:
        given = show.prompt_ids(whole)[-MOST_PROMPT_TOKENS:]
        prompt = texts.text(given) if texts else " ".join(map(str, given))
    with Ledger.open(run_dir) as ledger:
        fields = ledger.prompt(prompt_id).get("fields", {})  # not kept of a very long prompt
    return texts, prompt, {name: str(value) for name, value in fields.items()}

"""The runs that a page may show, and what was read of each: kept, and shared by all who look."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlencode

from headrace.dashboard.books import LagShares, read_accounts, read_elapsed_s, update_lag_shares
from headrace.dashboard.overview import NOT_YET, Overview
from headrace.dashboard.series import Series, looking_into, read_series
from headrace.errors import ConfigError, HeadraceError, RunError
from headrace.insight.triage import Triage, triage
from headrace.ledger.files import is_run, run_config
from headrace.runs.facts import RunFacts, RunState, read_run, read_runs

FACTS_LAST_S = 10.0  # finding a run's latest score may take a look at all its rows
TRIAGE_AFTER_S = 1.5  # a page is drawn first
TRIAGE_SHARE = 0.1  # of one core, at most, goes into the triage of a run that grows
_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()  # runs are triaged


class LiveTriage:
    """What holds a run back, worked out in a thread of its own: nobody waits for it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir
        self._lock = threading.Lock()
        self._found: Triage | str = NOT_YET
        self._asked: tuple[str, int] | None = None  # ledger and number of steps that `_found` is about, or will be
        self._idle, self._next_s = True, 0.0

    def latest(self, created: str, num_steps: int) -> Triage | str:
        """The newest there is, or why there is none. A newer one is begun where there are more steps."""
        with self._lock:
            if self._asked is not None and self._asked[0] != created:  # another run took the place of this one
                self._found, self._next_s = NOT_YET, 0.0
            if self._idle and (created, num_steps) != self._asked and time.monotonic() >= self._next_s:
                self._idle, self._asked = False, (created, num_steps)
                timer = threading.Timer(TRIAGE_AFTER_S, self._work)
                timer.daemon = True
                timer.start()
            return self._found

    def _work(self) -> None:
        with _one_at_a_time:
            begun_s = time.monotonic()
            try:
                with looking_into(self._path):  # what is wrong with the file is said in words
                    found: Triage | str = triage(self._path)
            except HeadraceError as error:
                found = str(error)
            except Exception as error:  # a mistake of ours, and the thread has nobody else to tell
                _log.exception("triage of %s", self._path)
                found = f"This cannot be told: {type(error).__name__}: {error}"
            taken_s = time.monotonic() - begun_s
        with self._lock:
            self._found, self._idle = found, True
            self._next_s = time.monotonic() + taken_s * (1 / TRIAGE_SHARE - 1)


class LiveRun:
    """One run. Any thread may ask, and what has not changed is not read again."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir
        self._lock = threading.Lock()
        self._series = Series()
        self._lags = LagShares()
        self._triage = LiveTriage(run_dir)
        self._facts: RunFacts | None = None
        self._facts_at_s = 0.0

    @property
    def name(self) -> str:
        return self.path.name

    def facts(self) -> RunFacts:
        """How the run stands, as of a few seconds ago."""
        with self._lock:
            if self._facts is None or time.monotonic() - self._facts_at_s > FACTS_LAST_S:
                self._facts, self._facts_at_s = read_run(self.path), time.monotonic()
            return self._facts

    def series(self) -> Series:
        with self._lock:
            self._series = read_series(self.path, self._series)
            return self._series

    def lag_shares(self) -> LagShares:
        with self._lock:
            update_lag_shares(self.path, self._lags)
            return replace(self._lags, tokens=self._lags.tokens.copy())

    def overview(self, dollars_per_hour: float | None) -> Overview:
        facts = self.facts()
        if facts.state is RunState.UNREADABLE:
            raise RunError(facts.problem)
        elapsed_s = read_elapsed_s(self.path)
        return Overview(
            facts=facts,
            series=self.series(),
            books=read_accounts(self.path),
            elapsed_s=elapsed_s,
            dollars=None if dollars_per_hour is None else elapsed_s / 3600 * dollars_per_hour,
        )

    def triage(self) -> Triage | str:
        """What holds the run back, as of some recent step, or why that cannot be told yet."""
        series = self.series()
        if not series.last_step:
            return "The first step is under way."
        return self._triage.latest(series.created, series.last_step)

    def wanted_lag(self) -> int | None:
        """`loop.max_lag` of the run; None where its settings cannot be read."""
        try:
            return run_config(self.path).loop.max_lag
        except (RunError, ConfigError, OSError):
            return None


class Site:
    """A directory of runs, or a single run, and nothing outside it."""

    def __init__(self, root: Path, dollars_per_hour: float | None = None) -> None:
        self.root = root.resolve()
        self.dollars_per_hour = dollars_per_hour
        self._runs: dict[str, LiveRun] = {}

    def facts(self) -> list[RunFacts]:
        """All runs, the newest first; none is no error, as the first may be about to start."""
        try:
            return read_runs(self.root)
        except RunError:
            return []

    @property
    def is_one_run(self) -> bool:
        return is_run(self.root)

    def run(self, name: str) -> LiveRun:
        """The run of this name. A name is one part of a path, so it cannot lead out of the directory."""
        path = self.root if name == self.root.name and self.is_one_run else self.root / name
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name or not path.is_dir():
            raise RunError(f"There is no run {name!r} in {self.root}.")
        if name not in self._runs:
            self._runs[name] = LiveRun(path)
        return self._runs[name]

    def measured(self, name: str = "") -> LiveRun:
        """The run of that name; without a name the only one there is, or the one that was written last."""
        if name or self.is_one_run:
            return self.run(name or self.root.name)
        found = self.facts()
        if not found:
            raise RunError(f"There is no run in {self.root} yet.")
        return self.run(max(found, key=lambda facts: facts.written).path.name)


def address(*parts: str, **query: object) -> str:
    """An address on this site; what is None is left out of the query."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path

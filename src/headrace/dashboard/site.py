"""What the page is about: the runs it may show, what was read of each and is kept, and what its plan form asks."""

import ipaddress
import logging
import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from headrace.config_file import cost_of, read_toml
from headrace.dashboard import books
from headrace.errors import ConfigError, HeadraceError, RunError
from headrace.insight.hardware import find_device, sized_shape
from headrace.insight.planner import Question
from headrace.insight.scenario import amount, seconds
from headrace.insight.triage import ADVICE, Triage
from headrace.insight.workload import LogNormal
from headrace.ledger.files import is_run, run_config
from headrace.runs import show
from headrace.runs.columns import one
from headrace.runs.facts import Known, RunFacts, RunState, UnknownNameError, read_run, read_runs
from headrace.runs.report import Section, dollars, duration, or_dash, percent
from headrace.user_code import load_optional

FACTS_LAST_S = 10.0  # finding a run's latest score may take a look at all its rows
TRIAGE_AFTER_S = 3.0  # a page is drawn first
TRIAGE_SHARE = 0.1  # of one core, at most, goes into the triage of a run that grows
NOT_YET = "Being worked out: this run is simulated with its own speeds, which takes some seconds."
_STATE_WORDS = {RunState.RUNNING: "running now", RunState.STOPPED: "stopped before its end"}
_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()  # runs are triaged


class Overview:
    """What is known of a run at one moment."""

    def __init__(self, live: "LiveRun") -> None:
        self.facts = live.facts().readable()  # a few seconds old
        # on the run's clock when something was last booked; pauses between processes do not count
        with books.looking_into(live.path) as connection:
            self.elapsed_s = float(one(connection, books.ELAPSED))
        self.series, self.books = live.series(), books.read_accounts(live.path)
        config = run_config(live.path)
        self.max_lag, self.dollars = config.loop.max_lag, cost_of(config, self.elapsed_s)
        trained = self.books.trained.tokens
        decided = trained + sum(amount.tokens for amount in self.books.dropped.values())
        self.lag_max = int(max((lag for _, lag in self.series.curve("lag_max") if lag), default=0))
        self.useful_share = trained / decided if decided else None  # of decided tokens

    def numbers(self, verdict: Triage | str) -> list[tuple[str, str, str]]:
        """Each with its name and what it means to newcomers; `verdict` may be why there is none."""
        facts, series = self.facts, self.series
        recent = f"over the last {min(series.last_step, books.RECENT_STEPS)} steps"
        speed = f"tokens trained on per second, {recent}; {or_dash(series.goodput())} over the whole run"
        wall, sign = "…" if verdict == NOT_YET else "-", str(verdict)
        if isinstance(verdict, Triage):
            wall, sign = str(verdict.bottleneck), ADVICE[verdict.bottleneck].sign
        state = f"{_STATE_WORDS.get(facts.state, facts.state)}, after {duration(self.elapsed_s)}"
        most = f"at most {self.lag_max} seen; {math.ceil(self.max_lag)} allowed"
        lag = f"updates between sampling and training; {most}"
        latest = "after it" if facts.state is RunState.FINISHED else "latest"
        held_out = f"on prompts that are never trained on: before training → {latest}"
        useful = "of the finished tokens were trained on; the rest was dropped"
        numbers = [
            ("Reward", or_dash(series.now("reward_mean"), ".3f"), f"mean of all scored answers {recent}"),
            ("Held-out score", show.scores(facts), held_out),
            ("Goodput", or_dash(series.goodput(books.RECENT_STEPS)), speed),
            ("Bottleneck", wall, sign),
            ("Lag", or_dash(series.now("lag_mean"), ".2f"), lag),
            ("Useful", percent(self.useful_share), useful),
            ("Steps", f"{series.last_step:,}", f"of {facts.wanted_steps:,}; {state}"),
        ]
        if self.dollars is not None:
            trained = self.books.trained.tokens
            cost = dollars(self.dollars / trained * 1e6) if trained else "-"
            numbers.append(("Cost so far", dollars(self.dollars), f"{cost} a million trained tokens"))
        if series.num_damaged:
            says = "rows of the ledger cannot be read and are left out"
            numbers.append(("Damaged", str(series.num_damaged), says))
        return numbers


class LiveRun:
    """One run. Any thread may ask, and what has not changed is not read again."""

    def __init__(self, run_dir: Path) -> None:
        self.path, self.name = run_dir, run_dir.name
        self._lock = threading.Lock()
        self._series = books.Series()
        self._tallies: defaultdict[str, books.Tally] = defaultdict(books.Tally)
        self._data_set = show.DataSet()
        self._facts: RunFacts | None = None
        self._facts_at_s = 0.0
        self._triage: Triage | str = NOT_YET
        self._triaged = ("", 0)  # ledger and number of steps that `_triage` is about
        self._triaging, self._next_triage_s = False, 0.0

    def facts(self) -> RunFacts:
        with self._lock:
            if self._facts is None or time.monotonic() - self._facts_at_s > FACTS_LAST_S:
                self._facts, self._facts_at_s = read_run(self.path), time.monotonic()
            return self._facts

    def series(self) -> books.Series:
        with self._lock:
            self._series = books.read_series(self.path, self._series)
            return self._series

    def tally(self, query: str) -> books.Tally:
        with self._lock:
            return self._tallies[query].update(self.path, query)

    def history(self) -> Section:
        columns = self.series().columns
        skipped = columns["step"][columns["skipped"] > 0].astype(int).tolist()
        facts = self.facts()
        with books.looking_into(self.path), self._lock:
            return show.history(self.path, facts, skipped, self._data_set.standing(self.path))

    def triage(self) -> Triage | str:
        """What holds the run back, as of some recent step, or why that cannot be told yet.

        If there are more steps by now, a newer one is begun in a thread that nobody waits for.
        """
        series = self.series()
        if not series.last_step:
            return "The first step is under way."
        wanted = (series.created, series.last_step)
        with self._lock:
            if self._triaged[0] != series.created:  # another run's
                self._triage, self._next_triage_s = NOT_YET, 0.0
            due = self._triaged != wanted and time.monotonic() >= self._next_triage_s
            if due and not self._triaging:
                self._triaging, self._triaged = True, wanted
                threading.Thread(target=self._work, daemon=True).start()
            return self._triage

    def _work(self) -> None:
        found: Triage | str
        time.sleep(TRIAGE_AFTER_S)
        with _one_at_a_time:
            begun_s = time.monotonic()
            try:
                with books.looking_into(self.path):  # what is wrong with the file is said in words
                    found = Triage(self.path)
            except HeadraceError as error:
                found = str(error)
            except Exception as error:  # a mistake of ours, and the thread has nobody else to tell
                _log.exception("triage of %s", self.path)
                found = f"This cannot be told: {type(error).__name__}: {error}"
            taken_s = time.monotonic() - begun_s
        with self._lock:
            self._triage, self._triaging = found, False
            self._next_triage_s = time.monotonic() + taken_s * (1 / TRIAGE_SHARE - 1)


class Site:
    """A directory of runs, or a single run, and nothing outside it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, LiveRun] = {}
        self._known: Known = {}
        self._reading = threading.Lock()

    def facts(self) -> list[RunFacts]:
        """All runs, the newest first; none is no error, as the first may be about to start."""
        with self._reading, suppress(RunError):
            return read_runs(self.root, self._known)
        return []

    def run(self, name: str) -> LiveRun:
        """The run of this name: one part of a path, so it cannot lead out of the directory."""
        path = self.root if name == self.root.name and is_run(self.root) else self.root / name
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name or not path.is_dir():
            raise UnknownNameError(f"There is no run {name!r} in {self.root}.")
        return self._runs.setdefault(name, LiveRun(path))

    def measured(self, name: str = "") -> LiveRun:
        """The run of that name; without one the only run, or the one that was written last."""
        if name or is_run(self.root):
            return self.run(name or self.root.name)
        found = self.facts()
        if not found:
            raise RunError(f"There is no run in {self.root} yet.")
        return self.run(found[0].path.name)


class Field(NamedTuple):
    """Something to type, as form.toml has it, and what reads it."""

    label: str
    says: str
    value: str
    parse: Callable[[str], Any]
    between: Sequence[float] = ()

    def read(self, text: str) -> Any:
        value = self.parse(text)
        if not self.between:
            return value
        low, high = self.between
        if not low <= value <= high:
            raise ConfigError(f"{text.strip()} is out of range: from {low:,g} to {high:,g}")
        if isinstance(high, int) and value != int(value):
            raise ConfigError(f"{text.strip()} is not a whole number")
        return type(high)(value)

    def problem(self, text: str | None) -> str | None:
        try:
            self.read(text or "")
        except HeadraceError as error:
            return str(error)
        return None


_PARSE: dict[str, Callable[[str], Any]] = {"model": sized_shape, "reward_s": seconds}
_FORM = read_toml(Path(__file__).with_name("form.toml"))
FIELDS = {name: Field(parse=_PARSE.get(name, amount), **field) for name, field in _FORM.items()}
MOST_ANSWERS = FIELDS["num_prompts"].between[1]  # of a step


def question(texts: Mapping[str, str], *, device: str, reference: bool, adapter: bool) -> Question:
    if wrong := [field.label for name, field in FIELDS.items() if field.problem(texts[name])]:
        raise ConfigError(f"Put right what is marked above: {', '.join(wrong)}.")
    read = {name: field.read(texts[name]) for name, field in FIELDS.items()}
    lengths = LogNormal(read.pop("mean_tokens"), read.pop("cv"))
    asked = Question(device=find_device(device), lengths=lengths, reference=reference, adapter=adapter, **read)
    if asked.num_answers > MOST_ANSWERS:
        many = f"{asked.num_answers:,} answers in a step are too many to plan"
        raise ConfigError(f"{many}: at most {MOST_ANSWERS:,}")
    return asked


def address(*parts: str, **query: object) -> str:
    """An address on this site; what is None is left out of the query."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path


def serve(root: Path, *, host: str, port: int) -> None:
    """Show the runs in `root`, or the one run that it is, until interrupted."""
    if not root.is_dir():
        raise RunError(f"there is no directory {root}; name a run, or the directory that your runs are in")
    try:  # say now what the server would say in a traceback
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        why = error.strerror or error
        raise RunError(f"cannot listen on {host} port {port}: {why}. Choose another with --port") from error
    page = load_optional("headrace.dashboard.nicegui_pages", "nicegui", "dash")
    page.serve(Site(root), host=host, port=port, local=is_local(host))


def is_local(host: str) -> bool:
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False

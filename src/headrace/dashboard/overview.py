"""A run in a few numbers: what they are called, and what they mean to a newcomer."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.dashboard.series import RECENT_STEPS, Series
from headrace.insight.equation import ADVICE
from headrace.insight.triage import Triage
from headrace.ledger.ledger import Books
from headrace.runs.facts import RunFacts, RunState
from headrace.runs.report import dollars, duration, percent, short
from headrace.runs.tables import scores

Number = tuple[str, str, str]  # its name, the number, what it means
NOT_YET = "Being worked out: this run is simulated with its own speeds, which takes some seconds."
_STATE_WORDS = {RunState.RUNNING: "running now", RunState.STOPPED: "stopped before its end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What is known of a run at one moment."""

    facts: RunFacts  # a few seconds old
    series: Series
    books: Books
    elapsed_s: float
    dollars: float | None  # None without a price

    @property
    def useful_share(self) -> float | None:
        """Of the tokens whose fate is decided."""
        trained = self.books.trained.tokens
        decided = trained + sum(amount.tokens for amount in self.books.dropped.values())
        return trained / decided if decided else None

    @property
    def lag_max(self) -> int:
        return int(max((lag for _, lag in self.series.curve("lag_max") if lag), default=0))

    @property
    def dollars_per_million(self) -> float | None:
        """What a million trained tokens have cost."""
        trained = self.books.trained.tokens
        return None if self.dollars is None or not trained else self.dollars / trained * 1e6


def overview_numbers(seen: Overview, max_lag: int | None, verdict: Triage | str) -> list[Number]:
    """`verdict` may be why there is none."""
    facts, series = seen.facts, seen.series
    held_out = scores(facts)
    held_out = "" if held_out == "-" else f"; held-out score {held_out}"
    recent = f"over the last {min(series.last_step, RECENT_STEPS)} steps"
    speed = f"tokens trained on per second, {recent}; {_or_dash(series.goodput())} over the whole run"
    if isinstance(verdict, str):
        name, sign = "…" if verdict == NOT_YET else "-", verdict
    else:
        name, sign = str(verdict.bottleneck), ADVICE[verdict.bottleneck].sign
    allowed = "" if max_lag is None else f"; {max_lag} allowed"
    state = f"{_STATE_WORDS.get(facts.state, facts.state)}, after {duration(seen.elapsed_s)}"
    lag = f"updates between sampling and training; at most {seen.lag_max} seen{allowed}"
    numbers = [
        ("Reward", _or_dash(series.now("reward_mean"), ".3f"), f"mean of all scored answers {recent}{held_out}"),
        ("Goodput", _or_dash(series.goodput(RECENT_STEPS)), speed),
        ("Bottleneck", name, sign),
        ("Lag", _or_dash(series.now("lag_mean"), ".2f"), lag),
        ("Useful", percent(seen.useful_share), "of the finished tokens were trained on; the rest was dropped"),
        ("Steps", f"{series.last_step:,}", f"of {facts.wanted_steps:,}; {state}"),
    ]
    if seen.dollars is not None:
        per_million = "-" if seen.dollars_per_million is None else dollars(seen.dollars_per_million)
        numbers.append(("Cost so far", dollars(seen.dollars), f"{per_million} per million trained tokens"))
    if series.num_damaged:
        numbers.append(("Damaged", str(series.num_damaged), "rows of the ledger cannot be read and are left out"))
    return numbers


def _or_dash(value: float | None, form: str = "") -> str:
    """The number in this form, or with few digits."""
    return "-" if value is None else f"{value:{form}}" if form else short(value)

"""The overview's numbers: what they are called, and what they mean to a newcomer."""

from __future__ import annotations

from headrace.dashboard.series import RECENT_STEPS
from headrace.dashboard.site import NOT_YET, Overview
from headrace.insight.equation import ADVICE
from headrace.insight.triage import Triage
from headrace.runs.facts import RunState
from headrace.runs.report import dollars, duration, short

Number = tuple[str, str, str]  # its name, the number, what it means
_STATE_WORDS = {
    RunState.FINISHED: "finished",
    RunState.RUNNING: "running now",
    RunState.STOPPED: "stopped before its end",
    RunState.UNREADABLE: "cannot be read",
}


def overview_numbers(seen: Overview, max_lag: int | None, verdict: Triage | str) -> list[Number]:
    """The numbers of the overview, with what they mean; `verdict` may be why there is none."""
    facts = seen.facts
    scores = [f"{score:.3f}" for score in (facts.score_before, facts.score_after) if score is not None]
    held_out = f"; held-out score {' → '.join(scores)}" if scores else ""
    recent = f"over the last {min(seen.steps, RECENT_STEPS)} steps"
    numbers = [
        ("Reward", _or_dash(seen.now_reward, "{:.3f}"), f"mean of all scored answers {recent}{held_out}"),
        (
            "Goodput",
            _or_dash(seen.now_goodput_tokens_per_s, "{}"),
            f"tokens trained on per second, {recent}; {_or_dash(seen.goodput_tokens_per_s, '{}')} over the whole run",
        ),
    ]
    if isinstance(verdict, str):
        numbers.append(("Bottleneck", "…" if verdict == NOT_YET else "-", verdict))
    else:
        numbers.append(("Bottleneck", str(verdict.bottleneck), ADVICE[verdict.bottleneck].sign))
    allowed = "" if max_lag is None else f"; {max_lag} allowed"
    numbers += [
        (
            "Lag",
            _or_dash(seen.now_lag_mean, "{:.2f}"),
            f"updates between sampling and training; at most {seen.lag_max} seen{allowed}",
        ),
        (
            "Useful",
            _or_dash(seen.useful_share, "{:.0%}"),
            "of the finished tokens were trained on; the rest was dropped",
        ),
        (
            "Steps",
            f"{seen.steps:,}",
            f"of {facts.wanted_steps:,}; {_STATE_WORDS[facts.state]}, after {duration(seen.elapsed_s)}",
        ),
    ]
    if seen.dollars is not None:
        per_million = "-" if seen.dollars_per_million is None else dollars(seen.dollars_per_million)
        numbers.append(("Cost so far", dollars(seen.dollars), f"{per_million} per million trained tokens"))
    if seen.num_damaged:
        numbers.append(("Damaged", str(seen.num_damaged), "rows of the ledger cannot be read and are left out"))
    return numbers


def _or_dash(value: float | None, form: str) -> str:
    """The number in this form; `{}` alone means few digits."""
    if value is None:
        return "-"
    return form.format(short(value)) if "{}" in form else form.format(value)

"""What triage and the planner say, as markup."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dashboard.markup import (
    Link,
    card,
    dollars,
    facts,
    line_of,
    more,
    numbers,
    pair,
    paragraphs,
    points,
    short,
    table,
)
from headrace.insight.equation import PLACEMENT_WORDS, SYMBOLS
from headrace.insight.frameworks import Framework
from headrace.insight.planner import Plan, Question
from headrace.insight.triage import Move, Triage, TypedTriage
from headrace.insight.walls import ADVICE, Wall
from headrace.insight.words import (
    MOVE_TITLES,
    NO_MOVES,
    PLAN_TITLES,
    basis,
    costs,
    health,
    layout,
    losses,
    move_lines,
    plan_lines,
    workload,
)
from headrace.types import STAGES

LAYOUTS, OTHERS = 5, 4  # shown


def triage_markup(found: Triage | str, plan_page: str) -> str:
    """The wall of a run, what to change, and what else was seen; or why that cannot be told."""
    if isinstance(found, str):
        return paragraphs(found)
    return (
        _wall(f"{found.wall}: {ADVICE[found.wall].sign}.", found.wall, found.moves, found.simulated_s)
        + more("How this was found", paragraphs(costs(found), basis(found)))
        + more("What else was seen", points((*losses(found.reading), *health(found.reading))))
        + line_of([Link("Try other stage times on the plan page", plan_page)])
    )


def typed_markup(found: TypedTriage) -> str:
    """The wall of five stage times, and what to change."""
    now_s = found.step_s[found.placement]
    text = f"{found.wall}, in a step of {now_s:,.3g} s: {ADVICE[found.wall].sign}."
    return _wall(text, found.wall, found.moves, now_s)


def plan_markup(question: Question, found: Sequence[Plan], others: Sequence[Framework]) -> str:
    """The best plan at length, the next ones in a line each, and who else was made for such a workload."""
    best = found[0]
    told = layout(question, best)
    shown = [
        ("Wall", str(best.wall), ADVICE[best.wall].sign),
        ("Placement", str(best.layout.placement), PLACEMENT_WORDS[best.layout.placement]),
        ("Goodput", short(best.goodput), "tokens trained on per second"),
        ("Cost", dollars(best.dollars_per_million), "per million trained tokens, at list prices"),
        ("Step", f"{best.step_s:,.3g} s", f"for {question.num_answers:,} answers"),
        ("Lag", f"{best.lag:.1f}", f"updates behind, on average; set loop.max_lag = {best.max_lag}"),
    ]
    pools = {f"{question.num_devices:,} x {question.device.name}": told["placement"], "new weights": told["publish"]}
    memory = {name: told[name] for name in ("engine's GPU", "learner's GPU")}
    stages = {f"{stage} ({SYMBOLS[stage]})": f"{getattr(best.times, stage):,.3g} s" for stage in STAGES}
    fits = [f"{other.name}: {other.fits}. But {other.mind}." for other in others[:OTHERS]]
    lines = plan_lines(found[:LAYOUTS])
    best_ones = table(PLAN_TITLES, lines, numbers=PLAN_TITLES[1:-1], wide=("learner", "step", "lag"))
    return (
        numbers(shown)
        + pair(
            card("Take this layout", paragraphs(workload(question) + "."), facts(pools | memory)),
            card("Seconds of each stage in a step", facts(stages), _in_general(best.wall)),
        )
        + (card("Risks", points(best.risks)) if best.risks else "")
        + card("The best layouts", best_ones)
        + card("If not Headrace", paragraphs("Other systems that were made for such a wall and size."), points(fits))
    )


def _wall(text: str, wall: Wall, moves: Sequence[Move], now_s: float) -> str:
    changes = table(MOVE_TITLES, move_lines(moves, now_s), numbers=MOVE_TITLES[1:]) if moves else paragraphs(NO_MOVES)
    return paragraphs(f"The wall is {text}") + changes + _in_general(wall)


def _in_general(wall: Wall) -> str:
    return paragraphs(f"What helps against {wall} in general:") + points(ADVICE[wall].moves)

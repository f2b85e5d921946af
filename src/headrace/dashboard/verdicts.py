"""What triage and the planner say, as markup."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.dashboard.markup import Cell, card, dollars, facts, numbers, paragraphs, points, problem, short, table
from headrace.insight.equation import PLACEMENT_WORDS, SYMBOLS
from headrace.insight.frameworks import Framework
from headrace.insight.planner import Plan, Question
from headrace.insight.triage import Move, Triage, TypedTriage
from headrace.insight.walls import ADVICE
from headrace.insight.words import (
    MOVE_TITLES,
    NO_MOVES,
    PLAN_TITLES,
    basis,
    costs,
    health,
    in_general,
    layout,
    losses,
    move_lines,
    plan_lines,
    workload,
)
from headrace.types import STAGES

LAYOUTS, OTHERS = 5, 4  # shown


def triage_markup(found: Triage | str) -> str:
    """The wall of a run, what to change, and what else was seen; or why that cannot be told."""
    if isinstance(found, str):
        return problem(found)
    return (
        paragraphs(f"The wall is {found.wall}: {ADVICE[found.wall].sign}.", costs(found))
        + _moves(found.moves, found.simulated_s)
        + paragraphs(basis(found), in_general(found.wall))
        + points((*losses(found.reading), *health(found.reading)))
    )


def typed_markup(found: TypedTriage) -> str:
    """The wall of five stage times, and what to change."""
    now_s = found.step_s[found.placement]
    return (
        paragraphs(f"A step takes {now_s:,.3g} s. The wall is {found.wall}: {ADVICE[found.wall].sign}.")
        + _moves(found.moves, now_s)
        + paragraphs(in_general(found.wall))
    )


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
        ("Lag", f"{best.lag:.1f}", f"versions old on average; loop.max_lag = {best.max_lag}"),
    ]
    pools = {"GPUs": told["placement"], "new weights": told["publish"]}
    memory = {name: told[name] for name in ("engine's GPU", "learner's GPU")}
    stages = {f"{stage} ({SYMBOLS[stage]})": f"{getattr(best.times, stage):,.3g} s" for stage in STAGES}
    fits = [f"{other.name}: {other.fits}. But {other.mind}." for other in others[:OTHERS]]
    return (
        numbers(shown)
        + card("Take this layout", paragraphs(workload(question) + "."), facts(pools | memory))
        + card("Seconds of each stage in a step", facts(stages), paragraphs(in_general(best.wall)))
        + (card("Mind", points(best.risks)) if best.risks else "")
        + card("Other layouts that fit", _table(PLAN_TITLES, plan_lines(found[:LAYOUTS]), wide=("learner", "lag")))
        + card("If not Headrace", points(fits))
    )


def _moves(moves: Sequence[Move], now_s: float) -> str:
    return _table(MOVE_TITLES, move_lines(moves, now_s)) if moves else paragraphs(NO_MOVES)


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], wide: Sequence[str] = ()) -> str:
    """A table whose columns are numbers, but for the first and one called wall."""

    def cells(texts: Sequence[str]) -> list[Cell]:
        return [
            Cell(text=text, number=title not in (titles[0], "wall"), wide=title in wide)
            for text, title in zip(texts, titles, strict=True)
        ]

    return table(cells(titles), map(cells, lines))

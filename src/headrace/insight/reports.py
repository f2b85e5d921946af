"""What triage, the planner and the simulator found, as reports: the terminal prints them, and the page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.insight.equation import SYMBOLS
from headrace.insight.frameworks import Framework
from headrace.insight.planner import Plan, Question
from headrace.insight.reading import Reading
from headrace.insight.scenario import Layout
from headrace.insight.simulated import Simulated
from headrace.insight.triage import Move, Triage, TypedTriage
from headrace.insight.walls import Wall
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
    sign,
    workload,
)
from headrace.insight.workload import Cluster, Workload
from headrace.runs.report import Report, Section, Table, count, percent
from headrace.types import STAGES

LAYOUTS, OTHERS = 5, 4  # shown
_GAIN = 1.05  # by which one must be quicker to be worth more lag


def triage_report(found: Triage | TypedTriage) -> Report:
    """What holds a run, or a step of five stage times, back, and what to change first."""
    if isinstance(found, TypedTriage):
        now_s = found.step_s[found.placement]
        rows = [(str(p), f"{s:,.4g} s{'  <' if p is found.placement else ''}") for p, s in found.step_s.items()]
        steps = Table(columns=("placement", "step"), rows=tuple(rows), numeric=frozenset({1}))
        wall = Section(title="the wall", sentences=(sign(found.wall),))
        return Report(
            title=f"a step of {now_s:,.3g} s",
            sections=(wall, _changes(found.moves, found.wall, now_s), Section(tables=(steps,))),
        )
    reading = found.reading
    first, last = reading.measured_steps[0], reading.measured_steps[-1]
    goodput = reading.goodput_tokens_per_s
    speed = f", {goodput:,.0f} trained tokens a second" if goodput else ""
    seen = Section(title="losses and health", sentences=(*losses(reading), *health(reading)))
    return Report(
        title=f"{reading.run_dir}: steps {first} to {last}{speed}",
        sections=(
            Section(title="the wall", sentences=(sign(found.wall), costs(found))),
            _changes(found.moves, found.wall, found.simulated_s, basis(found)),
            Section(title="stage times", tables=(_stages(reading),)),
            seen,
        ),
    )


def _changes(moves: Sequence[Move], wall: Wall, now_s: float, *more: str) -> Section:
    table = Table(columns=MOVE_TITLES, rows=tuple(move_lines(moves, now_s)), numeric=frozenset({1, 2}))
    return Section(
        title="what to change, the best first",
        tables=(table,) if moves else (),
        sentences=(*(() if moves else (NO_MOVES,)), in_general(wall), *more),
    )


def _stages(reading: Reading) -> Table:
    rows = []
    step = reading.step_s.mean if reading.step_s else 0.0
    if reading.stage_s is not None and reading.stage_p50_s is not None and reading.stage_p95_s is not None:
        for stage in STAGES:
            times = (getattr(s, stage) for s in (reading.stage_s, reading.stage_p50_s, reading.stage_p95_s))
            mean, *rest = times
            share = f"{mean / step:.0%}" if step else ""
            rows.append((f"{stage} ({SYMBOLS[stage]})", *(f"{s:.3g} s" for s in (mean, *rest)), share))
    if reading.step_s:
        whole = (reading.step_s.mean, reading.step_s.p50, reading.step_s.p95)
        rows.append(("step", *(f"{s:.3g} s" for s in whole), ""))
    columns = ("stage", "mean", "p50", "p95", "of the step")
    return Table(columns=columns, rows=tuple(rows), numeric=frozenset(range(1, 5)))


def plan_report(question: Question, found: Sequence[Plan], others: Sequence[Framework]) -> Report:
    """The best layout at length, the next ones in a line each, and who else was made for such a workload."""
    best = found[0]
    stages = [(f"{stage} ({SYMBOLS[stage]})", f"{getattr(best.times, stage):,.3g}") for stage in STAGES]
    numeric = frozenset(range(1, len(PLAN_TITLES) - 1))
    listed = Table(columns=PLAN_TITLES, rows=tuple(plan_lines(found[:LAYOUTS])), numeric=numeric)
    times = Table(columns=("stage", "seconds a step"), rows=tuple(stages), numeric=frozenset({1}))
    systems = [(other.name, f"{other.fits}. But {other.mind}.") for other in others[:OTHERS]]
    risks = Section(title="mind", sentences=tuple(f"- {risk}" for risk in best.risks))
    return Report(
        title=workload(question),
        sections=(
            Section(title="take this", facts=tuple(layout(question, best).items()), tables=(times,)),
            Section(title="the wall", sentences=(sign(best.wall), in_general(best.wall))),
            *((risks,) if best.risks else ()),
            Section(title="other layouts", tables=(listed,)),
            Section(title="if not Headrace", facts=tuple(systems)),
        ),
    )


def simulation_report(work: Workload, cluster: Cluster, layout: Layout, found: Sequence[Simulated]) -> Report:
    """A line for each max_lag, and what the lines say in words."""
    apart = f"{cluster.rollout_workers} rollout workers, {layout.learner_gpus} GPUs that train"
    if layout.turns:
        apart = "generation and training take turns on the same devices"
    rewards = f"{cluster.reward_workers} reward workers" if cluster.reward_workers else "rewards without a queue"
    pools = ("device idle",) if layout.turns else ("rollout idle", "learner idle")
    columns = ("max_lag", "step", "p95", "tokens/s", *pools, "reward idle", "lag", "useful")
    rows = []
    for one in found:
        idle = [1 - one.rollout_busy, 1 - one.learner_busy]
        idle = [max(0.0, sum(idle) - 1)] if layout.turns else idle
        shares = [*map(percent, idle), percent(1 - one.reward_busy)]
        times = (f"{one.step_s:,.4g} s", f"{one.step_quantile_s(0.95):,.4g} s")
        lag = f"{one.lag_mean:.2f}/{one.lag_max}"
        rows.append((str(one.max_lag), *times, f"{one.goodput:,.0f}", *shares, lag, f"{one.useful_share:.1%}"))
    table = Table(columns=columns, rows=tuple(rows), numeric=frozenset(range(len(columns))))
    facts = (
        ("machine", f"{count(layout.gpus, 'GPU')}: {apart}; {rewards}"),
        ("a verdict", f"{work.reward_s.mean:.3g} s on average"),
        ("simulated", f"{len(found[0].steps)} steps each; means leave out those in which the pipeline fills"),
    )
    a_step = f"{work.groups_per_step} prompts x {work.samples} answers of {work.tokens.mean:,.0f} tokens on average"
    words = Section(sentences=tuple(_simulation_words(found)))
    return Report(title=f"a step: {a_step}", sections=(Section(facts=facts, tables=(table,)), words))


def _simulation_words(found: Sequence[Simulated]) -> list[str]:
    """What a newcomer should see in the table."""
    first = found[0]
    longest = max((getattr(first.stage_s, stage), stage) for stage in STAGES)
    sentences = [
        f"At max_lag = {first.max_lag} a step takes {first.step_s:,.4g} s, and {longest[1]} is busy for "
        f"{longest[0]:,.4g} s of it, longer than any other stage."
    ]
    best = max(found, key=lambda one: one.goodput)
    enough = min((one for one in found if one.goodput * _GAIN >= best.goodput), key=lambda one: one.max_lag)
    if enough is not first:
        gain = enough.goodput / first.goodput
        sentences.append(
            f"max_lag = {enough.max_lag} trains {gain:.2f}x the tokens per second of max_lag = {first.max_lag}."
        )
    if any(one.max_lag > enough.max_lag for one in found):
        sentences.append(f"More lag than {enough.max_lag} brings less than 5% on top.")
    for one in found:
        dropped = {reason: tokens / one.generated_tokens for reason, tokens in one.dropped_tokens.items() if tokens}
        if dropped:
            shares = ", ".join(f"{reason} {share:.1%}" for reason, share in dropped.items())
            sentences.append(f"Of the tokens generated at max_lag = {one.max_lag} these are dropped: {shares}.")
    return sentences

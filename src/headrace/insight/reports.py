"""What triage, the planner and the simulator found, as reports: the terminal prints them and the page shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.insight.equation import ADVICE, SYMBOLS, Bottleneck, Placement
from headrace.insight.frameworks import Framework
from headrace.insight.planner import LayoutPlan, Question
from headrace.insight.reading import Reading
from headrace.insight.roofline import MemoryBill
from headrace.insight.scenario import Layout
from headrace.insight.simulator import Simulated
from headrace.insight.triage import Move, Triage, TypedTriage
from headrace.insight.workload import Machine, Workload
from headrace.runs.report import Report, Section, Table, count, percent, seconds
from headrace.types import STAGES

RATIO_OUTSIDE = 0.05  # of the tokens: from there on, the data is far from the policy
FEW_EFFECTIVE = 0.9
PLANS_SHOWN, OTHERS_SHOWN = 5, 4
NO_MOVES = "No change that can be worked out brings 2% or more."
_GAIN = 1.05  # by which one must be quicker to be worth more lag


# ---- triage


def triage_report(found: Triage | TypedTriage) -> Report:
    """What holds a run, or a step of five stage times, back, and what to change first."""
    if isinstance(found, TypedTriage):
        return _typed_report(found)
    reading = found.reading
    first, last = reading.measured_steps[0], reading.measured_steps[-1]
    goodput = reading.goodput_tokens_per_s
    speed = f", {goodput:,.0f} trained tokens a second" if goodput else ""
    return Report(
        title=f"{reading.run_dir}: steps {first} to {last}{speed}",
        sections=(
            Section(title="the bottleneck", sentences=(_sign(found.bottleneck), _costs(found))),
            _moves(found.moves, found.bottleneck, found.simulated_s, _basis(found)),
            Section(title="stage times", tables=(_stage_table(reading),)),
            Section(title="losses and health", sentences=(*_losses(reading), *_health(reading))),
        ),
    )


def _typed_report(found: TypedTriage) -> Report:
    now_s = found.step_s[found.placement]
    rows = [
        (str(placement), f"{seconds(step_s, 4)}{'  <' if placement is found.placement else ''}")
        for placement, step_s in found.step_s.items()
    ]
    return Report(
        title=f"a step of {seconds(now_s)}",
        sections=(
            Section(title="the bottleneck", sentences=(_sign(found.bottleneck),)),
            _moves(found.moves, found.bottleneck, now_s),
            Section(tables=(_table(("placement", "step"), rows),)),
        ),
    )


def _stage_table(reading: Reading) -> Table:
    rows: list[tuple[str, ...]] = []
    several = (reading.stage_s, reading.stage_p50_s, reading.stage_p95_s)
    for stage in STAGES if reading.stage_s else ():
        mean, p50, p95 = (getattr(times, stage) for times in several)
        share = percent(mean / reading.step_s.mean) if reading.step_s and reading.step_s.mean else ""
        rows.append((f"{stage} ({SYMBOLS[stage]})", seconds(mean), seconds(p50), seconds(p95), share))
    if step := reading.step_s:
        rows.append(("step", seconds(step.mean), seconds(step.p50), seconds(step.p95), ""))
    return _table(("stage", "mean", "p50", "p95", "of the step"), rows)


def _sign(bottleneck: Bottleneck) -> str:
    return f"{bottleneck}: {ADVICE[bottleneck].sign}."


def _in_general(bottleneck: Bottleneck) -> str:
    return f"Against {bottleneck} in general: {'; '.join(ADVICE[bottleneck].moves)}."


def _costs(found: Triage) -> str:
    """How long a step would be without each bottleneck."""
    saved = {name: found.simulated_s - step_s for name, step_s in found.without.items()}
    named = sorted((name for name in saved if saved[name] > 0.01 * found.simulated_s), key=lambda name: -saved[name])
    listed = ", ".join(f"{seconds(found.without[name])} without {name}" for name in named)
    return f"A step of {seconds(found.simulated_s)} would take {listed or 'as long without any one of them'}."


def _basis(found: Triage) -> str:
    """Where the predictions come from, and how far they are off where that can be told."""
    step = found.reading.step_s
    measured = f"; measured are {seconds(step.mean)}" if step else ""
    return (
        f"Predicted by a simulation with this run's speeds. It puts a step at {seconds(found.simulated_s)}{measured}."
    )


def _moves(moves: Sequence[Move], bottleneck: Bottleneck, now_s: float, *more: str) -> Section:
    """How it is, and each change with what it would bring."""
    rows = [("as it is", seconds(now_s), "1.00x")]
    for move in moves:
        text = f"{move.text}: {' '.join(move.settings)}" if move.settings else move.text
        rows.append((text, seconds(move.step_s), f"{move.gain:.2f}x"))
    return Section(
        title="what to change, the best first",
        tables=(_table(("change", "a step takes", "goodput"), rows),) if moves else (),
        sentences=(*(() if moves else (NO_MOVES,)), _in_general(bottleneck), *more),
    )


def idle_shares(reading: Reading) -> Iterator[tuple[str, float]]:
    """Idle share of each pool; of several workers in one pool, each by its name."""
    pools = reading.occupancy.pools if reading.occupancy else ()
    names = [pool.name for pool in pools]
    for pool in pools:
        yield pool.name if names.count(pool.name) == 1 else f"{pool.name} {pool.worker}", pool.idle_share


def _losses(reading: Reading) -> Iterator[str]:
    """What tokens and time were lost to."""
    decided = reading.trained_tokens + sum(reading.dropped_tokens.values())
    if decided and reading.useful_share is not None:
        listed = ", ".join(
            f"{tokens / decided:.1%} {reason}"
            for reason, tokens in sorted(reading.dropped_tokens.items(), key=lambda kept: -kept[1])
        )
        yield f"{reading.useful_share:.1%} of the tokens were trained on; dropped: {listed or 'none'}."
    if reading.occupancy is not None:
        idle = ", ".join(f"{name} {share:.0%}" for name, share in idle_shares(reading))
        yield f"Idle: {idle}. Stages ran side by side for {reading.occupancy.overlap_share:.0%} of their time."
        if reading.occupancy.stall_s > 0.01 * reading.wall_s:
            yield f"Checkpoints held training up for {reading.occupancy.stall_s / reading.wall_s:.1%} of the time."
    if reading.preemptions:
        yield f"{reading.preemptions} sequences gave up their cache for lack of memory and were computed again."
    if reading.num_restarts:
        yield f"{count(reading.num_restarts, 'restart')}: {reading.redone_steps} steps were taken again."


def _health(reading: Reading) -> Iterator[str]:
    """How old and how even the data was."""
    if reading.lag_mean is not None:
        yield f"Trained tokens were {reading.lag_mean:.2f} versions old on average, {reading.lag_max} at most."
    if reading.ratio_outside is not None and reading.ratio_outside > RATIO_OUTSIDE:
        yield (
            f"{reading.ratio_outside:.1%} of the tokens have an importance ratio outside 0.9 to 1.1: the data is far "
            "from the policy; lower loop.max_lag, or set learner.correction."
        )
    if reading.effective_samples is not None and reading.effective_samples < FEW_EFFECTIVE:
        yield f"The importance weights leave {reading.effective_samples:.0%} of the samples effective."
    if (tokens := reading.answer_tokens) is not None and reading.tail_share is not None:
        yield (
            f"Answers have {tokens.mean:.0f} tokens on average, {tokens.p95:.0f} at p95, {tokens.max:.0f} at most; for "
            f"{reading.tail_share:.0%} of a step only the last twentieth of them is being generated."
        )
    if (took := reading.verdict_s) is not None:
        yield f"A verdict took {seconds(took.mean)} on average, {seconds(took.p95)} at p95."
    if reading.no_signal_share:
        yield f"{reading.no_signal_share:.0%} of the groups had no signal: all their answers earned the same."


# ---- plan


def plan_report(question: Question, found: Sequence[LayoutPlan], others: Sequence[Framework]) -> Report:
    """The layout to take, what it comes to, and who else was made for such a workload."""
    best = found[0]
    stages = [(f"{stage} ({SYMBOLS[stage]})", f"{getattr(best.times, stage):,.3g}") for stage in STAGES]
    times = _table(("stage", "seconds a step"), stages)
    systems = [(other.name, f"{other.fits}. But {other.mind}.") for other in others[:OTHERS_SHOWN]]
    sections = [
        Section(title="take this", facts=_layout(question, best), tables=(times,)),
        Section(title="the bottleneck", sentences=(_sign(best.bottleneck), _in_general(best.bottleneck))),
        Section(title="mind", sentences=tuple(f"- {risk}" for risk in best.risks)),
        Section(title="other layouts", tables=(_plan_table(found[:PLANS_SHOWN]),)),
        Section(title="if not Headrace", facts=tuple(systems)),
    ]
    return Report(
        title=_workload(question),
        sections=tuple(part for part in sections if part.facts or part.tables or part.sentences),
    )


def _workload(question: Question) -> str:
    """What is asked for, and what the spread of the lengths does to it."""
    lengths, samples = question.lengths, question.num_samples
    return (
        f"{question.model.name} on {question.num_devices} x {question.device.name}: {question.num_prompts} prompts x "
        f"{samples} answers of {lengths.cut_mean:,.0f} tokens; the longest of {samples} has "
        f"{lengths.tail(samples):.1f} times that"
    )


def _layout(question: Question, plan: LayoutPlan) -> tuple[tuple[str, str], ...]:
    """What a plan consists of, and what it comes to."""
    chosen = plan.layout
    engines = (
        f"{chosen.rollout_devices} generate ({count(chosen.num_engines, 'engine')} of {chosen.tensor_parallel}, "
        f"{plan.num_running} sequences at a time each)"
    )
    if chosen.placement is Placement.COLOCATED:
        split = f"colocated: {engines}, in turns with the learner on all {chosen.learner_devices}"
    else:
        split = f"{chosen.placement}: {engines}, {chosen.learner_devices} train"
    publish = "counted as free: engine and learner share the weights, in one process"
    if plan.transfer is not None and plan.sync is not None:
        relay = ", passed on from engine to engine" if plan.transfer.relay else ""
        publish = f"{plan.transfer.encoding} weights in buckets{relay}: {plan.sync.total_s:.2g} s"
    return (
        ("placement", split),
        ("loop.max_lag", f"{plan.max_lag}; {plan.lag:.1f} versions old on average"),
        ("publish", publish),
        ("engine's GPU", _bill(plan.rollout_bill, question)),
        ("learner's GPU", _bill(plan.learner_bill, question)),
        ("a step", seconds(plan.step_s)),
        (
            "goodput",
            f"{plan.goodput:,.0f} trained tokens a second, {plan.dollars_per_million:.2f} dollars a million",
        ),
    )


def _plan_table(found: Sequence[LayoutPlan]) -> Table:
    columns = ("placement", "engines x GPUs", "learner", "step", "tok/s", "$/M tok", "lag", "bottleneck")
    rows = [
        (
            str(plan.layout.placement),
            f"{plan.layout.num_engines} x {plan.layout.tensor_parallel}",
            str(plan.layout.learner_devices),
            seconds(plan.step_s),
            f"{plan.goodput:,.0f}",
            f"{plan.dollars_per_million:.2f}",
            f"{plan.lag:.1f}",
            str(plan.bottleneck),
        )
        for plan in found
    ]
    return Table(columns=columns, rows=tuple(rows), numeric=frozenset(range(1, len(columns) - 1)))


def _bill(bill: MemoryBill, question: Question) -> str:
    parts = {
        "weights": bill.weight_bytes,
        "training state": bill.training_bytes,
        "cache": bill.kv_bytes,
        "activations": bill.activation_bytes,
    }
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    return f"{bill.total_bytes / 1e9:.0f} of {question.device.memory_bytes / 1e9:.0f} GB: {listed}"


# ---- simulate


def simulation_report(work: Workload, machine: Machine, layout: Layout, found: Sequence[Simulated]) -> Report:
    """A line for each max_lag, and what the lines say in words."""
    apart = f"{machine.rollout_workers} rollout workers, {layout.learner_gpus} GPUs that train"
    if layout.turns:
        apart = "generation and training take turns on the same devices"
    rewards = f"{machine.reward_workers} reward workers" if machine.reward_workers else "rewards without a queue"
    a_step = f"{work.groups_per_step} prompts x {work.samples} answers of {work.tokens.mean:,.0f} tokens on average"
    facts = [
        ("machine", f"{count(layout.gpus, 'GPU')}: {apart}; {rewards}"),
        ("a verdict", f"{seconds(work.reward_s.mean)} on average"),
        ("simulated", f"{len(found[0].steps)} steps each; means leave out those in which the pipeline fills"),
    ]
    if num_failures := sum(one.num_failures for one in found):
        facts.append(("failures", f"{count(num_failures, 'rollout worker')} died and came back"))
    return Report(
        title=f"a step: {a_step}",
        sections=(
            Section(facts=tuple(facts), tables=(_simulation_table(found, layout),), sentences=tuple(_lessons(found))),
        ),
    )


def _simulation_table(found: Sequence[Simulated], layout: Layout) -> Table:
    pools = ("device idle",) if layout.turns else ("rollout idle", "learner idle")
    rows = []
    for one in found:
        idle = [1 - one.rollout_busy, 1 - one.learner_busy]
        idle = [max(0.0, sum(idle) - 1)] if layout.turns else idle
        rows.append(
            (
                str(one.max_lag),
                seconds(one.step_s, 4),
                seconds(one.step_quantile_s(0.95), 4),
                f"{one.goodput:,.0f}",
                *(percent(share) for share in (*idle, 1 - one.reward_busy)),
                f"{one.lag_mean:.2f}/{one.lag_max}",
                percent(one.useful_share, 1),
            )
        )
    columns = ("max_lag", "step", "p95", "tokens/s", *pools, "reward idle", "lag", "useful")
    return Table(columns=columns, rows=tuple(rows), numeric=frozenset(range(len(columns))))


def _lessons(found: Sequence[Simulated]) -> Iterator[str]:
    """What a newcomer should see in the table."""
    first = found[0]
    longest = first.stage_s.wall
    yield (
        f"At max_lag = {first.max_lag} a step takes {seconds(first.step_s, 4)}, and {longest} is busy for "
        f"{seconds(getattr(first.stage_s, longest), 4)} of it, longer than any other stage."
    )
    best = max(found, key=lambda one: one.goodput)
    enough = min((one for one in found if one.goodput * _GAIN >= best.goodput), key=lambda one: one.max_lag)
    if enough is not first:
        gain = enough.goodput / first.goodput
        yield f"max_lag = {enough.max_lag} trains {gain:.2f}x the tokens per second of max_lag = {first.max_lag}."
    if any(one.max_lag > enough.max_lag for one in found):
        yield f"More lag than {enough.max_lag} brings less than 5% on top."
    for one in found:
        dropped = {reason: tokens / one.generated_tokens for reason, tokens in one.dropped_tokens.items() if tokens}
        if dropped:
            shares = ", ".join(f"{reason} {share:.1%}" for reason, share in dropped.items())
            yield f"Of the tokens generated at max_lag = {one.max_lag} these are dropped: {shares}."


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """All columns but the first are numbers."""
    return Table(columns=columns, rows=tuple(rows), numeric=frozenset(range(1, len(columns))))

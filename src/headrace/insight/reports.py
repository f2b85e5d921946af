"""What triage, the planner and the simulator found, as reports for the terminal and the page."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from shlex import quote

from headrace.config_file import cost_of
from headrace.insight.planner import LayoutPlan, Question
from headrace.insight.reading import Reading
from headrace.insight.roofline import MemoryBill
from headrace.insight.scenario import Layout
from headrace.insight.simulator import Simulated
from headrace.insight.triage import ADVICE, SYMBOLS, Advice, Triage, TypedTriage, advice_for, others_that_fit
from headrace.insight.workload import Machine, Workload
from headrace.measured import STAGES
from headrace.runs.report import Report, Section, Table, count, percent, seconds

RATIO_OUTSIDE = 0.05  # of the tokens: from there on, the data is far from the policy
FEW_EFFECTIVE = 0.9
PLANS_SHOWN, OTHERS_SHOWN = 5, 4
NO_MOVES = "No change that can be worked out brings 2% or more."
_GAIN = 1.05  # by which one must be quicker to be worth more lag


def _told(bottleneck: str, advice: Advice) -> tuple[str, str]:
    """What a bottleneck looks like, and what helps against it in general."""
    return f"{bottleneck}: {advice.sign}.", f"Against {bottleneck} in general: {'; '.join(advice.moves)}."


def triage_report(found: Triage | TypedTriage) -> Report:
    """What holds a run, or a step of five stage times, back, and what to change first."""
    signs, basis, advice = list[str](), list[str](), ADVICE[found.bottleneck]
    if isinstance(found, TypedTriage):
        now_s, marks = found.step_s[found.placement], {found.placement: "  <"}
        steps = [(str(one), f"{seconds(step_s, 4)}{marks.get(one, '')}") for one, step_s in found.step_s.items()]
        table = Table(columns=("placement", "step"), rows=steps, numeric={1})
        title, more = f"a step of {seconds(now_s)}", [Section(tables=(table,))]
    else:
        reading, now_s, without = found.reading, found.simulated_s, found.without
        advice = advice_for(found.bottleneck, reading.config)
        known, goodput = reading.measured_steps, reading.goodput_tokens_per_s
        speed = f", {goodput:,.0f} trained tokens a second" if goodput else ""
        if goodput and (cost := cost_of(reading.config, 1.0)):
            speed += f", {goodput / cost:,.0f} per dollar"
        title = f"{reading.run_dir}: steps {known[0]} to {known[-1]}{speed}"
        costly = (name for name in without if now_s - without[name] > 0.01 * now_s)
        named = sorted(costly, key=lambda name: without[name] - now_s)
        listed = ", ".join(f"{seconds(without[name])} without {name}" for name in named)
        costs = listed or "as long without any one of them"
        signs.append(f"A step of {seconds(now_s)} would take {costs}.")
        measured = f"; measured are {seconds(reading.step_s.mean)}" if reading.step_s else ""
        basis.append(f"Simulated with this run's speeds; that puts a step at {seconds(now_s)}{measured}.")
        more = [
            Section(title="stage times", tables=(_stage_table(reading),)),
            Section(title="losses and health", sentences=(*_losses(reading), *_health(reading))),
        ]
    sign, general = _told(found.bottleneck, advice)
    held_up = Section(title="the bottleneck", sentences=(sign, *signs))
    columns, rows = ("change", "a step takes", "goodput"), [("as it is", seconds(now_s), "1.00x")]
    for move in found.moves:
        text = f"{move.text}: {' '.join(move.settings)}" if move.settings else move.text
        rows.append((text, seconds(move.step_s), f"{move.gain:.2f}x"))
    moves = Section(
        title="what to change, the best first",
        tables=(Table(columns=columns, rows=rows, numeric={1, 2}),) if found.moves else (),
        sentences=(*([] if found.moves else [NO_MOVES]), *[general] * bool(advice.moves), *basis),
    )
    return Report(title=title, sections=(held_up, moves, *more))


def _stage_table(reading: Reading) -> Table:
    rows, step = [], reading.step_s
    for stage, taken in (reading.stage_spreads | {"step": step}).items():
        if taken and step:
            name = f"{stage} ({SYMBOLS[stage]})" if stage in SYMBOLS else stage
            share = percent(taken.mean / step.mean) if stage in SYMBOLS and step.mean else ""
            rows.append((name, seconds(taken.mean), seconds(taken.p50), seconds(taken.p95), share))
    return Table(columns=("stage", "mean", "p50", "p95", "of the step"), rows=rows, numeric=range(1, 5))


def _losses(reading: Reading) -> Iterator[str]:
    dropped = sorted(reading.dropped_tokens.items(), key=lambda kept: -kept[1])
    if decided := reading.decided_tokens:
        listed = ", ".join(f"{tokens / decided:.1%} {reason}" for reason, tokens in dropped)
        yield f"{reading.useful_share:.1%} of the tokens were trained on; dropped: {listed or 'none'}."
    if (stages := reading.occupancy) is not None:
        idle = ", ".join(f"{name} {share:.0%}" for name, share in stages.idle_shares.items())
        yield f"Idle: {idle}. Stages ran side by side for {stages.overlap_share:.0%} of their time."
        if (stall_s := stages.stall_s) > 0.01 * reading.wall_s:
            yield f"Checkpoints held training up for {stall_s / reading.wall_s:.1%} of the time."
    if again := reading.preemptions:
        yield f"{again} sequences gave up their cache for lack of memory and were computed again."
    if number := reading.num_restarts:
        yield f"{count(number, 'restart')}: {reading.redone_steps} steps were taken again."


def _health(reading: Reading) -> Iterator[str]:
    mean, outside = reading.lag_mean, reading.ratio_outside
    if mean is not None:
        yield f"Tokens were {mean:.2f} versions old on average when first trained on, {reading.lag_max} at most."
    if outside is not None and outside > RATIO_OUTSIDE:
        far = "the data is far from the policy; lower loop.max_lag or buffer.replay, or set learner.correction"
        yield f"{outside:.1%} of the tokens have an importance ratio outside 0.9 to 1.1: {far}."
    if (left := reading.effective_samples) is not None and left < FEW_EFFECTIVE:
        yield f"The importance weights leave {left:.0%} of the samples effective."
    if (tokens := reading.answer_tokens) is not None and reading.tail_share is not None:
        last = f"for {reading.tail_share:.0%} of a step only the last twentieth of them is being generated"
        most = f"{tokens.p95:.0f} at p95, {tokens.max:.0f} at most"
        yield f"Answers have {tokens.mean:.0f} tokens on average, {most}; {last}."
    if (took := reading.verdict_s) is not None:
        yield f"A verdict took {seconds(took.mean)} on average, {seconds(took.p95)} at p95."
    if barren := reading.no_signal_share:
        yield f"{barren:.0%} of the groups had no signal: all their answers earned the same."


def plan_report(question: Question, found: Sequence[LayoutPlan]) -> Report:
    """The layout to take, what it comes to, and who else was made for such a workload."""
    best, lengths, samples = found[0], question.lengths, question.num_samples
    others = others_that_fit(best.bottleneck, question.model.num_params, may_lag=question.max_lag > 0)
    stages = [(f"{name} ({SYMBOLS[name]})", f"{getattr(best.times, name):,.3g}") for name in STAGES]
    times = Table(columns=("stage", "seconds a step"), rows=stages, numeric={1})
    systems = ((other.name, f"{other.fits}. But {other.mind}.") for other in others[:OTHERS_SHOWN])
    columns = ("placement", "engines x GPUs", "learner", "step", "tok/s", "$/M tok", "lag", "bottleneck")
    rows = []
    for plan in found[:PLANS_SHOWN]:
        split, cost = plan.layout, f"{plan.dollars_per_million:.2f}"
        engines = f"{split.num_engines} x {split.tensor_parallel}"
        speed = (seconds(plan.step_s), f"{plan.goodput:,.0f}", cost, f"{plan.lag:.1f}")
        devices = (str(split.placement), engines, str(split.learner_devices))
        rows.append((*devices, *speed, str(plan.bottleneck)))
    sections = (
        Section(title="take this", facts=tuple(_layout(question, best)), tables=(times,)),
        Section(title="the bottleneck", sentences=_told(best.bottleneck, ADVICE[best.bottleneck])),
        Section(title="mind", sentences=tuple(f"- {risk}" for risk in best.risks)),
        Section(title="other layouts", tables=(Table(columns=columns, rows=rows, numeric=range(1, 7)),)),
        Section(title="if not Headrace", facts=tuple(systems)),
    )
    return Report(
        title=f"{question.model.name} on {question.num_devices} x {question.device.name}: "
        f"{question.num_prompts} prompts x {samples} answers of {lengths.cut_mean:,.0f} tokens; "
        f"the longest of {samples} has {lengths.tail(samples):.1f} times that",
        sections=tuple(part for part in sections if part.facts or part.tables or part.sentences),
    )


def _layout(question: Question, plan: LayoutPlan) -> Iterator[tuple[str, str]]:
    chosen, learners = plan.layout, plan.layout.learner_devices
    engines = f"{count(chosen.num_engines, 'engine')} of {chosen.tensor_parallel}"
    rows = f"{plan.num_running} sequences at a time each"
    generate = f"{chosen.rollout_devices} generate ({engines}, {rows})"
    train = f"in turns with the learner on all {learners}" if chosen.colocated else f"{learners} train"
    yield "placement", f"{chosen.placement}: {generate}, {train}"
    yield "loop.max_lag", f"{plan.max_lag}; {plan.lag:.1f} versions old on average"
    publish = "counted as free: engine and learner share the weights, in one process"
    if plan.transfer is not None and plan.sync is not None:
        relay = ", passed on from engine to engine" if plan.transfer.relay else ""
        publish = f"{plan.transfer.encoding} weights in buckets{relay}: {plan.sync.total_s:.2g} s"
    yield "publish", publish
    yield "engine's GPU", _bill(plan.rollout_bill, question)
    yield "learner's GPU", _bill(plan.learner_bill, question)
    yield "settings", " ".join(map(quote, plan.settings)) or "none: it cannot be run here"
    yield "a step", seconds(plan.step_s)
    cost = f"{plan.dollars_per_million:.2f} dollars a million"
    yield "goodput", f"{plan.goodput:,.0f} trained tokens a second, {cost}"


def _bill(bill: MemoryBill, question: Question) -> str:
    parts = zip(("weights", "training state", "cache", "activations"), astuple(bill), strict=True)
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts if size)
    return f"{bill.total_bytes / 1e9:.0f} of {question.device.memory_bytes / 1e9:.0f} GB: {listed}"


def simulation_report(work: Workload, machine: Machine, layout: Layout, found: Sequence[Simulated]) -> Report:
    apart = f"{machine.rollout_workers} rollout workers, {layout.learner_gpus} GPUs that train"
    pools: tuple[str, ...] = ("rollout idle", "learner idle")
    if layout.turns:
        apart, pools = "generation and training take turns on the same devices", ("device idle",)
    workers = machine.reward_workers
    queue = f"{workers} reward workers" if workers else "rewards without a queue"
    means = "means leave out those in which the pipeline fills"
    facts = [
        ("machine", f"{count(layout.gpus, 'GPU')}: {apart}; {queue}"),
        ("a verdict", f"{seconds(work.reward_s.mean)} on average"),
        ("simulated", f"{len(found[0].steps)} steps each; {means}"),
    ]
    if num_failures := sum(one.failures for one in found):
        facts.append(("failures", f"{count(num_failures, 'rollout worker')} died and came back"))
    rows = []
    for one in found:
        idle = [max(0.0, share) for share in (one.rollout_idle, one.learner_idle)]
        idle = [max(0.0, sum(idle) - 1)] if layout.turns else idle
        shares = (percent(share) for share in (*idle, one.reward_idle))
        speed = (seconds(one.step_s, 4), seconds(one.step_p95_s, 4), f"{one.goodput_tokens_s:,.0f}")
        health = (f"{one.lag_mean:.2f}/{one.lag_max}", percent(one.useful_share, 1))
        rows.append((str(one.max_lag), *speed, *shares, *health))
    columns = ("max_lag", "step", "p95", "tokens/s", *pools, "reward idle", "lag", "useful")
    table = Table(columns=columns, rows=rows, numeric=range(len(columns)))
    a_step = f"{work.groups_per_step} prompts x {work.samples} answers"
    return Report(
        title=f"a step: {a_step} of {work.tokens.mean:,.0f} tokens on average",
        sections=(Section(facts=tuple(facts), tables=(table,), sentences=tuple(_lessons(found))),),
    )


def _lessons(found: Sequence[Simulated]) -> Iterator[str]:
    first, longest = found[0], found[0].stage_s.wall
    busy = f"{longest} is busy for {seconds(getattr(first.stage_s, longest), 4)} of it"
    at = f"At max_lag = {first.max_lag} a step takes {seconds(first.step_s, 4)}"
    yield f"{at}, and {busy}, longer than any other stage."
    most = max(one.goodput_tokens_s for one in found)
    good = (one for one in found if one.goodput_tokens_s * _GAIN >= most)
    enough = min(good, key=lambda one: one.max_lag)
    if enough is not first:
        gain = f"{enough.goodput_tokens_s / first.goodput_tokens_s:.2f}x the tokens per second"
        yield f"max_lag = {enough.max_lag} trains {gain} of max_lag = {first.max_lag}."
    if any(one.max_lag > enough.max_lag for one in found):
        yield f"More lag than {enough.max_lag} brings less than 5% on top."
    for one in found:
        lost, of = one.dropped_tokens, one.generated_tokens
        if dropped := ", ".join(f"{reason} {lost[reason] / of:.1%}" for reason in lost if lost[reason]):
            yield f"Of the tokens generated at max_lag = {one.max_lag} these are dropped: {dropped}."

"""What triage and the planner found, in words: the terminal prints them, and the page shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.insight.equation import Placement
from headrace.insight.memory_bill import MemoryBill
from headrace.insight.planner import Plan, Question
from headrace.insight.reading import Reading
from headrace.insight.triage import Move, Triage
from headrace.insight.walls import ADVICE, Wall

RATIO_OUTSIDE = 0.05  # of the tokens: from there on, the data is far from the policy
FEW_EFFECTIVE = 0.9
NO_MOVES = "No change that can be worked out brings 2% or more."
MOVE_TITLES = ("change", "a step takes", "goodput")
PLAN_TITLES = ("placement", "engines x GPUs", "learner", "step", "tok/s", "$/M tok", "lag", "wall")


def sign(wall: Wall) -> str:
    """How one sees that this is the wall."""
    return f"{wall}: {ADVICE[wall].sign}."


def in_general(wall: Wall) -> str:
    """What helps against a wall, whatever the run."""
    return f"Against {wall} in general: {'; '.join(ADVICE[wall].moves)}."


def costs(found: Triage) -> str:
    """What each wall costs: how long a step would be if it took no time."""
    saved = {wall: found.simulated_s - seconds for wall, seconds in found.without.items()}
    named = sorted((wall for wall in saved if saved[wall] > 0.01 * found.simulated_s), key=lambda wall: -saved[wall])
    listed = ", ".join(f"{found.without[wall]:.3g} s without {wall}" for wall in named)
    return f"A step of {found.simulated_s:.3g} s would take {listed or 'as long without any one of them'}."


def basis(found: Triage) -> str:
    """Where the predictions come from, and how far they are off where that can be told."""
    measured = f"; measured are {found.reading.step_s.mean:.3g} s" if found.reading.step_s else ""
    return f"Predicted by a simulation with this run's speeds. It puts a step at {found.simulated_s:.3g} s{measured}."


def move_lines(moves: Sequence[Move], now_s: float) -> list[tuple[str, str, str]]:
    """How it is, and each change with what it would bring; under `MOVE_TITLES`."""
    lines = [("as it is", f"{now_s:,.3g} s", "1.00x")]
    for move in moves:
        text = f"{move.text}: {' '.join(move.settings)}" if move.settings else move.text
        lines.append((text, f"{move.step_s:,.3g} s", f"{move.gain:.2f}x"))
    return lines


def losses(reading: Reading) -> Iterator[str]:
    """What tokens and time were lost to."""
    decided = reading.trained_tokens + sum(reading.dropped_tokens.values())
    if decided and reading.useful_share is not None:
        listed = ", ".join(
            f"{tokens / decided:.1%} {reason}"
            for reason, tokens in sorted(reading.dropped_tokens.items(), key=lambda kept: -kept[1])
        )
        yield f"{reading.useful_share:.1%} of the tokens were trained on; dropped: {listed or 'none'}."
    if reading.occupancy is not None:
        idle = ", ".join(f"{pool.name} {pool.idle_share:.0%}" for pool in reading.occupancy.pools)
        yield f"Idle: {idle}. Stages ran side by side for {reading.occupancy.overlap_share:.0%} of their time."
        if reading.occupancy.stall_s > 0.01 * reading.wall_s:
            yield f"Checkpoints held training up for {reading.occupancy.stall_s / reading.wall_s:.1%} of the time."
    if reading.preemptions:
        yield f"{reading.preemptions} sequences gave up their cache for lack of memory and were computed again."
    if reading.num_restarts:
        yield f"{_several(reading.num_restarts, 'restart')}: {reading.redone_steps} steps were taken again."


def health(reading: Reading) -> Iterator[str]:
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
        yield f"A verdict took {took.mean:.3g} s on average, {took.p95:.3g} s at p95."
    if reading.no_signal_share:
        yield f"{reading.no_signal_share:.0%} of the groups had no signal: all their answers earned the same."


def workload(question: Question) -> str:
    """What is asked for, and what the spread of the lengths does to it."""
    lengths, samples = question.lengths, question.num_samples
    longest = lengths.expected_max(samples) / lengths.cut_mean
    return (
        f"{question.model.name} on {question.num_devices} x {question.device.name}: {question.num_prompts} prompts x "
        f"{samples} answers of {lengths.cut_mean:,.0f} tokens; the longest of {samples} has {longest:.1f} times that "
        f"(the popular closed form says {lengths.closed_form_max(samples) / lengths.mean:.1f})"
    )


def layout(question: Question, plan: Plan) -> dict[str, str]:
    """What a plan consists of, and what it comes to."""
    chosen = plan.layout
    engines = (
        f"{chosen.rollout_devices} generate ({_several(chosen.num_engines, 'engine')} of {chosen.tensor_parallel}, "
        f"{plan.num_running} sequences at a time each)"
    )
    if chosen.placement is Placement.COLOCATED:
        split = f"colocated: {engines}, in turns with the learner on all {chosen.learner_devices}"
    else:
        split = f"{chosen.placement}: {engines}, {chosen.learner_devices} train"
    publish = "none needed: engine and learner share the weights"
    if plan.transfer is not None and plan.sync is not None:
        relay = ", passed on from engine to engine" if plan.transfer.relay else ""
        publish = f"{plan.transfer.encoding} weights in buckets{relay}: {plan.sync.total_s:.2g} s"
    return {
        "placement": split,
        "loop.max_lag": f"{plan.max_lag}; {plan.lag:.1f} versions old on average",
        "publish": publish,
        "engine's GPU": _bill(plan.rollout_bill, question),
        "learner's GPU": _bill(plan.learner_bill, question),
        "a step": f"{plan.step_s:,.3g} s",
        "goodput": f"{plan.goodput:,.0f} trained tokens a second, {plan.dollars_per_million:.2f} dollars a million",
    }


def plan_lines(found: Sequence[Plan]) -> list[tuple[str, ...]]:
    """Plans in a line each, under `PLAN_TITLES`."""
    return [
        (
            str(plan.layout.placement),
            f"{plan.layout.num_engines} x {plan.layout.tensor_parallel}",
            str(plan.layout.learner_devices),
            f"{plan.step_s:,.3g} s",
            f"{plan.goodput:,.0f}",
            f"{plan.dollars_per_million:.2f}",
            f"{plan.lag:.1f}",
            str(plan.wall),
        )
        for plan in found
    ]


def _several(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _bill(bill: MemoryBill, question: Question) -> str:
    parts = {
        "weights": bill.weight_bytes,
        "training state": bill.training_bytes,
        "cache": bill.kv_bytes,
        "activations": bill.activation_bytes,
    }
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    return f"{bill.total_bytes / 1e9:.0f} of {question.device.memory_bytes / 1e9:.0f} GB: {listed}"

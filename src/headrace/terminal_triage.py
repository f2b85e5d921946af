"""What `headrace triage` prints: where a step's time goes, what holds it back, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from headrace.insight.equation import SYMBOLS
from headrace.insight.reading import Reading
from headrace.insight.triage import Move, Triage, TypedTriage
from headrace.insight.walls import ADVICE, Wall
from headrace.terminal import Terminal
from headrace.types import STAGES

RATIO_OUTSIDE = 0.05  # of the tokens: from there on, the data is far from the policy
FEW_EFFECTIVE = 0.9


class TriageTerminal(Terminal):
    """Shows what holds a run back."""

    def run(self, found: Triage) -> None:
        """The verdict on a run."""
        reading = found.reading
        self._print(f"{reading.run_dir}: {_steps(reading)}")
        self._print()
        self._print(self._stages(reading))
        self._section("the wall")
        self._paragraph(f"{found.wall}: {ADVICE[found.wall].sign}.")
        self._paragraph(_saved(found))
        self._section("losses and health")
        for sentence in (*_losses(reading), *_health(reading)):
            self._paragraph(sentence)
        self._moves(found.moves, found.wall, found.simulated_s)
        if reading.step_s is not None:
            self._paragraph(
                f"Predicted by a simulation with this run's speeds. It puts a step at {found.simulated_s:.3g} s; "
                f"measured are {reading.step_s.mean:.3g} s."
            )

    def typed(self, found: TypedTriage) -> None:
        """The verdict on five numbers."""
        table = Table(Column("placement", no_wrap=True), Column("step", justify="right"), box=None, pad_edge=False)
        for placement, seconds in found.step_s.items():
            mark = "  <" if placement is found.placement else ""
            table.add_row(str(placement), f"{seconds:,.4g} s{mark}")
        self._print(table)
        self._section("the wall")
        self._paragraph(f"{found.wall}: {ADVICE[found.wall].sign}.")
        self._moves(found.moves, found.wall, found.step_s[found.placement])

    def _stages(self, reading: Reading) -> Table:
        numbers = [Column(title, justify="right") for title in ("mean", "p50", "p95", "of the step")]
        table = Table(Column("stage", no_wrap=True), *numbers, box=None, pad_edge=False)
        if reading.stage_s is None or reading.stage_p50_s is None or reading.stage_p95_s is None:
            return table
        step = reading.step_s.mean if reading.step_s else 0.0
        for stage in STAGES:
            mean = getattr(reading.stage_s, stage)
            seconds = [mean, getattr(reading.stage_p50_s, stage), getattr(reading.stage_p95_s, stage)]
            share = f"{mean / step:.0%}" if step else ""
            table.add_row(f"{stage} ({SYMBOLS[stage]})", *(f"{s:.3g} s" for s in seconds), share)
        if reading.step_s:
            table.add_row(
                "step", *(f"{s:.3g} s" for s in (reading.step_s.mean, reading.step_s.p50, reading.step_s.p95))
            )
        return table

    def _moves(self, moves: Sequence[Move], wall: Wall, now_s: float) -> None:
        self._section("what to change, the best first")
        if not moves:
            self._paragraph("No change that can be worked out brings 2% or more.")
        table = Table(Column("change"), Column("step", justify="right"), Column("goodput", justify="right"), box=None)
        for move in moves:
            text = f"{move.text}: {' '.join(move.settings)}" if move.settings else move.text
            table.add_row(text, f"{now_s:,.3g} s -> {move.step_s:,.3g} s", f"{move.gain:.2f}x")
        if moves:
            self._print(table)
        self._print()
        self._paragraph(f"Against {wall} in general: {'; '.join(ADVICE[wall].moves)}.")


def as_json(found: Triage | TypedTriage) -> dict[str, Any]:
    """The same for programs."""
    moves = [asdict(move) for move in found.moves]
    known: dict[str, Any] = {"wall": str(found.wall), "sign": ADVICE[found.wall].sign, "moves": moves}
    if isinstance(found, TypedTriage):
        steps = {str(placement): seconds for placement, seconds in found.step_s.items()}
        return known | {"placement": str(found.placement), "step_s": steps, "stage_s": asdict(found.times)}
    reading = found.reading
    return known | {
        "run_dir": str(reading.run_dir),
        "steps": reading.num_steps,
        "step_s": asdict(reading.step_s) if reading.step_s else None,
        "stage_s": asdict(reading.stage_s) if reading.stage_s else None,
        "simulated_s": found.simulated_s,
        "without_s": {str(wall): seconds for wall, seconds in found.without.items()},
        "goodput_tokens_per_s": reading.goodput_tokens_per_s,
        "useful_share": reading.useful_share,
        "dropped_tokens": dict(reading.dropped_tokens),
        "overlap_share": reading.occupancy.overlap_share if reading.occupancy else None,
        "idle": {p.name: p.idle_share for p in reading.occupancy.pools} if reading.occupancy else {},
    }


def _steps(reading: Reading) -> str:
    first, last = reading.measured_steps[0], reading.measured_steps[-1]
    goodput = reading.goodput_tokens_per_s
    speed = f", {goodput:,.0f} trained tokens a second" if goodput else ""
    return f"steps {first} to {last}{speed}"


def _saved(found: Triage) -> str:
    """What each wall costs, in a sentence."""
    costs = {wall: found.simulated_s - seconds for wall, seconds in found.without.items()}
    named = sorted((wall for wall in costs if costs[wall] > 0.01 * found.simulated_s), key=lambda wall: -costs[wall])
    listed = ", ".join(f"{wall} {found.without[wall]:.3g} s" for wall in named)
    return f"If it cost nothing, a step of {found.simulated_s:.3g} s would take, by wall: {listed or 'the same'}."


def _losses(reading: Reading) -> Iterator[str]:
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
    if reading.restarts.num:
        yield f"{reading.restarts.num} restarts: {reading.restarts.redone_steps} steps were taken again."


def _health(reading: Reading) -> Iterator[str]:
    if reading.lags is not None:
        yield f"Trained tokens were {reading.lags.mean:.2f} versions old on average, {reading.lags.max} at most."
    ratios = reading.ratios
    if ratios is not None and ratios.ratio_outside is not None and ratios.ratio_outside > RATIO_OUTSIDE:
        yield (
            f"{ratios.ratio_outside:.1%} of the tokens have an importance ratio outside 0.9 to 1.1: the data is far "
            "from the policy; lower loop.max_lag, or set learner.correction"
        )
    if ratios is not None and ratios.effective_samples is not None and ratios.effective_samples < FEW_EFFECTIVE:
        yield f"The importance weights leave {ratios.effective_samples:.0%} of the samples effective."
    if reading.lengths is not None and reading.tail_share is not None:
        tokens = reading.lengths.tokens
        yield (
            f"Answers have {tokens.mean:.0f} tokens on average, {tokens.p95:.0f} at p95, {tokens.max:.0f} at most; for "
            f"{reading.tail_share:.0%} of a step only the last twentieth of them is being generated."
        )
    if reading.rewards is not None and reading.rewards.latency_s is not None:
        latency = reading.rewards.latency_s
        yield f"A verdict took {latency.mean:.3g} s on average, {latency.p95:.3g} s at p95."
    if reading.rewards is not None and reading.rewards.no_signal_share:
        yield f"{reading.rewards.no_signal_share:.0%} of the groups had no signal: all their answers earned the same."

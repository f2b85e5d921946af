"""What `headrace triage` prints: where a step's time goes, what holds it back, and what to change first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from headrace.insight.equation import SYMBOLS
from headrace.insight.reading import Reading
from headrace.insight.triage import Move, Triage, TypedTriage
from headrace.insight.walls import ADVICE, Wall
from headrace.insight.words import MOVE_TITLES, NO_MOVES, basis, costs, health, in_general, losses, move_lines, sign
from headrace.terminal import Terminal
from headrace.types import STAGES


class TriageTerminal(Terminal):
    """Shows what holds a run back."""

    def run(self, found: Triage) -> None:
        """The verdict on a run."""
        reading = found.reading
        self._print(f"{reading.run_dir}: {_steps(reading)}")
        self._print()
        self._print(self._stages(reading))
        self._section("the wall")
        self._paragraph(sign(found.wall))
        self._paragraph(costs(found))
        self._section("losses and health")
        for sentence in (*losses(reading), *health(reading)):
            self._paragraph(sentence)
        self._moves(found.moves, found.wall, found.simulated_s)
        self._paragraph(basis(found))

    def typed(self, found: TypedTriage) -> None:
        """The verdict on five numbers."""
        table = Table(Column("placement", no_wrap=True), Column("step", justify="right"), box=None, pad_edge=False)
        for placement, seconds in found.step_s.items():
            mark = "  <" if placement is found.placement else ""
            table.add_row(str(placement), f"{seconds:,.4g} s{mark}")
        self._print(table)
        self._section("the wall")
        self._paragraph(sign(found.wall))
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
            self._paragraph(NO_MOVES)
        first, *numbers = MOVE_TITLES
        table = Table(first, *(Column(title, justify="right") for title in numbers), box=None)
        for line in move_lines(moves, now_s):
            table.add_row(*line)
        if moves:
            self._print(table)
        self._print()
        self._paragraph(in_general(wall))


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

"""What `headrace plan` prints: the layout to take, what it comes to, and who else was made for such a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from headrace.insight.equation import SYMBOLS
from headrace.insight.frameworks import Framework
from headrace.insight.planner import Plan, Question
from headrace.insight.words import PLAN_TITLES, in_general, layout, plan_lines, sign, workload
from headrace.terminal import Terminal
from headrace.types import STAGES

SHOWN = 5  # layouts
OTHERS = 4  # frameworks


class PlanTerminal(Terminal):
    """Shows plans."""

    def plans(self, question: Question, found: Sequence[Plan], others: Sequence[Framework]) -> None:
        """The best one at length, and the next ones in a line each."""
        best = found[0]
        self._print(workload(question))
        self._section("take this")
        self._pairs(layout(question, best))
        self._print()
        self._print(_stages(best))
        self._section("the wall")
        self._paragraph(f"{sign(best.wall)} {in_general(best.wall)}")
        if best.risks:
            self._section("mind")
            for risk in best.risks:
                self._paragraph(f"- {risk}")
        self._section("other layouts")
        self._print(_table(found[:SHOWN]))
        self._section("if not Headrace")
        for other in others[:OTHERS]:
            self._paragraph(f"{other.name}: {other.fits}. But {other.mind}.")


def as_json(question: Question, found: Sequence[Plan], others: Sequence[Framework]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "model": asdict(question.model),
        "device": question.device.name,
        "num_devices": question.num_devices,
        "plans": [_plain(plan) for plan in found],
        "others": [other.name for other in others],
    }


def _plain(plan: Plan) -> dict[str, Any]:
    known = asdict(plan) | {"wall": str(plan.wall)}
    known["layout"]["placement"] = str(plan.layout.placement)
    if plan.transfer is not None:
        known["transfer"]["encoding"] = str(plan.transfer.encoding)
    return known


def _stages(plan: Plan) -> Table:
    table = Table("stage", Column("seconds a step", justify="right"), box=None, pad_edge=False)
    for stage in STAGES:
        table.add_row(f"{stage} ({SYMBOLS[stage]})", f"{getattr(plan.times, stage):,.3g}")
    return table


def _table(found: Sequence[Plan]) -> Table:
    first, *numbers, last = PLAN_TITLES
    columns = [Column(title, justify="right") for title in numbers]
    table = Table(first, *columns, last, box=None, pad_edge=False)
    for line in plan_lines(found):
        table.add_row(*line)
    return table

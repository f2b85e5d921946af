"""What `headrace plan` prints: the layout to take, what it comes to, and who else was made for such a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from headrace.insight.equation import SYMBOLS, Placement
from headrace.insight.frameworks import Framework
from headrace.insight.memory_bill import MemoryBill
from headrace.insight.planner import Plan, Question
from headrace.insight.walls import ADVICE
from headrace.terminal import Terminal
from headrace.types import STAGES

SHOWN = 5  # layouts
OTHERS = 4  # frameworks


class PlanTerminal(Terminal):
    """Shows plans."""

    def plans(self, question: Question, found: Sequence[Plan], others: Sequence[Framework]) -> None:
        """The best one at length, and the next ones in a line each."""
        best = found[0]
        self._print(_workload(question))
        self._section("take this")
        self._pairs(_layout(question, best))
        self._print()
        self._print(_stages(best))
        self._section("the wall")
        self._paragraph(f"{best.wall}: {ADVICE[best.wall].sign}. What helps: {'; '.join(ADVICE[best.wall].moves)}.")
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


def _workload(question: Question) -> str:
    lengths, samples = question.lengths, question.num_samples
    longest = lengths.expected_max(samples) / lengths.cut_mean
    return (
        f"{question.model.name} on {question.num_devices} x {question.device.name}: {question.num_prompts} prompts x "
        f"{samples} answers of {lengths.cut_mean:,.0f} tokens; the longest of {samples} has {longest:.1f} times that "
        f"(the popular closed form says {lengths.closed_form_max(samples) / lengths.mean:.1f})"
    )


def _layout(question: Question, plan: Plan) -> dict[str, str]:
    layout = plan.layout
    engines = f"{layout.num_engines} engines of {layout.tensor_parallel}, {plan.num_running} sequences at a time each"
    if layout.placement is Placement.COLOCATED:
        split = f"colocated: {engines}, in turns with the learner on all {layout.learner_devices}"
    else:
        split = f"{layout.placement}: {engines}; {layout.learner_devices} devices that train"
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


def _bill(bill: MemoryBill, question: Question) -> str:
    parts = {
        "weights": bill.weight_bytes,
        "training state": bill.training_bytes,
        "cache": bill.kv_bytes,
        "activations": bill.activation_bytes,
    }
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    return f"{bill.total_bytes / 1e9:.0f} of {question.device.memory_bytes / 1e9:.0f} GB: {listed}"


def _stages(plan: Plan) -> Table:
    table = Table("stage", Column("seconds a step", justify="right"), box=None, pad_edge=False)
    for stage in STAGES:
        table.add_row(f"{stage} ({SYMBOLS[stage]})", f"{getattr(plan.times, stage):,.3g}")
    return table


def _table(found: Sequence[Plan]) -> Table:
    numbers = [Column(title, justify="right") for title in ("engines", "learner", "step", "tok/s", "$/M tok", "lag")]
    table = Table("placement", *numbers, "wall", box=None, pad_edge=False)
    for plan in found:
        engines = f"{plan.layout.num_engines} x {plan.layout.tensor_parallel}"
        cells = (f"{plan.step_s:,.3g} s", f"{plan.goodput:,.0f}", f"{plan.dollars_per_million:.2f}", f"{plan.lag:.1f}")
        table.add_row(str(plan.layout.placement), engines, str(plan.layout.learner_devices), *cells, str(plan.wall))
    return table

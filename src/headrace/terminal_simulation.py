"""What `headrace simulate` prints: a line for each max_lag, and what the lines say in words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from headrace.insight.scenario import Layout
from headrace.insight.simulated import Simulated
from headrace.insight.workload import Cluster, Workload
from headrace.terminal import Terminal

_GAIN = 1.05  # by which one must be quicker to be worth more lag


class SimulationTerminal(Terminal):
    """Shows simulated runs."""

    def simulations(self, work: Workload, cluster: Cluster, layout: Layout, found: Sequence[Simulated]) -> None:
        """A line for each."""
        answers = (
            f"{work.groups_per_step} prompts x {work.samples} answers of {work.tokens.mean:,.0f} tokens on average"
        )
        apart = f"{cluster.rollout_workers} rollout workers, {layout.learner_gpus} GPUs that train"
        if layout.turns:
            apart = "generation and training take turns on the same devices"
        rewards = f"{cluster.reward_workers} reward workers" if cluster.reward_workers else "rewards without a queue"
        self._pairs(
            {
                "a step": answers,
                "machine": f"{layout.gpus} GPU{'s' * (layout.gpus > 1)}: {apart}; {rewards}",
                "a verdict": f"{work.reward_s.mean:.3g} s on average",
                "simulated": f"{len(found[0].steps)} steps each; means leave out those in which the pipeline fills",
            }
        )
        self._print()
        self._print(self._table(found, layout))
        self._print()
        for sentence in _words(found):
            self._paragraph(sentence)

    def _table(self, found: Sequence[Simulated], layout: Layout) -> Table:
        pools = ("device idle",) if layout.turns else ("rollout idle", "learner idle")
        titles = ("step", "p95", "tokens/s", *pools, "reward idle", "lag", "useful")
        table = Table(Column("max_lag", justify="right"), box=None, pad_edge=False, padding=(0, 1))
        for title in titles:
            table.add_column(title, justify="right")
        for one in found:
            idle = [1 - one.rollout_busy, 1 - one.learner_busy]
            idle = [max(0.0, sum(idle) - 1)] if layout.turns else idle
            shares = [*(f"{share:.0%}" for share in idle), _share(1 - one.reward_busy)]
            seconds = (f"{one.step_s:,.4g} s", f"{one.step_quantile_s(0.95):,.4g} s")
            lag = f"{one.lag_mean:.2f}/{one.lag_max}"
            table.add_row(str(one.max_lag), *seconds, f"{one.goodput:,.0f}", *shares, lag, f"{one.useful_share:.1%}")
        return table


def _words(found: Sequence[Simulated]) -> list[str]:
    """What a newcomer should see in the table."""
    first = found[0]
    longest = max((getattr(first.stage_s, s), s) for s in ("rollout", "reward", "reference", "train", "publish"))
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


def simulations_json(work: Workload, cluster: Cluster, layout: Layout, found: Sequence[Simulated]) -> str:
    """The same for programs."""
    machine = {name: value for name, value in asdict(cluster).items() if value != math.inf}
    step = {"groups_per_step": work.groups_per_step, "samples": work.samples, "mean_tokens": work.tokens.mean}
    step |= {"reward_s": work.reward_s.mean, "no_signal_share": work.no_signal_share}
    runs = [_plain(one) for one in found]
    return json.dumps({"step": step, "layout": asdict(layout), "machine": machine, "simulated": runs}, indent=2)


def _plain(one: Simulated) -> dict[str, Any]:
    return {
        "max_lag": one.max_lag,
        "steps": len(one.steps),
        "step_s": one.step_s,
        "step_p50_s": one.step_quantile_s(0.5),
        "step_p95_s": one.step_quantile_s(0.95),
        "stage_s": asdict(one.stage_s),
        "goodput_tokens_s": one.goodput,
        "rollout_idle": 1 - one.rollout_busy,
        "learner_idle": 1 - one.learner_busy,
        "reward_idle": None if math.isnan(one.reward_busy) else 1 - one.reward_busy,
        "lag_mean": one.lag_mean,
        "lag_max": one.lag_max,
        "lag_shares": one.lag_shares,
        "useful_share": one.useful_share,
        "generated_tokens": one.generated_tokens,
        "trained_tokens": one.trained_tokens,
        "dropped_tokens": dict(one.dropped_tokens),
        "buffered_tokens": one.buffered_tokens,
        "in_flight_tokens": one.in_flight_tokens,
        "failures": one.num_failures,
    }


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"

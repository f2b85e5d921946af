"""A run's own speeds, from its ledger: what a simulation of another run on the same machine needs.

Decoding is fitted answer by answer. While an answer ran, the engine took a decode step for each of its tokens, and
sampled a number of tokens in all. The time that took, without training and the like, is the first times the seconds of
a step plus the second times the seconds of a row. What the loop itself did between two steps is in it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.config import Config
from headrace.errors import RunError
from headrace.insight.workload import LogNormal, Machine, Recorded, Workload
from headrace.ledger.files import run_config
from headrace.runs.columns import (
    Columns,
    Intervals,
    Ints,
    Numbers,
    RowColumns,
    read_spans,
    read_trajectories,
    reading,
    union,
)
from headrace.types import DropReason, FinishReason

_ROUNDS = 8
_STAGES = ("rollout", "train", "reference", "publish", "evaluate")
ROW_TOKENS = 2 / 3  # of training cost as much as a row of a decode step: a third of the work, at half the efficiency
PASS_STEPS = 5  # a pass of the learner, forward and backward, costs about as much as 5 decode steps, before its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a run consisted of, and how fast its machine was."""

    workload: Workload
    machine: Machine
    max_lag: int
    num_steps: int
    step_s: float  # mean, measured

    def of(self, config: Config) -> tuple[Workload, Machine]:
        """The same answers and speeds with the settings of another run."""
        machine = replace(
            self.machine,
            rows_per_worker=config.rollout.max_running,
            pass_tokens=config.learner.micro_batch_tokens,
            reward_workers=max(1, config.reward.workers),
            reference_token_s=self.machine.reference_token_s if config.learner.kl_coef else 0.0,
        )
        return replace(workload_of(config, self.workload), reward_s=self.workload.reward_s), machine


def workload_of(config: Config, like: Workload) -> Workload:
    """A step as the settings have it, with the answers of `like`."""
    return replace(
        like,
        groups_per_step=config.loop.groups_per_step,
        samples=config.rollout.samples,
        max_new_tokens=config.rollout.max_new_tokens,
        drop_overlong=config.buffer.drop_overlong,
        min_share=config.buffer.min_share,
        no_signal_share=like.no_signal_share if config.buffer.drop_no_signal else 0.0,
    )


def calibrate(run_dir: Path) -> Calibration:
    """Read a run's ledger. The run needs a step that is complete."""
    config = run_config(run_dir)
    with reading(run_dir) as connection:
        rows, spans, found = RowColumns.read(connection), read_spans(connection), read_trajectories(connection)
        (redone,) = connection.execute("SELECT COALESCE(SUM(redone_steps), 0) FROM restarts").fetchone()
    answers = found.where((found["finish"] != "") & (found["num_tokens"] > 0))
    answers = answers.where(np.argsort(answers["finished_s"], kind="stable"))
    published = spans["version"][spans["stage"] == "publish"]
    if not len(rows) or not len(answers) or not len(published):
        raise RunError(f"{run_dir} has no complete step yet: there is nothing to take speeds from")
    num_steps = len(np.unique(published)) + redone  # on a cluster a version has several publish spans

    def of(*stages: str) -> Intervals:
        its = spans.where(np.isin(spans["stage"], stages))
        return its["start_s"], its["end_s"]

    apart = config.place.cluster == "ray" and config.place.layout == "disaggregated"
    workers = config.rollout.workers if apart else 1
    passes = _passes(spans)
    mean_token_s = np.nansum(passes[0][passes[1] > 0]) / max(1.0, np.nansum(passes[1]))
    running = answers["started_s"], answers["finished_s"]
    elsewhere = of("evaluate") if apart else of("train", "reference", "publish", "evaluate")
    decode_s, decode_row_s = decode_speed(
        running, answers["num_tokens"], elsewhere, ROW_TOKENS * mean_token_s / workers
    )
    optimizer_s, pass_s, token_s = training_speed(*passes, num_steps, like_pass_s=PASS_STEPS * decode_s)
    groups = _AnswerGroups.of(answers)
    forward_s = token_s / 3  # the backward pass has twice the products
    prefill_s, prefill_token_s = _prefill(groups.prompt_tokens, running, of("rollout"), forward_s)
    scored = answers.where(np.isfinite(answers["scored_s"]))
    everything = _joined(running, (scored["finished_s"], scored["scored_s"]), of(*_STAGES))
    host_s = rows.column("wall_s").sum() - (_length(everything) - _length(of("evaluate")))
    num_tokens = answers["num_tokens"] + answers["num_prompt_tokens"]
    num_trained = float(num_tokens[np.isfinite(answers["trained_step"])].sum())
    machine = Machine(
        rollout_workers=workers,
        rows_per_worker=config.rollout.max_running,
        decode_s=decode_s,
        decode_row_s=decode_row_s * workers,  # each of them has its part of the rows
        prefill_s=prefill_s,
        prefill_token_s=prefill_token_s,
        train_token_s=token_s,
        train_pass_s=pass_s,
        pass_tokens=config.learner.micro_batch_tokens,
        optimizer_s=optimizer_s,
        reference_token_s=_length(of("reference")) / max(1.0, num_trained),
        publish_s=_length(of("publish")) / num_steps,
        reward_workers=max(1, config.reward.workers),
        host_s=max(0.0, host_s / len(rows)),
        colocated=not apart,
    )
    return Calibration(
        workload=workload_of(config, groups.workload(config)),
        machine=machine,
        max_lag=config.loop.max_lag,
        num_steps=len(rows),
        step_s=float(rows.column("wall_s").mean()),
    )


def _passes(spans: Columns) -> tuple[Numbers, Numbers]:
    """Seconds and tokens of each stretch of training: a micro-batch, or (NaN tokens) the optimizer's part."""
    train = spans.where(spans["stage"] == "train")
    tokens = [float(detail.split()[0]) if detail else np.nan for detail in train["detail"].tolist()]
    return train["end_s"] - train["start_s"], np.array(tokens, np.float64)


@dataclass(frozen=True, slots=True)
class _AnswerGroups:
    """The answers that came to their own end, group by group; `begins` are the indices of their first ones."""

    answers: Columns
    begins: Ints

    @classmethod
    def of(cls, answers: Columns) -> _AnswerGroups:
        own = answers.where(answers["finish"] != FinishReason.ABORT)
        own = own.where(np.lexsort((own["attempt"], own["serial"])))
        other = (np.diff(own["serial"], prepend=-1) != 0) | (np.diff(own["attempt"], prepend=-1) != 0)
        return cls(own, np.flatnonzero(other))

    @property
    def prompt_tokens(self) -> Numbers:
        found: Numbers = self.answers["num_prompt_tokens"][self.begins]
        return found

    def workload(self, config: Config) -> Workload:
        own, begins = self.answers, self.begins
        service_s = service_seconds(own["finished_s"], own["scored_s"], config.reward.workers)
        known = [part[np.isfinite(part)] for part in np.split(service_s, begins[1:])]
        rewards = tuple(part for part in known if len(part))
        scored = np.logical_or.reduceat(np.isfinite(own["scored_s"]), begins)
        barren = np.logical_or.reduceat(own["drop_reason"] == DropReason.NO_SIGNAL, begins)
        return Workload(
            groups_per_step=config.loop.groups_per_step,
            samples=config.rollout.samples,
            tokens=Recorded(groups=tuple(np.split(own["num_tokens"], begins[1:]))),
            reward_s=Recorded(groups=rewards) if rewards else LogNormal(mean=0.0),
            prompt_tokens=float(self.prompt_tokens.mean()),
            # never all: the simulation would have nothing to train on
            no_signal_share=float((scored & barren).sum() / (scored.sum() + 1)),
        )


def _prefill(prompt_tokens: Numbers, running: Intervals, rollout: Intervals, forward_s: float) -> tuple[float, float]:
    """What the engine did while no answer ran, as seconds of a prompt and of each of its tokens."""
    num_tokens = float(prompt_tokens.sum())
    seconds = _length(_joined(rollout, running)) - _length(running)
    return max(0.0, seconds - forward_s * num_tokens) / len(prompt_tokens), min(forward_s, seconds / num_tokens)


def service_seconds(finished_s: Numbers, scored_s: Numbers, num_workers: int) -> Numbers:
    """A worker's seconds for each answer, without the wait for one; 0 for a verdict that was known, NaN without one.

    Workers take answers first come, first served, so who was free when follows from when verdicts came.
    """
    free_s, found = [0.0] * num_workers, np.full(len(finished_s), np.nan)
    for i in np.argsort(finished_s, kind="stable"):
        if np.isnan(scored_s[i]):
            continue
        start_s = max(float(finished_s[i]), free_s[0])
        found[i] = max(0.0, scored_s[i] - start_s)
        if scored_s[i] > start_s:
            heapq.heapreplace(free_s, float(scored_s[i]))
    return found


def decode_speed(
    running: Intervals, num_tokens: Numbers, elsewhere: Intervals, like_row_s: float = 0.0
) -> tuple[float, float]:
    """Seconds of a decode step, and of each row in it: about `like_row_s`, where the answers do not tell.

    `running` is when each answer ran, `elsewhere` when the device did something else.
    """
    starts, ends = union(elsewhere)
    edges = np.concatenate([[0.0], np.stack([starts, ends], axis=1).ravel()])
    taken = np.concatenate([[0.0], np.cumsum(np.stack([np.zeros(len(starts)), ends - starts], axis=1).ravel())])
    # from here on, time is the engine's: what the device did elsewhere is taken out
    start_s, end_s = (at_s - np.interp(at_s, edges, taken) for at_s in running)
    steps = num_tokens - 1.0
    use = (end_s > start_s) & (steps > 0)
    if not use.any():
        raise RunError("no answer has more than one token: how fast the engine decodes cannot be told")
    start_s, end_s, steps = start_s[use], end_s[use], steps[use]
    times = np.concatenate([start_s, end_s])
    order = np.argsort(times, kind="stable")
    times, rows = times[order], np.cumsum(np.where(order < len(steps), 1.0, -1.0))
    step_s, row_s = 1.0, 0.0
    for _ in range(_ROUNDS):  # how fast decode steps follow each other depends on what is looked for
        pace = np.where(rows > 0, 1 / (step_s + row_s * np.maximum(rows, 1.0)), 0.0)[:-1] * np.diff(times)
        paces, tokens = (np.concatenate([[0.0], np.cumsum(part)]) for part in (pace, pace * rows[:-1]))
        taken_steps, in_all = (np.interp(end_s, times, c) - np.interp(start_s, times, c) for c in (paces, tokens))
        columns = np.stack([steps, in_all * steps / taken_steps], axis=1)
        alike = float(in_all.sum() / taken_steps.sum())  # as many as run together
        expected = min(like_row_s * columns[:, 1].sum() / (end_s - start_s).sum(), 0.9)
        step_s, row_s = _fit(columns, end_s - start_s, (1 - expected, expected), (0.5, 0.5), alike=alike)
    return step_s, row_s


def _length(intervals: Intervals) -> float:
    """Of the union of the intervals."""
    starts, ends = union(intervals)
    return float((ends - starts).sum())


def _joined(*parts: Intervals) -> Intervals:
    return np.concatenate([starts for starts, _ in parts]), np.concatenate([ends for _, ends in parts])


def training_speed(
    seconds: Numbers, num_tokens: Numbers, num_steps: int, *, like_pass_s: float = 0.0
) -> tuple[float, float, float]:
    """Seconds of the optimizer's part of a step, of a micro-batch, and of each token in it.

    What is no micro-batch (NaN tokens) is the optimizer's. A micro-batch takes about `like_pass_s`, where the passes do
    not tell.
    """
    batch = num_tokens > 0
    optimizer_s = float(seconds[np.isnan(num_tokens)].sum()) / num_steps
    if not batch.any():
        return optimizer_s, 0.0, 0.0
    values = seconds[batch]
    columns = np.stack([np.ones(len(values)), num_tokens[batch]], axis=1)
    expected = min(like_pass_s * len(values) / values.sum(), 0.9)
    pass_s, token_s = _fit(
        columns, values, (expected, 1 - expected), (max(expected, 0.01), 0.5), alike=len(values) / num_steps
    )
    return optimizer_s, pass_s, token_s


def _fit(
    columns: Numbers, values: Numbers, shares: tuple[float, float], spreads: tuple[float, float], *, alike: float = 1.0
) -> tuple[float, float]:
    """Ridge fit of two non-negative factors, with which `columns` come nearest to `values`.

    `shares` and `spreads` are the prior: the fraction of the total that each factor makes up, and its standard
    deviation. Errors are correlated over `alike` samples, so the noise is scaled by it.
    """
    whole = values.sum() / columns.sum(axis=0)
    expected, certain = np.array(shares), 1 / np.array(spreads) ** 2
    scaled = columns * whole  # a factor of 1 makes up all of the sum
    best = np.linalg.lstsq(scaled, values, rcond=None)[0]
    noise = max(float(np.mean((scaled @ best - values) ** 2)), 1e-12 * float(np.mean(values**2))) * alike
    factors = np.linalg.solve(
        scaled.T @ scaled / noise + np.diag(certain), scaled.T @ values / noise + certain * expected
    )
    if (factors < 0).any():
        kept = int(np.argmax(factors))
        factors = np.zeros(2)
        factors[kept] = values @ scaled[:, kept] / (scaled[:, kept] @ scaled[:, kept])
    step, each = (factors * whole).tolist()
    return step, each

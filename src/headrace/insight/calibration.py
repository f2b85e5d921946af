"""A run's own speeds, from its ledger: what a simulation of another run on the same machine needs.

Decoding is fitted answer by answer. While an answer ran, the engine took a decode step for each of its tokens, and
sampled so many tokens in all. The time that took, without training and the like, is the first times the seconds of a
step plus the second times the seconds of a row. What the loop itself did between two steps is in it.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.config import Config
from headrace.errors import RunError
from headrace.insight.workload import Cluster, Drawn, Numbers, Recorded, Workload
from headrace.ledger.clock import union_length
from headrace.ledger.runs import reading, run_config
from headrace.types import DropReason, FinishReason

_ANSWERS = (
    "SELECT id, serial, attempt, num_tokens, num_prompt_tokens, started_s, finished_s, scored_s, finish, drop_reason, "
    "COALESCE(trained_step, 0) FROM trajectories WHERE finish IS NOT NULL AND num_tokens > 0 ORDER BY finished_s"
)
_ROUNDS = 8
ROW_TOKENS = 2 / 3  # of training cost as much as a row of a decode step: a third of the work, at half the efficiency
PASS_STEPS = 5  # a pass of the learner, forward and backward, costs about so many decode steps, whatever its tokens

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a run consisted of, and how fast its machine was.

    Example:
        Calibration(workload=Workload(...), cluster=Cluster(rollout_workers=1, ..., colocated=True), max_lag=0,
            num_steps=60, step_s=1.31)
    """

    workload: Workload
    cluster: Cluster
    max_lag: int
    num_steps: int
    step_s: float  # mean, measured

    def of(self, config: Config) -> tuple[Workload, Cluster]:
        """The same answers and speeds with the settings of another run."""
        cluster = replace(
            self.cluster,
            rows_per_worker=config.rollout.max_running,
            pass_tokens=config.learner.micro_batch_tokens,
            reward_workers=config.reward.workers,
            reference_token_s=self.cluster.reference_token_s if config.learner.kl_coef else 0.0,
        )
        return replace(workload_of(config, self.workload), reward_s=self.workload.reward_s), cluster


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


class Pass(NamedTuple):
    """A stretch of training: a micro-batch of so many tokens, or the optimizer's part."""

    seconds: float
    num_tokens: int | None


class Answer(NamedTuple):
    """One trajectory, as far as its times go.

    Example:
        Answer("40:train-17/3", 40, 1, 212, 31, 12.1, 15.0, 15.2, "eos", None, 8)
    """

    id: str
    serial: int
    attempt: int
    num_tokens: int
    num_prompt_tokens: int
    started_s: float
    finished_s: float
    scored_s: float | None
    finish: str
    drop_reason: str | None
    step: int  # that trained on it; 0: none


def calibrate(run_dir: Path) -> Calibration:
    """Read a run's ledger. The run needs a step that is complete."""
    config = run_config(run_dir)
    with reading(run_dir) as connection:
        answers = [Answer(*values) for values in connection.execute(_ANSWERS)]
        walls = [wall_s for (wall_s,) in connection.execute("SELECT wall_s FROM rows ORDER BY step")]
        spans, passes = _spans(connection), _passes(connection)
    if not walls or not answers or not spans["publish"]:
        raise RunError(f"{run_dir} has no complete step yet: there is nothing to take speeds from")
    groups = _by_group(answers)
    num_prompt_tokens = sum(group[0].num_prompt_tokens for group in groups)
    elsewhere = [interval for stage in ("train", "reference", "publish", "evaluate") for interval in spans[stage]]
    decode_s, decode_row_s = decode_speed(answers, elsewhere, like_row_s=ROW_TOKENS * _mean_token_s(passes))
    optimizer_s, pass_s, token_s = training_speed(passes, len(spans["publish"]), like_pass_s=PASS_STEPS * decode_s)
    trained_tokens = sum(a.num_tokens + a.num_prompt_tokens for a in answers if a.step)
    running = [(a.started_s, a.finished_s) for a in answers]
    forward_s = token_s / 3  # the backward pass has twice the products
    prefill_s = union_length(spans["rollout"] + running) - union_length(running)
    scoring = [(a.finished_s, a.scored_s) for a in answers if a.scored_s is not None]
    everything = running + scoring + [i for stage in spans for i in spans[stage]]
    host_s = sum(walls) - (union_length(everything) - union_length(spans["evaluate"]))
    cluster = Cluster(
        rollout_workers=1,
        rows_per_worker=config.rollout.max_running,
        decode_s=decode_s,
        decode_row_s=decode_row_s,
        prefill_s=max(0.0, prefill_s - forward_s * num_prompt_tokens) / len(groups),
        prefill_token_s=min(forward_s, prefill_s / num_prompt_tokens),
        train_token_s=token_s,
        train_pass_s=pass_s,
        pass_tokens=config.learner.micro_batch_tokens,
        optimizer_s=optimizer_s,
        reference_token_s=union_length(spans["reference"]) / max(1, trained_tokens),
        publish_s=union_length(spans["publish"]) / len(spans["publish"]),
        reward_workers=config.reward.workers,
        host_s=max(0.0, host_s / len(walls)),
        colocated=True,
    )
    return Calibration(
        workload=workload_of(config, _answers_as_workload(groups, config)),
        cluster=cluster,
        max_lag=config.loop.max_lag,
        num_steps=len(walls),
        step_s=float(np.mean(walls)),
    )


def _passes(connection: sqlite3.Connection) -> list[Pass]:
    found = connection.execute("SELECT end_s - start_s, detail FROM spans WHERE stage = 'train' ORDER BY start_s")
    return [Pass(seconds, int(detail.split()[0]) if detail else None) for seconds, detail in found]


def _spans(connection: sqlite3.Connection) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {s: [] for s in ("rollout", "train", "reference", "publish", "evaluate")}
    for stage, start_s, end_s in connection.execute("SELECT stage, start_s, end_s FROM spans ORDER BY start_s"):
        if stage in found:
            found[stage].append((start_s, end_s))
    return found


def _by_group(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Those that came to their own end, group by group."""
    groups: defaultdict[tuple[int, int], list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.finish != FinishReason.ABORT:
            groups[answer.serial, answer.attempt].append(answer)
    return list(groups.values())


def _answers_as_workload(groups: list[list[Answer]], config: Config) -> Workload:
    service_s = service_seconds([a for group in groups for a in group], config.reward.workers)
    rewards = [np.array([service_s[a.id] for a in group if a.id in service_s]) for group in groups]
    scored = [group for group in groups if any(a.scored_s is not None for a in group)]
    barren = [group for group in scored if any(a.drop_reason == DropReason.NO_SIGNAL for a in group)]
    return Workload(
        groups_per_step=config.loop.groups_per_step,
        samples=config.rollout.samples,
        tokens=Recorded(groups=tuple(np.array([float(a.num_tokens) for a in group]) for group in groups)),
        reward_s=Recorded(groups=tuple(r for r in rewards if len(r))) if service_s else Drawn(mean=0.0),
        prompt_tokens=float(np.mean([group[0].num_prompt_tokens for group in groups])),
        no_signal_share=len(barren) / (len(scored) + 1),  # never all: the simulation would have nothing to train on
    )


def service_seconds(answers: Sequence[Answer], num_workers: int) -> dict[str, float]:
    """By id, a worker's seconds for each answer, without the wait for one; 0 for a verdict that was known already.

    Workers take answers first come, first served, so who was free when follows from when verdicts came.
    """
    free_s, found = [0.0] * num_workers, {}
    for answer in sorted(answers, key=lambda a: a.finished_s):
        if answer.scored_s is None:
            continue
        start_s = max(answer.finished_s, free_s[0])
        found[answer.id] = max(0.0, answer.scored_s - start_s)
        if answer.scored_s > start_s:
            heapq.heapreplace(free_s, answer.scored_s)
    return found


def decode_speed(
    answers: Sequence[Answer], elsewhere: list[Interval], *, like_row_s: float = 0.0
) -> tuple[float, float]:
    """Seconds of a decode step, and of each row in it: about `like_row_s`, where the answers do not tell."""
    edges, taken = _cumulative(elsewhere)
    start_s, end_s = np.array([(a.started_s, a.finished_s) for a in answers]).T
    # from here on, time is the engine's: what the device did elsewhere is taken out
    start_s, end_s = (at_s - np.interp(at_s, edges, taken) for at_s in (start_s, end_s))
    steps = np.array([a.num_tokens - 1.0 for a in answers])
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


def _cumulative(intervals: list[Interval]) -> tuple[Numbers, Numbers]:
    """Times, and how much of the intervals' union lies before each; linear between them."""
    edges, taken, reached = [0.0], [0.0], 0.0
    for start_s, end_s in sorted(intervals):
        start_s = max(start_s, reached)
        if end_s > start_s:
            edges += [start_s, end_s]
            taken += [taken[-1], taken[-1] + end_s - start_s]
            reached = end_s
    return np.array(edges), np.array(taken)


def _mean_token_s(passes: Sequence[Pass]) -> float:
    """Seconds that a token of a micro-batch took."""
    batches = [one for one in passes if one.num_tokens]
    return sum(one.seconds for one in batches) / max(1, sum(one.num_tokens or 0 for one in batches))


def training_speed(passes: Sequence[Pass], num_steps: int, *, like_pass_s: float = 0.0) -> tuple[float, float, float]:
    """Seconds of the optimizer's part of a step, of a micro-batch, and of each token in it.

    What is no micro-batch is the optimizer's. A micro-batch takes about `like_pass_s`, where they do not tell.
    """
    optimizer_s = sum(one.seconds for one in passes if one.num_tokens is None) / num_steps
    batches = [one for one in passes if one.num_tokens]
    if not batches:
        return optimizer_s, 0.0, 0.0
    columns = np.array([(1.0, float(one.num_tokens or 0)) for one in batches])
    values = np.array([one.seconds for one in batches])
    expected = min(like_pass_s * len(values) / values.sum(), 0.9)
    pass_s, token_s = _fit(
        columns, values, (expected, 1 - expected), (max(expected, 0.01), 0.5), alike=len(values) / num_steps
    )
    return optimizer_s, pass_s, token_s


def _fit(
    columns: Numbers, values: Numbers, shares: tuple[float, float], spreads: tuple[float, float], *, alike: float = 1.0
) -> tuple[float, float]:
    """The two factors, neither below zero, with which the columns come nearest to the values.

    What the values do not tell apart is shared out: before they are looked at, each factor is taken to make up its
    share of their sum, give or take its spread. So many values as are `alike` count as one: they err together.
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

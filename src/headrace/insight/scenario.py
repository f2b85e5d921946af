"""Where a simulation's numbers come from: a run's ledger, what is typed, or a model's shape and a datasheet.

The recipe says what a step consists of; the others say how long things take.

In a ledger, decoding is fitted answer by answer. While an answer ran, the engine took a decode step
for each of its tokens, and sampled a number of tokens in all. The time that took, without training
and the like, is the first times the seconds of a step plus the second times the seconds of a row.
What the loop itself did between two steps is in it.
"""

import heapq
import re
import sqlite3
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from headrace.config import Config
from headrace.errors import ConfigError, RunError
from headrace.insight.hardware import Accelerator, ModelShape
from headrace.insight.roofline import Roofline
from headrace.insight.workload import LogNormal, Machine, Recorded, Workload
from headrace.ledger.files import run_config
from headrace.ledger.journal import read_trajectories
from headrace.measured import STALL
from headrace.runs import columns as tables
from headrace.runs.columns import Columns, Intervals, Numbers, RowColumns, covered_s, reading
from headrace.types import DropReason, FinishReason

SLOW = 1.5  # times as long as others: a worker that counts as slow
_ROUNDS = 8
EPISODES_READ = 256
ROW_TOKENS = 2 / 3  # of training cost as much as a decoded row: a third of it, half as efficient
PASS_STEPS = 5  # decode steps cost about as much as a pass of the learner, before its tokens
DEFAULT_PROMPT_TOKENS = 512.0
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
Pair = tuple[float, float]
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a run consisted of, and how fast its machine was."""

    workload: Workload
    machine: Machine
    max_lag: float = 0

    def of(self, config: Config) -> "Calibration":
        """The same answers and speeds with these settings."""
        machine = replace(
            self.machine,
            rows_per_worker=config.rollout.max_running,
            pass_tokens=config.learner.micro_batch_tokens,
            reward_workers=max(1, config.reward.workers),
            reference_token_s=self.machine.reference_token_s if config.learner.kl_coef else 0.0,
        )
        # rollout.max_new_tokens is a turn's in episodes
        played = config.episode.environment or config.episode.agent
        workload = replace(
            self.workload,
            groups_per_step=config.loop.groups_per_step,
            samples=config.rollout.samples,
            first=config.buffer.first,
            max_new_tokens=config.episode.max_tokens if played else config.rollout.max_new_tokens,
            drop_overlong="overlong" in config.buffer.drop,
            no_signal_share=self.workload.no_signal_share if "no_signal" in config.buffer.drop else 0.0,
        )
        return Calibration(workload=workload, machine=machine, max_lag=config.loop.max_lag)


BLANK = Calibration(
    workload=Workload(groups_per_step=1, samples=1, tokens=LogNormal(mean=0.0)),
    machine=Machine(rollout_workers=1, rows_per_worker=1, decode_s=1.0),
)
"""Settings and speeds are still to come."""


def calibrate(run_dir: Path) -> Calibration:
    """Read a run's ledger. The run needs a step that is complete."""
    config = run_config(run_dir)
    with reading(run_dir) as connection:
        rows, spans = RowColumns(connection), tables.read_spans(connection)
        found = tables.read_trajectories(connection)
        redone = tables.one(connection, "SELECT COALESCE(SUM(redone_steps), 0) FROM restarts")
        played = bool(config.episode.environment or config.episode.agent)
        between_s, after_s = _environment_s(connection) if played else (0.0, 0.0)
    answers = found[found["num_tokens"] > 0]
    published = spans["version"][spans["stage"] == "publish"]
    if not len(rows) or not len(answers) or not len(published):
        raise RunError(f"{run_dir} has no complete step yet: there is nothing to take speeds from")
    num_steps = len(np.unique(published)) + redone  # on a cluster a version has several spans
    whole = (answers["finish"] != FinishReason.ABORT) | (answers["drop_reason"] == DropReason.LATE)
    groups, begins = tables.by_group(answers[whole])  # `begins`: first answers
    scored_s, ended_s = groups["scored_s"], groups["finished_s"] + after_s
    if played and not config.reward.function and np.isfinite(scored_s).any():  # no worker judges
        after_s, ended_s = float(np.nanmean(scored_s - groups["finished_s"])), scored_s
    service_s = service_seconds(np.fmin(ended_s, scored_s), scored_s, max(1, config.reward.workers))
    known = [part[np.isfinite(part)] for part in np.split(service_s, begins[1:])]
    rewards = tuple(part for part in known if len(part))
    scored = np.logical_or.reduceat(np.isfinite(scored_s), begins)
    barren = np.logical_or.reduceat(groups["drop_reason"] == DropReason.NO_SIGNAL, begins)
    prompt_tokens = groups["num_prompt_tokens"][begins]
    workload = replace(
        BLANK.workload,
        tokens=Recorded(groups=tuple(np.split(groups["num_tokens"], begins[1:]))),
        reward_s=Recorded(groups=rewards) if rewards else LogNormal(mean=0.0),
        environment_s=between_s + after_s,
        prompt_tokens=float(prompt_tokens.mean()),
        # never all: the simulation would have nothing to train on
        no_signal_share=float((scored & barren).sum() / (scored.sum() + 1)),
    )
    answers["finished_s"] = np.maximum(answers["started_s"], answers["finished_s"] - between_s)  # as if it ran at once
    machine = _machine(config, rows, spans, answers, prompt_tokens, num_steps)
    return Calibration(workload=workload, machine=machine).of(config)


def _environment_s(connection: sqlite3.Connection) -> Pair:
    """Mean seconds that the newest episodes waited for their environment: between turns, and after the last one."""
    newest = f"SELECT id FROM trajectories ORDER BY finished_s DESC LIMIT {EPISODES_READ}"
    found = read_trajectories(connection, f"t.id IN ({newest})", ())
    each = [[turn.environment_s for turn in t.turns] for t in found if t.turns]
    between_s, after_s = sum(sum(s[:-1]) for s in each), sum(s[-1] for s in each)
    return between_s / max(1, len(each)), after_s / max(1, len(each))


def _machine(
    config: Config, rows: RowColumns, spans: Columns, answers: Columns, prompt_tokens: Numbers, num_steps: int
) -> Machine:
    """Its speeds; `prompt_tokens` are those of each group."""

    def during(*stages: str) -> Intervals:
        its = spans[np.isin(spans["stage"], stages)]
        return its["start_s"], its["end_s"]

    apart = config.place.cluster == "ray" and config.place.layout == "disaggregated"
    workers = config.rollout.workers if apart else 1
    train = spans[spans["stage"] == "train"]
    pass_s = train["end_s"] - train["start_s"]
    told = (float(text.split()[0]) if text else np.nan for text in train["detail"].tolist())
    pass_tokens = np.fromiter(told, np.float64)  # NaN: the optimizer's part
    mean_token_s = np.nansum(pass_s[pass_tokens > 0]) / max(1.0, np.nansum(pass_tokens))
    running = answers["started_s"], answers["finished_s"]
    learner = ("train", "reference", "publish", "evaluate")
    elsewhere = during("evaluate") if apart else during(*learner)
    like_row_s = ROW_TOKENS * mean_token_s / workers
    decode_s, decode_row_s = decode_speed(running, answers["num_tokens"], elsewhere, like_row_s)
    told_apart = apart and config.rollout.engine == "embedded"  # servers tell of no bursts
    slow_share, slower = slow_workers(spans[spans["stage"] == "rollout"]) if told_apart else (0.0, 1.0)
    usual = 1 / (1 + slow_share * (slower - 1))  # what was measured is the mean of all workers
    optimizer_s, train_pass_s, token_s = training_speed(
        pass_s, pass_tokens, num_steps, like_pass_s=PASS_STEPS * decode_s
    )
    offers = spans[(spans["stage"] == "publish") & (spans["detail"] == STALL)]  # not sent yet
    offer_s = covered_s((offers["start_s"], offers["end_s"])) / num_steps if apart else 0.0
    # prefill is what the engine did while no answer ran; a forward pass is a third of training
    forward_s, num_prompt_tokens = token_s / 3, float(prompt_tokens.sum())
    prefill_s = covered_s(during("rollout"), running) - covered_s(running)
    scored = answers[np.isfinite(answers["scored_s"])]
    scoring = scored["finished_s"], scored["scored_s"]
    busy_s = covered_s(running, scoring, during("rollout", *learner))
    host_s = rows.column("wall_s").sum() - (busy_s - covered_s(during("evaluate")))
    num_tokens = answers["num_tokens"] + answers["num_prompt_tokens"]
    num_trained = float(num_tokens[np.isfinite(answers["trained_step"])].sum())
    return replace(
        BLANK.machine,
        rollout_workers=workers,
        decode_s=decode_s * usual,
        decode_row_s=decode_row_s * usual * workers,  # each of them has its part of the rows
        straggler_share=slow_share,
        straggler_factor=slower,
        prefill_s=max(0.0, prefill_s - forward_s * num_prompt_tokens) / len(prompt_tokens),
        prefill_token_s=min(forward_s, prefill_s / num_prompt_tokens),
        train_token_s=token_s,
        train_pass_s=train_pass_s,
        optimizer_s=optimizer_s + offer_s,
        reference_token_s=covered_s(during("reference")) / max(1.0, num_trained),
        publish_s=covered_s(during("publish")) / num_steps - offer_s,
        host_s=max(0.0, host_s / len(rows)),
        colocated=not apart,
    )


def slow_workers(rollout: Columns) -> Pair:
    """Share of slow workers, and how much slower they are: by the seconds of their engines' bursts."""
    seconds, names = rollout["end_s"] - rollout["start_s"], rollout["worker"]
    paces = np.sort([np.median(seconds[names == name]) for name in np.unique(names)])
    slow = paces > SLOW * (paces[(len(paces) - 1) // 4] if len(paces) else 0.0)  # against the quicker ones
    return (float(slow.mean()), float(paces[slow].mean() / paces[~slow].mean())) if slow.any() else (0.0, 1.0)


def service_seconds(finished_s: Numbers, scored_s: Numbers, num_workers: int) -> Numbers:
    """A worker's seconds for each answer, without the wait for one; 0 if the verdict was known."""
    free_s, found = [0.0] * num_workers, np.full(len(finished_s), np.nan)  # in order of arrival
    for i in np.argsort(finished_s, kind="stable"):
        if np.isnan(scored_s[i]):
            continue
        start_s = max(float(finished_s[i]), free_s[0])
        found[i] = max(0.0, scored_s[i] - start_s)
        if scored_s[i] > start_s:
            heapq.heapreplace(free_s, float(scored_s[i]))
    return found


def decode_speed(running: Intervals, num_tokens: Numbers, elsewhere: Intervals, like_row_s: float = 0.0) -> Pair:
    """Seconds of a decode step and of each row in it; `like_row_s` is what a row should take.

    `running` is when each answer ran, `elsewhere` when the device did something else.
    """
    # from here on, time is the engine's: what the device did elsewhere is taken out
    start_s, end_s = (at_s - tables.elapsed_s(at_s, elsewhere) for at_s in running)
    steps = num_tokens - 1.0
    use = (end_s > start_s) & (steps > 0)
    if not use.any():
        raise RunError("no answer has more than one token: how fast the engine decodes cannot be told")
    start_s, end_s, steps = start_s[use], end_s[use], steps[use]
    times, rows = tables.overlaps((start_s, end_s))
    step_s, row_s = 1.0, 0.0
    for _ in range(_ROUNDS):  # how many decode steps there were depends on what is looked for
        pace = np.where(rows > 0, 1 / (step_s + row_s * np.maximum(rows, 1.0)), 0.0)[:-1] * np.diff(times)
        sums = [np.concatenate([[0.0], np.cumsum(part)]) for part in (pace, pace * rows[:-1])]
        taken_steps, in_all = (np.interp(end_s, times, c) - np.interp(start_s, times, c) for c in sums)
        columns = np.stack([steps, in_all * steps / taken_steps], axis=1)
        alike = float(in_all.sum() / taken_steps.sum())  # as many as run together
        expected = min(like_row_s * columns[:, 1].sum() / (end_s - start_s).sum(), 0.9)
        step_s, row_s = _fit(columns, end_s - start_s, (1 - expected, expected), (0.5, 0.5), alike=alike)
    return step_s, row_s


def training_speed(
    seconds: Numbers, num_tokens: Numbers, num_steps: int, *, like_pass_s: float = 0.0
) -> tuple[float, float, float]:
    """Seconds of the optimizer's part of a step, of a micro-batch, and of each token in it.

    A span without tokens (NaN) is the optimizer's. If passes do not tell, one takes `like_pass_s`.
    """
    batch = num_tokens > 0
    optimizer_s = float(seconds[np.isnan(num_tokens)].sum()) / num_steps
    if not batch.any():
        return optimizer_s, 0.0, 0.0
    values = seconds[batch]
    columns = np.stack([np.ones(len(values)), num_tokens[batch]], axis=1)
    expected = min(like_pass_s * len(values) / values.sum(), 0.9)
    shares, spreads = (expected, 1 - expected), (max(expected, 0.01), 0.5)
    return optimizer_s, *_fit(columns, values, shares, spreads, alike=len(values) / num_steps)


def _fit(columns: Numbers, values: Numbers, shares: Pair, spreads: Pair, *, alike: float) -> Pair:
    """Ridge fit of two non-negative factors, with which `columns` come nearest to `values`.

    `shares` and `spreads` are the prior: the fraction of the total that each factor makes up, and
    its standard deviation. Errors are correlated over `alike` samples, so noise is scaled by it.
    """
    whole = values.sum() / columns.sum(axis=0)
    expected, certain = np.array(shares), 1 / np.array(spreads) ** 2
    scaled = columns * whole  # a factor of 1 makes up all of the sum
    best = np.linalg.lstsq(scaled, values, rcond=None)[0]
    error, size = float(np.mean((scaled @ best - values) ** 2)), float(np.mean(values**2))
    noise = max(error, 1e-12 * size) * alike
    precision = scaled.T @ scaled / noise + np.diag(certain)
    factors = np.linalg.solve(precision, scaled.T @ values / noise + certain * expected)
    if (factors < 0).any():
        kept = int(np.argmax(factors))
        factors = np.zeros(2)
        factors[kept] = values @ scaled[:, kept] / (scaled[:, kept] @ scaled[:, kept])
    step, each = (factors * whole).tolist()
    return step, each


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """Numbers that somebody typed; 0 where they said nothing."""

    mean_tokens: float = 0.0
    cv: float = 0.0
    reward_s: float = 0.0  # mean
    reward_p95_s: float = 0.0
    environment_s: float = 0.0
    prompt_tokens: float = 0.0
    decode_s: float = 0.0  # one decode step of a rollout worker with a single row
    rollout_tokens_s: float = 0.0  # a rollout worker with all its rows
    train_tokens_s: float = 0.0  # one GPU of the learner
    context_s: float = 0.0  # a token of a running row, in each decode step
    prefill_token_s: float = 0.0  # a token of a prompt, on a rollout worker
    publish_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How GPUs are shared out. One GPU, or `colocated`: rollout and learner take turns on all."""

    gpus: int = 1
    gpus_per_worker: int = 1
    rollout_share: float = 0.75
    colocated: bool = False

    @property
    def turns(self) -> bool:
        return self.colocated or self.gpus == 1

    @property
    def rollout_workers(self) -> int:
        share = 1.0 if self.turns else self.rollout_share
        return max(1, round(self.gpus * share) // self.gpus_per_worker)

    @property
    def learner_gpus(self) -> int:
        left = self.gpus if self.turns else self.gpus - self.rollout_workers * self.gpus_per_worker
        if left < 1:
            workers = f"{self.rollout_workers} rollout workers of {self.gpus_per_worker}"
            helps = "lower --rollout-share, or share them with --colocated"
            raise ConfigError(f"{self.gpus} GPUs with {workers} leave none to train; {helps}")
        return left


def scenario(config: Config, typed: Typed, layout: Layout, run: Path | None = None) -> tuple[Workload, Machine]:
    """What a recipe would do on a layout; what is typed outranks what a run's ledger says."""
    learner = layout.learner_gpus
    if run is None:
        needed = ("mean_tokens", "rollout_tokens_s", "train_tokens_s")
        unknown = [f"--{name.replace('_', '-')}" for name in needed if not getattr(typed, name)]
        if missing := ", ".join(unknown):
            asked = "how fast is the machine, and how long are the answers?"
            helps = "--from RUN to take them from a run's ledger, or --params 7B to work them out"
            raise ConfigError(f"{asked} Give {missing}, or {helps}")
    known = (BLANK if run is None else calibrate(run)).of(config)
    work, scored = known.workload, typed.reward_p95_s or typed.reward_s
    work = replace(
        work,
        tokens=LogNormal(mean=typed.mean_tokens, cv=typed.cv) if typed.mean_tokens else work.tokens,
        prompt_tokens=typed.prompt_tokens or work.prompt_tokens,
        environment_s=typed.environment_s or work.environment_s,
        reward_s=LogNormal.of_p95(typed.reward_s, typed.reward_p95_s) if scored else work.reward_s,
    )
    one = with_speeds(known.machine, typed).times(1 / learner, "train_token_s", "reference_token_s")
    return work, replace(
        one,
        publish_s=typed.publish_s or one.publish_s,
        rollout_workers=layout.rollout_workers,
        pass_tokens=one.pass_tokens * learner,
        colocated=layout.turns,
    )


def worked_out(typed: Typed, config: Config, layout: Layout, model: ModelShape, device: Accelerator) -> Typed:
    """What was typed, and the rest by the datasheet; answers half as long as they may be."""
    roofline, size = Roofline(model, device), layout.gpus_per_worker
    prompt_tokens = typed.prompt_tokens or DEFAULT_PROMPT_TOKENS
    most = BLANK.of(config).workload.max_new_tokens or config.rollout.max_new_tokens
    mean_tokens = typed.mean_tokens or most / 2
    known = speeds(roofline, config.rollout.max_running, prompt_tokens, mean_tokens, size)
    if typed.rollout_tokens_s:  # contexts and all, so the datasheet's other times do not fit
        known = replace(known, decode_s=0.0, context_s=0.0)
    if not layout.turns:
        engines, learners = layout.rollout_workers, layout.learner_gpus
        transfer = roofline.full_transfer(layout.gpus, engines, learners, size)
        known = replace(known, publish_s=roofline.sync_times(transfer).total_s)
    return replace(known, **{name: value for name, value in asdict(typed).items() if value})


def speeds(roofline: Roofline, rows: int, prompt_tokens: float, mean_tokens: float, gpus_per_worker: int) -> Typed:
    """What a device does with a model, by the datasheet: the same for `simulate` and `plan`.

    `context_s` counts the contexts of the rows, and the other decode times are without them. So a
    full step half-way through its answers takes what the datasheet says, whatever binds it.
    """
    decode_s = partial(roofline.decode_step_s, tensor_parallel=gpus_per_worker)
    half_way, alone_s = prompt_tokens + mean_tokens / 2, decode_s(1, 0.0)
    context_s = (decode_s(1, 1e6) - alone_s) / 1e6
    full_s = max(alone_s, decode_s(rows, half_way) - rows * half_way * context_s)
    return Typed(
        mean_tokens=mean_tokens,
        prompt_tokens=prompt_tokens,
        decode_s=alone_s,
        rollout_tokens_s=rows / full_s,
        context_s=context_s,
        train_tokens_s=1 / roofline.train_s(1, prompt_tokens + mean_tokens),
        prefill_token_s=roofline.forward_s(1, prompt_tokens, gpus_per_worker),
    )


def with_speeds(machine: Machine, typed: Typed) -> Machine:
    """The machine with the speeds of `typed`: of one rollout worker, and of one GPU that trains."""
    if typed.rollout_tokens_s:
        rows = machine.rows_per_worker
        full_s = rows / typed.rollout_tokens_s  # a step with every row
        alone_s = typed.decode_s or full_s
        if alone_s > full_s * (1 + 1e-9):  # rounding apart
            speed = f"{typed.rollout_tokens_s:g} tokens a second with {rows} rows"
            told = f"with a single row it cannot take longer ({alone_s:g} s)"
            raise ConfigError(f"{speed} make a decode step of {full_s:.4g} s; {told}")
        row_s = max(0.0, full_s - alone_s) / max(1, rows - 1)
        machine = replace(machine, decode_s=alone_s - row_s, decode_row_s=row_s)
        machine = replace(machine, context_s=typed.context_s, prefill_token_s=typed.prefill_token_s)
    if typed.train_tokens_s:
        machine = replace(machine, train_token_s=1 / typed.train_tokens_s, train_pass_s=0.0)
    return machine


def amount(text: str, option: str = "") -> float:
    """A number as people write it, for this option: '8k', '1.5M', '4096'."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgKMG]?)\s*", text)
    if found is None:
        raise ConfigError(f"{option} '{text}' is not a number like 4096, 8k or 1.5M".strip())
    return float(found[1]) * _SUFFIXES[found[2].lower()]


def seconds(text: str, option: str = "") -> float:
    """A time as people write it, for this option: '4s', '250ms', '2min', '1.5'."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]*)\s*", text)
    if found is None or found[2] not in _SECONDS:
        raise ConfigError(f"{option} '{text}' is not a time like 4s, 250ms or 2min".strip())
    return float(found[1]) * _SECONDS[found[2]]


def lags(text: str) -> list[float]:
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*(,\s*\d+(\.\d+)?\s*)*", text):
        raise ConfigError(f"--max-lag {text}: write one or more numbers, such as 0,0.5,1,4")
    return [float(part) if "." in part else int(part) for part in text.split(",")]

"""From a recipe and a few numbers to what a simulation is told.

The recipe says what a step consists of. How long things take comes from a run's ledger, is typed,
or is worked out from a model's shape and a device's datasheet.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.insight.calibration import BLANK, calibrate
from headrace.insight.hardware import Accelerator, ModelShape
from headrace.insight.roofline import Roofline
from headrace.insight.workload import LogNormal, Machine, Workload

DEFAULT_PROMPT_TOKENS = 512.0
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """Numbers that somebody typed; 0 where they said nothing."""

    mean_tokens: float = 0.0
    cv: float = 0.0
    reward_s: float = 0.0  # mean
    reward_p95_s: float = 0.0
    prompt_tokens: float = 0.0
    decode_s: float = 0.0  # one decode step of a rollout worker with a single row
    rollout_tokens_s: float = 0.0  # a rollout worker with all its rows
    train_tokens_s: float = 0.0  # one GPU of the learner
    context_s: float = 0.0  # a token of a running row, in each decode step
    prefill_token_s: float = 0.0  # a token of a prompt, on a rollout worker
    publish_s: float = 0.0
    straggler_share: float = 0.0  # of the rollout workers
    straggler_factor: float = 1.0  # that those are slower by
    worker_mtbf_s: float = 0.0  # mean time between failures of one rollout worker
    repair_s: float = 0.0  # until it is back


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How GPUs are shared out. One GPU, or `colocated`: rollout and learner take turns on all of them."""

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
            raise ConfigError(
                f"{self.gpus} GPUs with {self.rollout_workers} rollout workers of {self.gpus_per_worker} "
                "leave none to train; lower --rollout-share, or share them with --colocated"
            )
        return left


def scenario(config: Config, typed: Typed, layout: Layout, run: Path | None = None) -> tuple[Workload, Machine]:
    """What a recipe would do on a layout; what is typed outranks what a run's ledger says."""
    learner = layout.learner_gpus
    if run is None:
        needed = ("mean_tokens", "rollout_tokens_s", "train_tokens_s")
        unknown = [f"--{name.replace('_', '-')}" for name in needed if not getattr(typed, name)]
        if missing := ", ".join(unknown):
            raise ConfigError(
                f"how fast is the machine, and how long are the answers? Give {missing}, or --from RUN to "
                "take them from a run's ledger, or --params 7B to work them out"
            )
    known = (BLANK if run is None else calibrate(run)).of(config)
    work, one = known.workload, known.machine
    if typed.mean_tokens:
        work = replace(work, tokens=LogNormal(mean=typed.mean_tokens, cv=typed.cv))
    if typed.prompt_tokens:
        work = replace(work, prompt_tokens=typed.prompt_tokens)
    if typed.reward_p95_s or typed.reward_s:
        work = replace(work, reward_s=LogNormal.of_p95(typed.reward_s, typed.reward_p95_s))
    one = with_speeds(one, typed).times(1 / learner, "train_token_s", "reference_token_s")
    return work, replace(
        one,
        publish_s=typed.publish_s or one.publish_s,
        straggler_share=typed.straggler_share,
        straggler_factor=typed.straggler_factor,
        worker_mtbf_s=typed.worker_mtbf_s or math.inf,
        repair_s=typed.repair_s,
        rollout_workers=layout.rollout_workers,
        pass_tokens=one.pass_tokens * learner,
        colocated=layout.turns,
    )


def worked_out(typed: Typed, config: Config, layout: Layout, model: ModelShape, device: Accelerator) -> Typed:
    """What was typed, and the rest by the datasheet.

    Without `mean_tokens`, answers are taken to be half as long as they may be.
    """
    roofline, size = Roofline(model, device), layout.gpus_per_worker
    prompt_tokens = typed.prompt_tokens or DEFAULT_PROMPT_TOKENS
    mean_tokens = typed.mean_tokens or config.rollout.max_new_tokens / 2
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
    full step half-way through its answers takes what the datasheet says, whether reading or
    computing binds it.
    """

    def decode_s(batch: int, context: float = 0.0) -> float:
        return roofline.decode_step_s(batch=batch, context_tokens=context, tensor_parallel=gpus_per_worker)

    half_way, alone_s = prompt_tokens + mean_tokens / 2, decode_s(1)
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
    """The machine with the speeds of `typed`: those of one rollout worker, and of one GPU that trains."""
    if typed.rollout_tokens_s:
        rows = machine.rows_per_worker
        full_s = rows / typed.rollout_tokens_s  # a step with every row
        alone_s = typed.decode_s or full_s
        if alone_s > full_s * (1 + 1e-9):  # rounding apart
            raise ConfigError(
                f"{typed.rollout_tokens_s:g} tokens a second with {rows} rows make a decode step of "
                f"{full_s:.4g} s; with a single row it cannot take longer ({alone_s:g} s)"
            )
        row_s = max(0.0, full_s - alone_s) / max(1, rows - 1)
        machine = replace(
            machine,
            decode_s=alone_s - row_s,
            decode_row_s=row_s,
            context_s=typed.context_s,
            prefill_token_s=typed.prefill_token_s,
        )
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


def lags(text: str) -> list[int]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ConfigError(f"--max-lag {text}: write one or more whole numbers, such as 0,1,4,8")
    return [int(part) for part in text.split(",")]

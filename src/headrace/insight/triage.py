"""What holds a run back, what to change first, and what that would bring.

A run's ledger gives the machine's speeds (calibration.py). The simulator then answers two kinds of
questions with the real buffer and lag policy: how long a step would be if one stage took no time,
which names the bottleneck, and how long it would be with another setting, which ranks the moves.
What is typed by hand goes through the equation alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.insight.calibration import Calibration, calibrate
from headrace.insight.equation import BOTTLENECK_OF_STAGE, PLACEMENT_WORDS, Bottleneck, Placement, exposed, step_s
from headrace.insight.reading import Reading, read
from headrace.insight.simulator import Simulated, simulate
from headrace.insight.workload import LogNormal, has_full_engines
from headrace.measured import STAGES, StageTimes

MOVES_SHOWN = 6
LEAST_GAIN = 1.02  # of a move that is worth the trouble, and of a larger one over a smaller one
TAIL_SHARE = 0.5  # of what generation costs: if unequal lengths cost more, they are the bottleneck
STEPS = 24  # simulated
NO_TIME = 1e-9  # of what it was: a decode step takes some
ENGINE_SECONDS = ("decode_s", "decode_row_s", "context_s", "prefill_s", "prefill_token_s")  # of `Machine`
LEARNER_SECONDS = ("train_token_s", "train_pass_s", "optimizer_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Something to change, and what it would bring."""

    text: str
    settings: tuple[str, ...]  # empty: not a matter of settings
    step_s: float  # predicted
    gain: float  # goodput over that of now


@dataclass(frozen=True, slots=True, kw_only=True)
class Triage:
    """The verdict on a run."""

    reading: Reading
    bottleneck: Bottleneck
    without: dict[Bottleneck, float]  # seconds of a step if this cost nothing
    simulated_s: float  # of a step as it is
    moves: tuple[Move, ...]  # the best first


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedTriage:
    """The verdict on five numbers."""

    times: StageTimes
    placement: Placement
    step_s: dict[Placement, float]
    bottleneck: Bottleneck
    moves: tuple[Move, ...]


def triage(run_dir: Path, *, last_steps: int | None = None) -> Triage:
    known, reading = calibrate(run_dir), read(run_dir, last_steps=last_steps)
    now, without = _simulated(known), _without_each(known)
    saved = {name: now.step_s - without_s for name, without_s in without.items()}
    tail_s = saved.pop(Bottleneck.TAIL)
    bottleneck = max(saved, key=lambda name: saved[name])
    if bottleneck is Bottleneck.GENERATION and tail_s > TAIL_SHARE * saved[bottleneck]:
        bottleneck = Bottleneck.TAIL  # it is a few long answers, not the work
    return Triage(
        reading=reading,
        bottleneck=bottleneck,
        without=without,
        simulated_s=now.step_s,
        moves=_ranked(_moves(known, reading.config, now)),
    )


def triage_typed(times: StageTimes, placement: Placement) -> TypedTriage:
    """From stage times alone; every move is one number made smaller, or another placement."""
    steps_s = {other: step_s(times, other) for other in Placement}
    now_s = steps_s[placement]
    if not now_s:
        raise ConfigError("every stage takes 0 s: give at least one of them a time")
    changed_s = {
        f"{stage} in half the time": step_s(replace(times, **{stage: taken_s / 2}), placement)
        for stage in STAGES
        if (taken_s := getattr(times, stage))
    }
    changed_s |= {f"{other}: {PLACEMENT_WORDS[other]}": steps_s[other] for other in Placement}
    return TypedTriage(
        times=times,
        placement=placement,
        step_s=steps_s,
        bottleneck=BOTTLENECK_OF_STAGE[exposed(times, placement).wall],
        moves=_ranked(
            Move(text=text, settings=(), step_s=then_s, gain=now_s / then_s) for text, then_s in changed_s.items()
        ),
    )


def _simulated(known: Calibration) -> Simulated:
    return simulate(known.workload, known.machine, max_lag=known.max_lag, steps=STEPS)


def _without_each(known: Calibration) -> dict[Bottleneck, float]:
    """How long a step would be if one thing cost nothing."""
    work, machine = known.workload, known.machine
    changes: dict[Bottleneck, dict[str, Any]] = {
        Bottleneck.GENERATION: {"machine": machine.times(NO_TIME, *ENGINE_SECONDS)},
        Bottleneck.REWARD: {"workload": replace(work, reward_s=LogNormal(mean=0.0))},
        Bottleneck.LEARNER: {"machine": machine.times(0.0, *LEARNER_SECONDS, "reference_token_s")},
        Bottleneck.SYNC: {"machine": machine.times(0.0, "publish_s")},
        Bottleneck.TAIL: {"workload": replace(work, tokens=LogNormal(mean=work.tokens.mean))},
        Bottleneck.SPARSE: {"workload": replace(work, no_signal_share=0.0)},
    }
    return {name: _simulated(replace(known, **change)).step_s for name, change in changes.items()}


def _moves(known: Calibration, config: Config, now: Simulated) -> Iterator[Move]:
    """Every change that can be simulated, with what it would bring."""

    def move(text: str, settings: tuple[str, ...], changed: Calibration) -> Move:
        then = _simulated(changed)
        return Move(text=text, settings=settings, step_s=then.step_s, gain=then.goodput / now.goodput)

    for text, settings in _setting_moves(config):
        changed = config
        for key, value in (setting.split("=") for setting in settings):
            name, field = key.split(".")
            section = getattr(changed, name).model_copy(update={field: int(value)})
            changed = changed.model_copy(update={name: section})
        yield move(text, settings, known.of(changed))
    for side, names in (("rollout", ENGINE_SECONDS[:2]), ("train", LEARNER_SECONDS)):
        faster = replace(known, machine=known.machine.times(0.5, *names))
        yield move(f"{side} twice as fast (a faster device)", (), faster)


def _setting_moves(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    workers, lag = max(1, config.reward.workers), config.loop.max_lag
    for factor in (2, 4):
        yield "more processes that score", (f"reward.workers={workers * factor}",)
    for more in sorted({1, 2, 4} - set(range(lag + 1))):
        yield "let generation run ahead of training", (f"loop.max_lag={more}",)
    if has_full_engines(config):
        yield "decode more sequences at a time", (f"rollout.max_running={config.rollout.max_running * 2}",)
    fuller = config.learner.micro_batch_tokens * 4
    yield "fuller passes of the learner", (f"learner.micro_batch_tokens={fuller}",)
    if lag == 0:
        both = ("loop.max_lag=1", f"reward.workers={workers * 2}")
        yield "both more lag and more processes that score", both


def _ranked(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The best first; of like ones the smallest that is as good."""
    kept: list[Move] = []
    for move in moves:  # of the same settings the smallest comes first, and two after each alone
        changed = _keys(move)
        least = max((k.gain for k in kept if _keys(k) and _keys(k) <= changed), default=1.0) * LEAST_GAIN
        if move.gain >= (least if changed else LEAST_GAIN):
            kept = [k for k in kept if not changed or _keys(k) != changed] + [move]
    return tuple(sorted(kept, key=lambda move: (-move.gain, not move.settings))[:MOVES_SHOWN])


def _keys(move: Move) -> set[str]:
    return {setting.split("=")[0] for setting in move.settings}

"""What holds a run back, what to change first, and what that would bring.

The goodput equation says how five stage times make one step, and which of them is the bottleneck:

    goodput = B·K·L̄·useful / τstep     τstep = sum or max of τR τV τref τT τS, by what overlaps

τR rollout, τV reward, τref reference, τT train, τS publish. Where one resource does everything,
they add up. What runs on resources of its own hides behind what takes longer. A stage's time is
what it adds to its own side of the loop: a reward that is computed while other answers are still
being generated belongs in τV only as far as it comes after them. Each bottleneck has its advice,
and the systems of the field that bet on it.

A run's ledger gives the machine's speeds (scenario.py). The simulator then answers two kinds of
questions with the real buffer and lag policy: how long a step would be if one stage took no time,
which names the bottleneck, and how long it would be with another setting, which ranks the moves.
What is typed by hand goes through the equation alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from headrace.config import Config
from headrace.config_file import read_toml
from headrace.errors import ConfigError
from headrace.insight.reading import Reading
from headrace.insight.scenario import Calibration, calibrate
from headrace.insight.simulator import Simulated, simulate
from headrace.insight.workload import LogNormal
from headrace.measured import STAGES, StageTimes

MOVES_SHOWN = 6
LEAST_GAIN = 1.02  # of a move that is worth the trouble, and of a larger one over a smaller one
TAIL_SHARE = 0.5  # of what generation costs: if unequal lengths cost more, they are the bottleneck
STEPS = 24  # simulated
NO_TIME = 1e-9  # of what it was: a decode step takes some
ENGINE_SECONDS = ("decode_s", "decode_row_s", "context_s", "prefill_s", "prefill_token_s")  # of Machine
LEARNER_SECONDS = ("train_token_s", "train_pass_s", "optimizer_s")
SYMBOLS = dict(zip(STAGES, ("τR", "τV", "τref", "τT", "τS"), strict=True))


class Placement(StrEnum):
    """Which stages may run at the same time: `PLACEMENT_WORDS` says it for each."""

    COLOCATED = "colocated"
    STREAMED = "streamed"
    OVERLAPPED = "overlapped"
    ASYNCHRONOUS = "asynchronous"


class Bottleneck(StrEnum):
    """What holds a run back: a stage, by the name it has everywhere, or what no single stage is to blame for."""

    GENERATION = "rollout"
    SYNC = "publish"
    LEARNER = "train"
    REWARD = "reward"
    ENVIRONMENT = "environment"
    TAIL = "long tail"
    SPARSE = "sparse reward"
    OBSERVABILITY = "agent observability"  # of other systems: here every trajectory can be rebuilt


class Advice(NamedTuple):
    """What a bottleneck looks like and what to try, in this order. The texts are in advice.toml."""

    sign: str
    moves: list[str]


class Framework(BaseModel, frozen=True, extra="forbid"):
    """One system and the workload it was made for, as frameworks.toml has it."""

    name: str
    bottlenecks: tuple[Bottleneck, ...]  # that it attacks, the first most of all
    fits: str
    mind: str
    min_params: float = 0.0
    max_params: float = math.inf
    needs_lag: bool = False  # gains nothing for strictly on-policy training


_FILES = ("advice.toml", "words.toml", "frameworks.toml")
_ADVICE, _WORDS, _FRAMEWORKS = (read_toml(Path(__file__).with_name(file)) for file in _FILES)
ADVICE = {Bottleneck(name): Advice(**texts) for name, texts in _ADVICE.items()}
STAGE_WORDS, PLACEMENT_WORDS = _WORDS.values()
# The learner computes the reference's log-probs.
BOTTLENECK_OF_STAGE = {stage: Bottleneck("train" if stage == "reference" else stage) for stage in STAGE_WORDS}
FRAMEWORKS = [Framework(name=name, **texts) for name, texts in _FRAMEWORKS.items()]


def has_full_engines(config: Config) -> bool:
    """Whether a step has more answers than the engines decode at a time."""
    answers = config.loop.groups_per_step * config.rollout.samples * (config.loop.max_lag + 1)
    return config.rollout.max_running * config.rollout.workers < answers


# Advice that names one of these is given only where it would change something.
_USEFUL: dict[str, Callable[[Config], bool]] = {
    "rollout.max_running": has_full_engines,
    "rollout.speculate": lambda c: c.rollout.speculate == 0 and c.rollout.engine == "embedded",
    "rollout.on_wall": lambda c: c.rollout.on_wall == "cut" and c.rollout.engine == "embedded",
    "loop.max_lag=1": lambda config: config.loop.max_lag < 1,
    "loop.max_lag=2": lambda config: config.loop.max_lag < 2,
    "learner.checkpoint_activations": lambda config: config.learner.checkpoint_activations,
    "publish.encoding": lambda config: config.publish.encoding == "full",
    "place.cluster": lambda config: config.place.cluster != "local",
}


def advice_for(bottleneck: Bottleneck, config: Config) -> Advice:
    """The advice against a bottleneck that a run with these settings has not taken yet."""
    sign, moves = ADVICE[bottleneck]
    fitting = [m for m in moves if all(useful(config) for key, useful in _USEFUL.items() if key in m)]
    return Advice(sign, fitting)


def others_that_fit(bottleneck: Bottleneck, num_params: float, *, may_lag: bool) -> list[Framework]:
    """Those that were made for this bottleneck and size, the closest first."""
    sized = [f for f in FRAMEWORKS if f.min_params <= num_params <= f.max_params]
    lagging = [f for f in sized if may_lag or not f.needs_lag]
    fitting = [f for f in lagging if bottleneck in f.bottlenecks or not f.bottlenecks]
    return sorted(fitting, key=lambda f: f.bottlenecks.index(bottleneck) if f.bottlenecks else len(Bottleneck))


# Stages that follow each other; the longest of these chains is the step.
_CHAINS: dict[Placement, tuple[tuple[str, ...], ...]] = {
    Placement.COLOCATED: (STAGES,),
    Placement.STREAMED: (STAGES,),
    Placement.OVERLAPPED: (("rollout", "reward", "reference", "publish"), ("train", "publish")),
    Placement.ASYNCHRONOUS: (("rollout",), ("reward",), ("reference", "train"), ("publish",)),
}


def exposed(times: StageTimes, placement: Placement) -> StageTimes:
    """The seconds that each stage adds to the step; what hides behind the longest chain adds none.

    With no lag allowed rollout and training of one step follow each other, wherever they are: no
    answer may be sampled before the last update, and no update made before the last answer. But the
    learner may add up the gradients of finished groups while others are being generated; `simulate`
    says how much that saves. `overlapped` is generation batch by batch with the reference on its
    side, as in most systems. With more lag the slowest side sets the pace, and the sides are those
    of this system, whose learner goes on while its weights travel.
    """
    taken_s = asdict(times)
    for stage, seconds in taken_s.items():
        if not 0.0 <= seconds < math.inf:
            raise ConfigError(f"{SYMBOLS[stage]} is {seconds:g}; it must be a number of at least 0")
    longest = max(_CHAINS[placement], key=lambda chain: sum(taken_s[stage] for stage in chain))
    return StageTimes(**{stage: taken_s[stage] for stage in longest})


def step_s(times: StageTimes, placement: Placement) -> float:
    """Seconds of one step; `exposed` says how they come about."""
    return float(sum(asdict(exposed(times, placement)).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Something to change, and what it would bring."""

    text: str
    settings: tuple[str, ...]  # empty: not a matter of settings
    step_s: float  # predicted
    gain: float  # goodput over that of now


class Triage:
    """The verdict on a run."""

    def __init__(self, run_dir: Path, *, last_steps: int | None = None) -> None:
        known, self.reading = calibrate(run_dir), Reading(run_dir, last_steps=last_steps)
        now, work, machine = _simulated(known), known.workload, known.machine
        free: dict[Bottleneck, dict[str, Any]] = {  # what changes if one thing costs nothing
            Bottleneck.GENERATION: {"machine": machine.times(NO_TIME, *ENGINE_SECONDS)},
            Bottleneck.REWARD: {"workload": replace(work, reward_s=LogNormal(mean=0.0))},
            Bottleneck.ENVIRONMENT: {"workload": replace(work, environment_s=0.0)},
            Bottleneck.LEARNER: {"machine": machine.times(0.0, *LEARNER_SECONDS, "reference_token_s")},
            Bottleneck.SYNC: {"machine": machine.times(0.0, "publish_s")},
            Bottleneck.TAIL: {"workload": replace(work, tokens=LogNormal(mean=work.tokens.mean))},
            Bottleneck.SPARSE: {"workload": replace(work, no_signal_share=0.0)},
        }
        if not work.environment_s:
            del free[Bottleneck.ENVIRONMENT]
        self.simulated_s = now.step_s  # of a step as it is, and if one thing cost nothing
        self.without = {name: _simulated(replace(known, **new)).step_s for name, new in free.items()}
        saved = {name: now.step_s - without_s for name, without_s in self.without.items()}
        tail_s = saved.pop(Bottleneck.TAIL)
        self.bottleneck = max(saved, key=lambda name: saved[name])
        if self.bottleneck is Bottleneck.GENERATION and tail_s > TAIL_SHARE * max(saved.values()):
            self.bottleneck = Bottleneck.TAIL  # it is a few long answers, not the work
        self.moves = _ranked(_moves(known, self.reading.config, now))


class TypedTriage:
    """The verdict on five numbers; every move is one of them made smaller, or another placement."""

    def __init__(self, times: StageTimes, placement: Placement) -> None:
        self.times, self.placement = times, placement
        self.step_s = {other: step_s(times, other) for other in Placement}
        now_s = self.step_s[placement]
        if not now_s:
            raise ConfigError("every stage takes 0 s: give at least one of them a time")
        self.bottleneck = BOTTLENECK_OF_STAGE[exposed(times, placement).wall]
        changed_s = {
            f"{stage} in half the time": step_s(replace(times, **{stage: taken_s / 2}), placement)
            for stage in STAGES
            if (taken_s := getattr(times, stage))
        }
        changed_s |= {f"{one}: {PLACEMENT_WORDS[one]}": self.step_s[one] for one in Placement}
        moves = (Move(text=text, settings=(), step_s=s, gain=now_s / s) for text, s in changed_s.items())
        self.moves = _ranked(moves)


def _simulated(known: Calibration) -> Simulated:
    return simulate(known.workload, known.machine, max_lag=known.max_lag, steps=STEPS)


def _moves(known: Calibration, config: Config, now: Simulated) -> Iterator[Move]:
    """Every change that can be simulated, with what it would bring."""

    def move(text: str, settings: tuple[str, ...], changed: Calibration) -> Move:
        then = _simulated(changed)
        gain = then.goodput_tokens_s / now.goodput_tokens_s
        return Move(text=text, settings=settings, step_s=then.step_s, gain=gain)

    for text, settings in _setting_moves(config):
        changed = config
        for key, value in (setting.split("=") for setting in settings):
            name, field = key.split(".")
            changed = changed.but(**{name: {field: int(value)}})
        yield move(text, settings, known.of(changed))
    for side, names in (("rollout", ENGINE_SECONDS[:2]), ("train", LEARNER_SECONDS)):
        faster = replace(known, machine=known.machine.times(0.5, *names))
        yield move(f"{side} twice as fast (a faster device)", (), faster)


def _setting_moves(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    workers, lag = max(1, config.reward.workers), config.loop.max_lag
    for factor in (2, 4):
        yield "more processes that score", (f"reward.workers={workers * factor}",)
    for more in (lags for lags in (1, 2, 4) if lags > lag):
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

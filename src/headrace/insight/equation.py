"""The goodput equation: how five stage times make one step, and which of them is the bottleneck.

    goodput = B·K·L̄·useful / τstep     τstep = sum or max of τR τV τref τT τS, by what overlaps

τR rollout, τV reward, τref reference, τT train, τS publish. Where one resource does everything,
they add up. What runs on resources of its own hides behind what takes longer. A stage's time is
what it adds to its own side of the loop: a reward that is computed while other answers are still
being generated belongs in τV only as far as it comes after them.

Each bottleneck has its advice, and the systems of the field that bet on it.
"""

import math
import tomllib
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from headrace.config import Config
from headrace.errors import ConfigError
from headrace.insight.workload import has_full_engines
from headrace.measured import STAGES, StageTimes

STAGE_WORDS = {
    "rollout": "generating answers",
    "reward": "scoring answers",
    "reference": "log-probs of the reference",
    "train": "forward, backward, optimizer",
    "publish": "new weights to the engine",
}
SYMBOLS = dict(zip(STAGES, ("τR", "τV", "τref", "τT", "τS"), strict=True))


class Placement(StrEnum):
    """Which stages may run at the same time: `PLACEMENT_WORDS` says it for each."""

    COLOCATED = "colocated"
    STREAMED = "streamed"
    OVERLAPPED = "overlapped"
    ASYNCHRONOUS = "asynchronous"


PLACEMENT_WORDS = {
    Placement.COLOCATED: "one machine takes turns: every stage waits for the others",
    Placement.STREAMED: "own machines, max_lag = 0: the learner begins with the groups that are finished",
    Placement.OVERLAPPED: "own machines, max_lag = 1: the next answers are written while the learner trains",
    Placement.ASYNCHRONOUS: "own machines, as much lag as it takes: only the slowest side counts",
}


class Bottleneck(StrEnum):
    """What holds a run back: a stage, by the name it has everywhere, or what no single stage is to blame for."""

    GENERATION = "rollout"
    SYNC = "publish"
    LEARNER = "train"
    REWARD = "reward"
    TAIL = "long tail"
    SPARSE = "sparse reward"
    OBSERVABILITY = "agent observability"  # of other systems: here every trajectory can be rebuilt


_LEARNT = {"reference": "train"}  # the learner computes it
BOTTLENECK_OF_STAGE = {stage: Bottleneck(_LEARNT.get(stage, stage)) for stage in STAGES}


class Advice(NamedTuple):
    """What a bottleneck looks like and what to try, the first first. The texts are in advice.toml."""

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


def _texts(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


ADVICE = {Bottleneck(name): Advice(**texts) for name, texts in _texts("advice.toml").items()}
FRAMEWORKS = [Framework(name=name, **texts) for name, texts in _texts("frameworks.toml").items()]

# Advice that names one of these is given only where it would change something.
_USEFUL: dict[str, Callable[[Config], bool]] = {
    "rollout.max_running": has_full_engines,
    "rollout.speculate": lambda config: config.rollout.speculate == 0,
    "rollout.on_wall": lambda config: config.rollout.on_wall == "cut",
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


def others_that_fit(bottleneck: Bottleneck, *, num_params: float, may_lag: bool) -> list[Framework]:
    """Those that were made for this bottleneck and size, the closest first."""
    fitting = [
        framework
        for framework in FRAMEWORKS
        if framework.min_params <= num_params <= framework.max_params
        and (may_lag or not framework.needs_lag)
        and (bottleneck in framework.bottlenecks or not framework.bottlenecks)
    ]
    return sorted(fitting, key=lambda f: f.bottlenecks.index(bottleneck) if f.bottlenecks else len(Bottleneck))


# Stages that follow each other; the longest of these chains is the step.
_CHAINS: dict[Placement, tuple[tuple[str, ...], ...]] = {
    Placement.COLOCATED: (STAGES,),
    Placement.STREAMED: (STAGES,),
    Placement.OVERLAPPED: (("rollout", "reward", "reference", "publish"), ("train", "publish")),
    Placement.ASYNCHRONOUS: (("rollout",), ("reward",), ("reference", "train", "publish")),
}


def exposed(times: StageTimes, placement: Placement) -> StageTimes:
    """The seconds that each stage adds to the step; what hides behind other stages adds none.

    colocated       τR + τV + τref + τT + τS
    streamed        the same sum, if all groups end together; less, the more evenly they end
    overlapped      max(τR + τV + τref, τT) + τS
    asynchronous    max(τR, τV, τref + τT + τS)

    With no lag allowed a strict max is impossible: no answer may be sampled before the last update,
    and no update made before the last answer, so rollout and training of one step follow each
    other. But a gradient is a sum over groups, and the learner may add up those of finished groups
    while others are being generated; `simulate` says how much that saves. With one version of lag
    the next step's answers need not wait for the update. `overlapped` is generation batch by batch
    with the reference on its side, as in most systems. With more lag the slowest side sets the
    pace; there the sides are those of this system, whose learner computes the reference's log-probs
    and waits until its weights are published.
    """
    for stage in STAGES:
        seconds = getattr(times, stage)
        if not 0.0 <= seconds < math.inf:
            raise ConfigError(f"{SYMBOLS[stage]} is {seconds:g}; it must be a number of at least 0")
    longest = max(_CHAINS[placement], key=lambda chain: sum(getattr(times, stage) for stage in chain))
    return StageTimes(**{stage: getattr(times, stage) for stage in longest})


def step_s(times: StageTimes, placement: Placement) -> float:
    """Seconds of one step; `exposed` says how they come about."""
    shown = exposed(times, placement)
    return sum(float(getattr(shown, stage)) for stage in STAGES)


def dollars_per_million_tokens(goodput_tokens_per_s: float, dollars_per_hour: float) -> float:
    """What a million trained tokens cost where all devices together cost `dollars_per_hour`."""
    if goodput_tokens_per_s == 0.0:
        return math.inf
    return dollars_per_hour / 3600.0 / goodput_tokens_per_s * 1e6

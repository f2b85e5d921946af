"""Which system of the field fits a workload, if not this one: each bets on one bottleneck."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

from pydantic import BaseModel

from headrace.insight.equation import Bottleneck


class Framework(BaseModel, frozen=True, extra="forbid"):
    """One system and the workload it was made for, as frameworks.toml has it."""

    name: str
    bottlenecks: tuple[Bottleneck, ...]  # that it attacks, the first most of all
    fits: str
    mind: str
    min_params: float = 0.0
    max_params: float = math.inf
    needs_lag: bool = False  # gains nothing for strictly on-policy training


_TABLE = tomllib.loads(Path(__file__).with_name("frameworks.toml").read_text(encoding="utf-8"))
FRAMEWORKS = tuple(Framework(name=name, **entry) for name, entry in _TABLE.items())


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

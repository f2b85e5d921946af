"""Numbers that people type, checked with their names."""

from __future__ import annotations

import math

from headrace.errors import ConfigError


def check_above(low: float, **values: float) -> None:
    """Every value is a finite number above `low`, or the error names the first that is not."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > low):
            raise ConfigError(f"{name} is {value:g}; it must be a number above {low:g}")


def check_at_least(low: float, **values: float) -> None:
    """Every value is a finite number of at least `low`, or the error names the first that is not."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= low):
            raise ConfigError(f"{name} is {value:g}; it must be a number of at least {low:g}")


def check_share(**values: float) -> None:
    """Every value is a share of a whole, 0 to 1, or the error names the first that is not."""
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} is {value:g}; it is a share of a whole, from 0 to 1")

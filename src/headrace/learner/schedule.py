"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Literal, assert_never

ScheduleKind = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, lr: float, warmup_steps: int, schedule: ScheduleKind, total_steps: int) -> float:
    """The rate of 0-based `step`: up from lr / warmup_steps to lr, then constant or down to 0 at `total_steps`.

    The last step of a run still learns; a run continued past `total_steps` on a falling schedule does not.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    match schedule:
        case "constant":
            return lr
        case "linear":
            return lr * (1 - progress)
        case "cosine":
            return lr * 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule)

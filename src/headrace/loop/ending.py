"""How a run ends: one state, and what each end leaves behind.

    TRAINING ──► COMPLETE      all steps are done, or `loop.target_reward` is reached
             ──► INTERRUPTED   Ctrl-C or SIGTERM; an optimizer step under way is finished
             ──► FAILED        a stage raised
    any      ──► ABANDONED     cancelled from outside: at once, as by a kill

A complete run drops what is buffered or in flight. Any other run can be resumed: its buffered groups
stay, and groups in flight get another attempt.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

TARGET_STEPS = 8  # their mean reward must reach `loop.target_reward`


class State(Enum):
    """Where a run is."""

    TRAINING = auto()
    COMPLETE = auto()
    INTERRUPTED = auto()
    FAILED = auto()
    ABANDONED = auto()


class Ending:
    """The state of one run, and whether its target is reached."""

    def __init__(self, target_reward: float) -> None:
        self.state = State.TRAINING
        self.asked = False  # whether `ask` was called, even after the last step
        self.solved = False  # whether the target is reached
        self._target_reward = target_reward
        self._rewards: deque[float] = deque(maxlen=TARGET_STEPS)

    @property
    def orderly(self) -> bool:
        """Whether the run is ending and books what is left."""
        return self.state in (State.COMPLETE, State.INTERRUPTED, State.FAILED)

    def ask(self) -> None:
        """Ask the run to stop, as Ctrl-C does."""
        self.asked = True
        if self.state is State.TRAINING:
            self.state = State.INTERRUPTED

    def complete(self) -> None:
        self.state = State.COMPLETE

    def abandon(self) -> None:
        self.state = State.ABANDONED

    def begin(self) -> None:
        """A task of the run ended. If nothing else explains it, the run failed."""
        if self.state is State.TRAINING:
            self.state = State.FAILED

    def rewarded(self, reward_mean: float) -> None:
        """Note a step's mean reward; `solved` if the mean of the last steps reaches the target."""
        self._rewards.append(reward_mean)
        latest = self._rewards
        self.solved = len(latest) == latest.maxlen and sum(latest) / len(latest) >= self._target_reward

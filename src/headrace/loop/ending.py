"""How a run ends: one state, and what each end leaves behind.

    TRAINING ──► COMPLETE      all steps are done, or one of `early`'s reasons holds
             ──► INTERRUPTED   Ctrl-C, SIGTERM or SIGHUP; an optimizer step under way is finished
             ──► FAILED        a stage raised
    any      ──► ABANDONED     cancelled from outside: at once, as by a kill

A complete run drops what is buffered or in flight. Any other run can be resumed: its buffered
groups stay, and groups in flight get another attempt.
"""

import math
from collections import deque
from enum import Enum, auto

from headrace.config import LoopSection
from headrace.measured import Row

TARGET_STEPS = 8  # their mean reward must reach `loop.target_reward`


class State(Enum):
    """Where a run is."""

    TRAINING = auto()
    COMPLETE = auto()
    INTERRUPTED = auto()
    FAILED = auto()
    ABANDONED = auto()


class Ending:
    """The state of one run, and why it ends before its last step."""

    def __init__(self, section: LoopSection) -> None:
        self.state = State.TRAINING
        self.asked = False  # whether `ask` was called, even after the last step
        self.early = ""  # why no more steps are needed
        self.best_score, self.best_step = -math.inf, 0  # of the evaluations during training
        self._section = section
        self._rewards: deque[float] = deque(maxlen=TARGET_STEPS)

    @property
    def orderly(self) -> bool:
        return self.state in (State.COMPLETE, State.INTERRUPTED, State.FAILED)

    def ask(self) -> None:
        self.asked = True
        self.become(State.INTERRUPTED)

    def become(self, state: State) -> None:
        """A run that has ended did not fail, and is not interrupted any more."""
        if self.state is State.TRAINING or state in (State.COMPLETE, State.ABANDONED):
            self.state = state

    def row(self, row: Row) -> None:
        """Note a step: it may be the last that is needed, or have the best score so far."""
        latest, target = self._rewards, self._section.target_reward
        latest.append(row.reward_mean)
        if row.score is not None and row.score > self.best_score:
            self.best_score, self.best_step = row.score, row.step
        self.early = ""
        if len(latest) == latest.maxlen and sum(latest) / len(latest) >= target:
            self.early = f"the reward has reached {target:g} (loop.target_reward)"

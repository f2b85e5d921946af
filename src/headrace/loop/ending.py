"""How a run comes to its end: one state, and what each end leaves behind.

    TRAINING ──► COMPLETE      all steps are done, or the target is reached
             ──► INTERRUPTED   somebody asked it to stop (Ctrl-C, SIGTERM); an optimizer step under way is finished
             ──► FAILED        a stage raised
    any      ──► ABANDONED     cancelled from outside: at once, as by a kill

A run that is not complete can be resumed: its buffered groups wait, and a restart makes another attempt at what was in
flight. A complete one drops both, with the reason that the run ended.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

TARGET_STEPS = 8  # whose mean reward must reach `loop.target_reward`


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
        self.asked = False  # whether somebody asked the run to stop, in time or not
        self.solved = False  # whether the target is reached
        self._target_reward = target_reward
        self._rewards: deque[float] = deque(maxlen=TARGET_STEPS)

    @property
    def orderly(self) -> bool:
        """Whether the run ends and accounts for what is left."""
        return self.state in (State.COMPLETE, State.INTERRUPTED, State.FAILED)

    def ask(self) -> None:
        """Somebody wants the run to stop."""
        self.asked = True
        if self.state is State.TRAINING:
            self.state = State.INTERRUPTED

    def begin(self) -> None:
        """A stage ended: by itself, unless the steps are done or somebody asked."""
        if self.state is State.TRAINING:
            self.state = State.FAILED

    def rewarded(self, reward_mean: float) -> None:
        """A step's mean reward: `solved` says whether the latest steps are at `loop.target_reward` on average."""
        self._rewards.append(reward_mean)
        latest = self._rewards
        self.solved = len(latest) == latest.maxlen and sum(latest) / len(latest) >= self._target_reward

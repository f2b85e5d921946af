"""What the loop wires together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from headrace.buffer.buffer import Buffer
from headrace.learner.learner import Learner
from headrace.ledger.clock import StageClock
from headrace.ledger.ledger import Ledger
from headrace.loop.canary import Canary
from headrace.loop.checkpoint import Checkpoint, Checkpoints, snapshot, write_tensors
from headrace.prompts.stream import PromptStream
from headrace.reward.scorer import Scorer
from headrace.roles import Device
from headrace.rollout.rollouts import Rollouts
from headrace.types import FloatArray, Group, Item, Mismatch, StepStats, Trajectory


class Trainer(Protocol):
    """Groups in, optimizer steps out: one process, or several ranks elsewhere."""

    @property
    def uses_reference(self) -> bool:
        """Whether groups must be scored by the reference first."""
        ...

    def add(self, group: Group, references: Sequence[FloatArray] | None = None) -> list[list[Item]]:
        """Take a group into the step; returns micro-batches that are now full."""
        ...

    def rest(self) -> list[list[Item]]:
        """The step has all its groups: the remaining micro-batches."""
        ...

    def reference_logprobs(self, group: Group) -> list[FloatArray]:
        """Log-probs of the group's sampled tokens under the start weights."""
        ...

    def mismatch(self, trajectories: Sequence[Trajectory]) -> Mismatch:
        """How far the log-probs computed here are from those sampled with; trains nothing."""
        ...

    def accumulate(self, items: Sequence[Item]) -> None:
        """Forward and backward over one micro-batch."""
        ...

    def finish(self) -> StepStats:
        """The optimizer step."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """What writes a checkpoint's tensors as they are now into a directory, later, beside the training."""
        ...

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        ...

    def load_reference(self, checkpoint: Checkpoint) -> None:
        """The weights of the reference are these."""
        ...


class LocalTrainer:
    """A learner in this process, with its checkpoints."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.add, self.rest, self.accumulate = learner.add, learner.rest, learner.accumulate
        self.finish, self.reference_logprobs, self.mismatch = (
            learner.finish,
            learner.reference_logprobs,
            learner.mismatch,
        )

    @property
    def uses_reference(self) -> bool:
        """Whether groups must be scored by the reference first."""
        return self.learner.uses_reference

    def snapshot(self) -> Callable[[Path], None]:
        """Copies in the host's memory, which stay as they are while training goes on."""
        return partial(write_tensors, tensors=snapshot(self.learner.tensors()))

    def snapshot_reference(self) -> Callable[[Path], None]:
        """The same of the reference."""
        return partial(write_tensors, tensors=snapshot(self.learner.reference_tensors()))

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        checkpoint.load(self.learner.tensors())
        self.learner.loaded(checkpoint.version)

    def load_reference(self, checkpoint: Checkpoint) -> None:
        """The weights of the reference are these."""
        checkpoint.load(self.learner.reference_tensors())


class Publisher(Protocol):
    """Brings new weights to where tokens are sampled."""

    moved_bytes: int  # by the last commit

    def commit(self, version: int) -> None:
        """The learner's weights became `version`: everybody samples with them from here on, or nobody does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Everything the loop wires together, in the order a trajectory meets it."""

    prompts: PromptStream
    actor: Rollouts
    scorer: Scorer
    buffer: Buffer
    learner: Trainer
    publisher: Publisher
    canary: Canary
    ledger: Ledger
    clock: StageClock
    device: Device
    checkpoints: Checkpoints

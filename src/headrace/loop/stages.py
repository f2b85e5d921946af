"""What the loop wires together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.buffer.buffer import Buffer
from headrace.learner.learner import Learner
from headrace.ledger.clock import StageClock
from headrace.ledger.ledger import Ledger
from headrace.loop.canary import Canary
from headrace.loop.checkpoint import Checkpoints
from headrace.prompts.stream import PromptStream
from headrace.reward.scorer import Scorer
from headrace.roles import Device
from headrace.rollout.rollouts import Rollouts


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
    learner: Learner
    publisher: Publisher
    canary: Canary
    ledger: Ledger
    clock: StageClock
    device: Device
    checkpoints: Checkpoints

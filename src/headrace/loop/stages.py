"""The objects that the loop calls: one class per stage, and what serves them all."""

from dataclasses import dataclass
from typing import Any

from headrace.buffer.buffer import Buffer
from headrace.learner.ranks import Ranks
from headrace.ledger.ledger import Ledger
from headrace.loop.books import Bookkeeper
from headrace.loop.checkpoint import Checkpoints
from headrace.loop.publishing import WeightPublisher
from headrace.loop.self_check import Canary
from headrace.measured import StageClock
from headrace.prompts.stream import PromptStream
from headrace.reward.scorer import Scorer
from headrace.roles import Answers, Device
from headrace.rollout.pool import RolloutPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages, in the order in which a trajectory meets them, and what they share."""

    prompts: PromptStream
    pool: RolloutPool
    answers: Answers  # the pool, or episodes of several turns
    scorer: Scorer
    buffer: Buffer
    ranks: Ranks
    publisher: WeightPublisher
    canary: Canary
    books: Bookkeeper
    ledger: Ledger
    clock: StageClock
    device: Device
    checkpoints: Checkpoints
    tokenizer: Any
    shares_memory: bool = False  # engine caches are freed for the optimizer step

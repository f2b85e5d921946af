"""What goes into an engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.rollout.sampling import Sampling
from headrace.types import FinishReason, FloatArray, IntArray, Replay, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to make.

    Example:
        Request(id="40:train-17/3", sampling=Sampling(max_new_tokens=64), seed=81985529216486895)
    """

    id: str
    sampling: Sampling
    seed: int
    counted: bool = True  # whether its tokens enter the books; evaluation's do not


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of a request: only the sampled tokens, with where in the sequence each version sampled.

    Example:
        Generation(id="40:train-17/3", token_ids=[7, 6, 1], logprobs=[-.1, -.9, -.2],
            spans=(Span(version=7, start=5, end=8),), finish=FinishReason.EOS, started_s=3.1, finished_s=3.4)
    """

    id: str
    token_ids: IntArray
    logprobs: FloatArray
    spans: tuple[Span, ...]
    finish: FinishReason
    started_s: float
    finished_s: float
    replay: Replay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What engines did since they exist.

    Example:
        EngineCounts(computed_tokens=51200, preemptions=2, parks=0, drafted_tokens=800, accepted_tokens=610)
    """

    computed_tokens: int = 0  # of prompts and answers: as long as it grows, something moves
    preemptions: int = 0  # times a sequence had to make room
    parks: int = 0  # times one was laid aside at max_wall_s
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

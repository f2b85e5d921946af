"""What goes into an engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types import FinishReason, FloatArray, IntArray, Replay, Sampling, Span


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

"""Input and output of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types import FinishReason, FloatArray, IntArray, Replay, Sampling, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to sample.

    Example:
        Request(id="40:train-17/3", sampling=Sampling(max_new_tokens=64), seed=81985529216486895)
    """

    id: str
    sampling: Sampling
    seed: int
    counted: bool = True  # in the ledger; False for evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The sampled tokens of a request; `spans` are the positions that each version sampled.

    Example:
        Generation(id="40:train-17/3", token_ids=[7, 6, 1], logprobs=[-.1, -.9, -.2],
            spans=(Span(version=7, start=5, end=8),), finish=FinishReason.EOS,
            started_s=3.1, finished_s=3.4)
    """

    id: str
    token_ids: IntArray
    logprobs: FloatArray
    spans: tuple[Span, ...]
    finish: FinishReason
    started_s: float
    finished_s: float
    replay: Replay | None = None

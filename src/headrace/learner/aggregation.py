"""From loss terms per token to the loss of a step, the same number however the step is cut into micro-batches.

    loss = sum over micro-batches of (per_token * weights).sum(), divided by the step's normaliser

A sequence must lie in one micro-batch whole: its length, and a sequence-level ratio, are taken from the tokens at hand.
Tokens that a correction dropped still count in the lengths and in the normaliser; their term is zero.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

AggregationKind = Literal["token", "sequence", "constant"]


def weights(
    kind: AggregationKind,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    constant_length: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What each of a micro-batch's N tokens counts: 1, 1 / its sequence's length, or 1 / `constant_length`.

    `sequence_ids` int64 [N] are in 0..num_sequences-1, counted within the micro-batch.
    """
    ones = torch.ones(sequence_ids.shape, dtype=dtype, device=sequence_ids.device)
    match kind:
        case "token":
            return ones
        case "sequence":
            return ones / torch.bincount(sequence_ids, minlength=num_sequences)[sequence_ids]
        case "constant":
            return ones / constant_length
        case _:
            assert_never(kind)


def normaliser(kind: AggregationKind, num_tokens: int, num_sequences: int) -> float:
    """What the weighted sum is divided by: the tokens of the whole step, or its sequences."""
    return float(num_tokens if kind == "token" else num_sequences)

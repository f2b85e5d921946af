from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import LearnerSection
from headrace.learner.objective import LOSSES, LossInput, normaliser, weights

KINDS = get_args(LearnerSection.model_fields["aggregation"].annotation)
CONSTANT_LENGTH = 16


def step_loss(kind: str, sequences: Sequence[Tensor], micro_batches: Sequence[Sequence[int]]) -> Tensor:
    """The loss of a step whose sequences (loss terms) are distributed over micro-batches as given."""
    total = torch.zeros((), dtype=torch.float64)
    for members in micro_batches:
        lengths = torch.tensor([len(sequences[i]) for i in members])
        ids = torch.repeat_interleave(torch.arange(len(members)), lengths)
        weight = weights(kind, ids, constant_length=CONSTANT_LENGTH, dtype=torch.float64)
        total = total + (torch.cat([sequences[i] for i in members]) * weight).sum()
    return total / normaliser(kind, sum(len(s) for s in sequences), len(sequences))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", 15 / 5),  # 1 + 2 + 3 + 4 + 5 over five tokens
        ("sequence", (1.5 + 4) / 2),  # mean of (1 + 2) / 2 and (3 + 4 + 5) / 3
        ("constant", 15 / (2 * 16)),
    ],
)
def test_by_hand(kind: str, expected: float) -> None:
    sequences = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    assert step_loss(kind, sequences, [[0, 1]]).item() == pytest.approx(expected, rel=1e-15)
    assert step_loss(kind, sequences, [[1], [0]]).item() == pytest.approx(expected, rel=1e-15)


def test_weights_by_hand() -> None:
    # sequence 1 of this micro-batch sampled nothing
    ids = torch.tensor([0, 0, 2, 2, 2, 2])
    found = {kind: weights(kind, ids, constant_length=8, dtype=torch.float32) for kind in KINDS}
    assert found["token"].tolist() == [1.0] * 6
    assert found["sequence"].tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert found["constant"].tolist() == [0.125] * 6
    assert {weight.dtype for weight in found.values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_one_micro_batch_equals_many_in_value_and_gradient(kind: str, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (12,), generator=generator)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64)

    behaviour = -noise(1.0).abs()
    proximal = behaviour + noise(0.1)
    current = (proximal + noise(0.1)).requires_grad_()
    advantage = torch.repeat_interleave(torch.randn(12, generator=generator, dtype=torch.float64), lengths)

    def loss(micro_batches: Sequence[Sequence[int]]) -> Tensor:
        ranges = torch.arange(len(current)).split(lengths.tolist())
        terms: dict[int, Tensor] = {}
        for members in micro_batches:
            tokens = torch.cat([ranges[i] for i in members])
            ids = torch.repeat_interleave(torch.arange(len(members)), lengths[list(members)])
            per_token = LOSSES[name](
                LossInput(
                    current=current[tokens],
                    proximal=proximal[tokens],
                    behaviour=behaviour[tokens],
                    advantage=advantage[tokens],
                    sequence_ids=ids,
                    clip_low=0.1,
                    clip_high=0.1,
                )
            ).per_token
            terms |= dict(zip(members, per_token.split(lengths[list(members)].tolist()), strict=True))
        return step_loss(kind, [terms[i] for i in range(12)], micro_batches)

    whole = loss([range(12)])
    (whole_gradient,) = torch.autograd.grad(whole, current)
    for micro_batches in (
        [[i] for i in range(12)],
        [range(6, 12), range(6)],
        [[3, 1, 2], [0, 4, 5, 6, 7, 8], [9, 11, 10]],
    ):
        parts = loss(micro_batches)
        (gradient,) = torch.autograd.grad(parts, current)
        assert parts.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(gradient.detach(), whole_gradient, rtol=1e-12, atol=1e-14)

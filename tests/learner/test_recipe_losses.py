"""The losses of recipes/losses.py, worked out by hand on both sides of what they cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.learner.objective import LossInput
from headrace.user_code import load_function

FILE = Path(__file__).parents[2] / "recipes" / "losses.py"


def loss(name: str) -> Callable[[LossInput], Any]:
    return load_function(f"{FILE}:{name}", "learner.loss", ConfigError)


def given(ratios: list[list[float]], advantages: list[float], proximal: float = 1.0) -> LossInput:
    """Sequences of tokens with current / behaviour as said; behaviour is 0.2, and proximal so many times that."""
    flat = [ratio for sequence in ratios for ratio in sequence]
    behaviour = torch.full((len(flat),), math.log(0.2), dtype=torch.float64)
    return LossInput(
        current=(behaviour + torch.tensor(flat, dtype=torch.float64).log()).requires_grad_(),
        proximal=behaviour + math.log(proximal),
        behaviour=behaviour,
        advantage=torch.tensor([a for s, a in zip(ratios, advantages, strict=True) for _ in s], dtype=torch.float64),
        sequence_ids=torch.tensor([i for i, s in enumerate(ratios) for _ in s]),
        clip_low=0.5,
        clip_high=0.5,
    )


def gradient(name: str, x: LossInput) -> tuple[list[float], list[bool]]:
    terms = loss(name)(x)
    terms.per_token.sum().backward()
    assert isinstance(x.current.grad, Tensor)
    return x.current.grad.tolist(), terms.clipped.tolist()


def test_opsm_leaves_out_bad_answers_that_the_policy_has_left():
    # mean log-ratios of behaviour / current: ln(1/0.9) = 0.105 > 0.1; ln(1/0.95) = 0.051; the third is good
    x = given([[0.9, 0.9], [0.95], [0.7]], [-1.0, -1.0, 1.0])
    pulls, held = gradient("opsm", x)
    assert pulls == pytest.approx([0, 0, 0.95, -0.7])  # -r A inside the clip range
    assert held == [True, True, False, False]


def test_opsm_judges_the_mean_of_a_sequence():
    _, held = gradient("opsm", given([[0.7, 1.4], [0.7, 1.1]], [-1.0, -1.0]))  # drifts 0.01 and 0.13
    assert held == [False, False, True, True]


def test_topr_counts_good_answers_fully_and_bad_ones_by_their_ratio():
    x = given([[0.5, 0.5], [2.0, 1.5], [0.5, 0.8], [1.5, 1.0]], [1.0, 1.0, -1.0, -1.0])
    pulls, held = gradient("topr", x)
    assert pulls == pytest.approx([-1, -1, -1, -1, 0.4, 0.4, 1, 1])  # 0.5 x 0.8; 1.5 is cut to 1
    assert held == [False] * 6 + [True] * 2


def test_mirror_descent_has_the_gradient_of_its_objective():
    ratios, advantages = [[1.2, 0.9], [0.8]], [1.0, -0.5]
    x = given(ratios, advantages, proximal=1.1)
    pulls, _ = gradient("mirror_descent", x)
    again = given(ratios, advantages, proximal=1.1)
    moved = again.current - again.proximal
    whole = -(again.advantage * again.current).sum() + 0.05 * (moved[:2].sum() ** 2 + moved[2] ** 2)
    whole.backward()
    assert isinstance(again.current.grad, Tensor)
    assert pulls == pytest.approx(again.current.grad.tolist())

"""Sums of the mismatch between learner and behaviour log-probs, against hand-worked numbers."""

import math

import pytest
import torch
from torch import Tensor

from headrace.learner.mismatch import mismatch_of, mismatch_sums, ratio_quantile
from headrace.measured import Mismatch

INF = math.inf


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(values: list[float]) -> Tensor:
    return f64(values).log()


def mismatch(learner: Tensor, behaviour: Tensor) -> Mismatch:
    return mismatch_of(mismatch_sums(learner, behaviour))


def quantile(learner: Tensor, behaviour: Tensor, share: float) -> float:
    return ratio_quantile(mismatch_sums(learner, behaviour).tolist()[5:], share)


def test_mismatch_by_hand() -> None:
    # ratios 1, 1.2, 0.8: Σr = 3, Σr² = 1 + 1.44 + 0.64 = 3.08, two of three outside [0.9, 1.1]
    # Σ|Δ| = ln 1.2 - ln 0.8 = ln 1.5; Σk3 = Σ(r - 1) - Σ ln r = 0 - ln 0.96
    sums = mismatch(logs([0.5, 0.6, 0.4]), logs([0.5, 0.5, 0.5]))
    assert sums.count == 3
    assert sums.mean_abs == pytest.approx(math.log(1.5) / 3, rel=1e-12)
    assert sums.ratio_mean == pytest.approx(1.0, rel=1e-12)
    assert sums.ratio_outside == pytest.approx(2 / 3)
    assert sums.effective_samples == pytest.approx(9 / (3 * 3.08), rel=1e-12)
    assert sums.k3 == pytest.approx(-math.log(0.96) / 3, rel=1e-12)


def test_the_band_has_both_its_limits() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64)
    assert mismatch(logs([0.8999, 0.9001, 1.0999, 1.1001]), behaviour).ratio_outside == 2 / 4


def test_many_micro_batches_equal_one() -> None:
    generator = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(1000, generator=generator)
    learner = behaviour + 0.1 * torch.randn(1000, generator=generator)
    whole = mismatch_sums(learner, behaviour)
    parts = [mismatch_sums(a, b) for a, b in zip(learner.split(37), behaviour.split(37), strict=True)]
    total = torch.stack(parts).sum(0)
    assert total[3] == whole[3], "tokens outside the band"
    assert total[5:].equal(whole[5:]), "the histogram"
    assert total[5:].sum() == 1000
    found, expected = (mismatch_of(sums) for sums in (total, whole))
    assert found.count == expected.count == 1000
    for name in ("mean_abs", "ratio_mean", "ratio_outside", "effective_samples", "k3"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_equal_log_probs_are_no_mismatch_and_neither_is_nothing() -> None:
    same = torch.tensor([-0.3, -2.0, -1e4])
    for sums in (mismatch(same, same), Mismatch(), mismatch(same[:0], same[:0])):
        found = (sums.mean_abs, sums.ratio_mean, sums.ratio_outside, sums.effective_samples, sums.k3)
        assert found == (0.0, 1.0, 0.0, 1.0, 0.0)
        assert (sums.ratio_p01, sums.ratio_p99) == (1.0, 1.0)


def test_one_token_that_outweighs_the_rest_shows_in_the_effective_samples() -> None:
    # the broken token's Δ is clamped to 20: finite, and nearly all of the weight
    sums = mismatch(torch.full((4,), -1.0), torch.tensor([-1.0, -1.0, -1.0, -INF]))
    assert sums.effective_samples == pytest.approx(0.25, rel=1e-6)
    assert sums.mean_abs == 5.0
    assert sums.k3 == pytest.approx((math.exp(20) - 21) / 4, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_quantiles_of_the_ratio_are_known_to_a_twentieth_of_their_logarithm(scale: float, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    delta = scale * torch.randn(5000, generator=generator, dtype=torch.float64)
    found = quantile(delta, torch.zeros(5000, dtype=torch.float64), share)
    exact = delta.sort().values[math.ceil(share * 5000) - 1].item()
    assert math.log(found) == pytest.approx(exact, rel=0.045, abs=2e-7)


def test_broken_tokens_are_at_the_ends_of_the_histogram() -> None:
    learner, behaviour = f64([-1.0, -1.0, -INF, math.nan]), f64([-1.0, -INF, -1.0, -1.0])
    assert mismatch_sums(learner, behaviour)[5:].sum() == 4
    lowest, highest = (math.log(quantile(learner, behaviour, share)) for share in (0.25, 0.75))
    assert lowest == pytest.approx(-20, rel=0.045)
    assert highest == pytest.approx(20, rel=0.045)
    assert math.log(quantile(learner, behaviour, 1.0)) > highest, "what is no number counts as the largest"

"""Exact functions: the same bits in any company, the gradients of the ordinary ones, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.config import ModelSection
from headrace.errors import ModelError
from headrace.policy import exact
from headrace.policy.attention import PackedPlan
from headrace.policy.policy import Policy, load_policy


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


ROWS = (1, 2, 15, 17, 31, 64, 100, 129, 300)
LINEARS = [(48, 32), (99, 32), (64, 192), (1024, 576), (576, 1024), (192, 1024)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("columns", "width"), LINEARS)
def test_a_product_does_not_depend_on_the_other_rows(threads: int, columns: int, width: int, biased: bool):
    x, weight = noise(300, width), noise(columns, width, seed=1)
    bias = noise(columns, seed=2) if biased else None
    whole = exact.linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=1e-4, atol=1e-3)
    for n in ROWS:
        assert torch.equal(exact.linear(x[:n], weight, bias), whole[:n])
        assert torch.equal(exact.linear(x[300 - n :].clone(), weight, bias), whole[300 - n :])


def test_the_ordinary_product_does():
    """So the test above can fail."""
    x, weight = noise(300, 576), noise(1024, 576, seed=1)
    whole = F.linear(x, weight)
    assert not all(torch.equal(F.linear(x[:n], weight), whole[:n]) for n in ROWS)


@pytest.mark.parametrize("width", [8, 32, 48, 576])
def test_norm_gate_and_rotation_do_not_depend_on_the_other_rows(threads: int, width: int):
    x, y, weight = noise(1500, width) * 5, noise(1500, width, seed=1), noise(width, seed=2)
    functions: list[Callable[..., Tensor]] = [
        lambda x, y: exact.rms_norm(x, weight, 1e-6),
        exact.gated,
        lambda x, y: exact.rotate(x[:, None], y[:, None], y[:, None] + 1).squeeze(1),
    ]
    for function in functions:
        whole = function(x, y)
        for n in (1, 2, 3, 7, 33, 100, 700, 1499):
            assert torch.equal(function(x[:n], y[:n]), whole[:n])
            assert torch.equal(function(x[1500 - n :].clone(), y[1500 - n :].clone()), whole[1500 - n :])


@pytest.mark.parametrize("threads_used", [1, 2, 3, 16])
def test_every_thread_gets_whole_lanes(threads_used: int):
    for num_elements in (5, 31, 32, 33, 32_767, 32_768, 70_001, 500_000, 7_000_001):
        start = 0
        for end in exact._loops(num_elements, threads_used):
            share = -(-(end - start) // min(threads_used, -(-(end - start) // exact.GRAIN)))  # as torch divides
            assert share % exact.LANES == 0
            start = end
        assert 0 <= num_elements - start < exact.LANES


def gradients(policy: Policy, lengths: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(3, 99, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    plan = PackedPlan(lengths, policy.device)
    at = torch.tensor([i for i in range(len(ids)) if plan.positions[0, i] > 0])
    policy.model.zero_grad()
    logprobs, _ = policy.logprobs(ids, plan, at, 0.7)
    logprobs.mul(noise(len(at), seed=3)).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("architecture", ["Qwen3", "Mistral", "Qwen2"])
def test_values_and_gradients_are_the_ordinary_ones(
    make_policy: Callable[..., Policy], architecture: str, checkpointed: bool
):
    changes = {"sliding_window": 50} if architecture == "Mistral" else {}
    ordinary, exact = (make_policy(architecture, exact=e, **changes) for e in (False, True))
    if checkpointed:
        exact.checkpoint_activations()
    lengths = [70, 3, 130, 64, 9]
    (values, expected), (found_values, found) = gradients(ordinary, lengths), gradients(exact, lengths)
    torch.testing.assert_close(found_values, values, rtol=0, atol=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


def test_a_model_without_an_exact_form_is_refused(make_policy: Callable[..., Policy]):
    with pytest.raises(ModelError, match=r"model\.exact = true is for Llama, .*; Olmo2ForCausalLM has"):
        make_policy("Olmo2", exact=True)


def test_half_precision_is_refused(make_policy: Callable[..., Policy]):
    with pytest.raises(ModelError, match=r"needs model.dtype = 'float32' on a CPU .* it is 'bfloat16' on 'cpu'"):
        make_policy(exact=True, dtype=torch.bfloat16)


def test_a_machine_that_cannot_is_refused(make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exact, "QUERY_ROWS", (1,))  # products of one row have other bits
    with pytest.raises(ModelError, match=r"model\.exact = true: .* heads of size 24 .*; set model\.exact = false"):
        make_policy(exact=True, head_dim=24)


def test_the_setting_reaches_the_policy(policy: Policy, tmp_path):
    policy.save(tmp_path)
    assert load_policy(ModelSection(path=str(tmp_path), device="cpu", exact=True)).exact
    assert not load_policy(ModelSection(path=str(tmp_path), device="cpu")).exact  # auto: it costs more there


def test_a_gpu_whose_few_rows_have_other_bits_goes_without_that_kernel(monkeypatch: pytest.MonkeyPatch):
    kernels = SimpleNamespace(FEW=16)
    monkeypatch.setattr(exact, "block", kernels)
    exact.check_rows({"a product": (lambda x: x + (len(x) <= kernels.FEW), 8)}, torch.zeros(1))
    assert kernels.FEW == 0
    with pytest.raises(ModelError, match="a product of 1 tokens differs"):
        exact.check_rows({"a product": (lambda x: x + len(x), 8)}, torch.zeros(1))

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.policy import limits as of_devices
from headrace.policy import policy as of_policy
from headrace.policy.attention import PackedPlan
from headrace.policy.limits import limits
from headrace.policy.policy import Policy

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", (989e12, 4.8e12)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 2.039e12)),
        ("NVIDIA GeForce RTX 4090", (165e12, 1.008e12)),
        ("Radeon 9", (math.inf, math.inf)),
    ],
)
def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, found: tuple[float, float]):
    monkeypatch.setattr(of_devices.torch.cuda, "get_device_name", lambda device: name)
    assert limits.__wrapped__(torch.device("cuda")) == pytest.approx(found)


def test_of_a_cpu_nothing_is_known():
    assert limits(CPU) == (math.inf, math.inf)


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen3Moe", "Mixtral"])
def test_the_operations_of_a_pass_are_those_that_torch_counts(
    make_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch, architecture: str
):
    policy: Policy = make_policy(architecture)
    if policy.routers.num_layers:
        policy.model.set_experts_implementation("eager")  # torch does not count those of the others
    plan, ids = PackedPlan([40, 24], CPU), torch.arange(64) % 50
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        policy.logits(policy.hidden(ids, plan.positions, plan))
    pairs = 40 * 41 // 2 + 24 * 25 // 2
    attention = 4 * policy.num_layers * policy.num_heads * policy.head_size * pairs  # on a CPU torch does not count it
    monkeypatch.setattr(of_policy, "limits", lambda device: (1.0, 1.0))
    assert policy.pass_s(plan) == pytest.approx(counted.get_total_flops() + attention, rel=0.02)

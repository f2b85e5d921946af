from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.insight.hardware import find_device
from headrace.insight.memory_bill import actor_bill, learner_bill, most_running, reference_bill
from headrace.insight.model_shape import model_shape

H100, H200 = find_device("H100"), find_device("H200")
GIB = 2**30


def test_an_actor_by_hand():
    bill = actor_bill(model_shape("70B"), H100, num_running=100, context_tokens=1000, tensor_parallel=8)
    assert bill.weight_bytes == 17.5e9  # 2 * 70e9 / 8
    assert bill.kv_bytes == pytest.approx(4.096e9)  # 100,000 tokens of 80 * 2 * 8 * 128 * 2 = 327,680 bytes, / 8
    assert bill.fits(H100)


def test_a_learner_by_hand():
    bill = learner_bill(model_shape("70B"), H100, micro_batch_tokens=4096, num_shards=64, checkpoint_activations=True)
    assert bill.training_bytes == 17.5e9  # 16 * 70e9 / 64
    # 4,096 tokens: an input of 8,192 numbers for each of 80 layers, and 17 times as many for one, 2 bytes each
    assert bill.activation_bytes == pytest.approx(4096 * 2 * 8192 * (80 + 17))
    whole = learner_bill(model_shape("70B"), H100, micro_batch_tokens=4096, num_shards=64)
    assert whole.activation_bytes == pytest.approx(4096 * 2 * 8192 * 80 * 17)
    assert bill.fits(H100)
    assert not whole.fits(H100)


def test_a_mixture_pays_for_all_its_experts():
    # 2 * 235e9 / 8, though a token uses 22e9 of them
    assert reference_bill(model_shape("235B-A22B"), H100, num_shards=8).weight_bytes == 58.75e9
    assert learner_bill(model_shape("235B-A22B"), H100, micro_batch_tokens=0).training_bytes == 16 * 235e9


def test_stages_that_share_a_device_share_its_memory():
    model = model_shape("7B")
    actor = actor_bill(model, H100, num_running=64, context_tokens=1024)
    learner = learner_bill(model, H100, micro_batch_tokens=0, num_shards=8)
    # 14e9 + 64 * 1,024 * 57,344 + 14e9
    assert (actor + learner).total_bytes == pytest.approx(14e9 + 3.758e9 + 14e9, rel=1e-4)


def test_sequences_that_fit_by_hand():
    # 0.9 * 80e9 - 17.5e9 = 54.5e9 on each of 8, and 4,096 * 327,680 = 1.342e9 a sequence: 436e9 / 1.342e9 = 324.8
    assert most_running(model_shape("70B"), H100, context_tokens=4096, tensor_parallel=8) == 324


def test_a_model_that_does_not_fit_is_explained():
    with pytest.raises(ConfigError, match=r"70B does not fit 1 x H100 .* 140.0 GB per device .* 90% of 80 GB"):
        most_running(model_shape("70B"), H100, context_tokens=4096)


@pytest.mark.parametrize(
    ("size", "checkpointed", "measured_gib", "tolerance"),
    [  # docs/results/gpu.md: 16 x 1,024 tokens in one micro-batch, on one H200
        ("0.6B", False, 33.0, 0.1),
        ("1.7B", False, 59.4, 0.1),
        ("1.7B", True, 31.4, 0.15),
    ],
)
def test_training_takes_about_the_memory_that_was_measured(
    size: str, checkpointed: bool, measured_gib: float, tolerance: float
):
    bill = learner_bill(model_shape(size), H200, micro_batch_tokens=16 * 1024, checkpoint_activations=checkpointed)
    assert bill.total_bytes / GIB == pytest.approx(measured_gib, rel=tolerance)

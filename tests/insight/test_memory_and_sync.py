from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace.insight.hardware import find_device, model_shape
from headrace.insight.roofline import Roofline, SyncTimes, Transfer

H100, H200 = find_device("H100"), find_device("H200")
GIB = 2**30


def test_an_actor_by_hand():
    bill = Roofline(model_shape("70B"), H100).actor_bill(num_running=100, context_tokens=1000, tensor_parallel=8)
    assert bill.weight_bytes == 17.5e9  # 2 * 70e9 / 8
    assert bill.kv_bytes == pytest.approx(4.096e9)  # 100,000 tokens of 80 * 2 * 8 * 128 * 2 = 327,680 bytes, / 8
    assert bill.fits(H100)


def test_a_learner_by_hand():
    bill = Roofline(model_shape("70B"), H100).learner_bill(
        micro_batch_tokens=4096, num_shards=64, checkpoint_activations=True
    )
    # 16 * 70e9 / 64, and of 3 of 80 layers 2 bytes for each weight
    assert bill.training_bytes == pytest.approx(17.5e9 + 3 * 2 * 70e9 / 80)
    # 4,096 tokens: an input of 8,192 numbers for each of 80 layers, and 17 times as many for one, 2 bytes each
    assert bill.activation_bytes == pytest.approx(4096 * 2 * 8192 * (80 + 17))
    whole = Roofline(model_shape("70B"), H100).learner_bill(micro_batch_tokens=4096, num_shards=64)
    assert whole.activation_bytes == pytest.approx(4096 * 2 * 8192 * 80 * 17)
    assert bill.fits(H100)
    assert not whole.fits(H100)


def test_a_mixture_pays_for_all_its_experts():
    # 2 * 235e9 / 8, though a token uses 22e9 of them
    assert Roofline(model_shape("235B-A22B"), H100).actor_bill(0, 0, tensor_parallel=8).weight_bytes == 58.75e9
    assert Roofline(model_shape("235B-A22B"), H100).learner_bill(micro_batch_tokens=0).training_bytes == 16 * 235e9


def test_stages_that_share_a_device_share_its_memory():
    model = model_shape("7B")
    actor = Roofline(model, H100).actor_bill(num_running=64, context_tokens=1024)
    learner = Roofline(model, H100).learner_bill(micro_batch_tokens=0, num_shards=8)
    # 14e9 + 64 * 1,024 * 57,344 + 14e9, and three whole layers of 28
    assert (actor + learner).total_bytes == pytest.approx(14e9 + 3.758e9 + 14e9 + 1.5e9, rel=1e-4)


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
    bill = Roofline(model_shape(size), H200).learner_bill(
        micro_batch_tokens=16 * 1024, checkpoint_activations=checkpointed
    )
    assert bill.total_bytes / GIB == pytest.approx(measured_gib, rel=tolerance)


# ---- publishing

# an H100 has 450 GB/s to its neighbours, 50 GB/s to other nodes, 3,350 GB/s to its memory
LARGE = Roofline(model_shape("70B"), H100)


@pytest.mark.parametrize(
    ("size", "transfer", "gigabytes"),
    [
        ("70B", Transfer(), 140),  # 2 bytes a weight
        ("405B", Transfer(), 810),
        ("70B", Transfer(encoding="delta", changed_share=0.02), 2.94),  # 1.4e9 weights of 2.1 bytes
        # 80 layers, rank 16, 2 bytes: inputs and outputs of queries and output 2 * (8,192 + 8,192), of keys and values
        # 2 * (8,192 + 1,024), together 51,200
        ("70B", Transfer(encoding="adapter", adapter_rank=16), 80 * 16 * 2 * 51_200 / 1e9),
    ],
)
def test_bytes_of_one_copy_by_hand(size: str, transfer: Transfer, gigabytes: float):
    assert Roofline(model_shape(size), H100).payload_bytes(transfer) / 1e9 == pytest.approx(gigabytes)


@pytest.mark.parametrize(
    ("transfer", "seconds"),
    [
        (Transfer(), 2.8),  # 140 GB at 50 GB/s
        (Transfer(num_copies=8), 22.4),
        (Transfer(same_node=True), 140 / 450),
        (Transfer(num_copies=8, num_learners=8, num_senders=8), 2.8),  # eight network cards
        (Transfer(num_copies=8, relay=True), 22.4),  # who passes on only whole copies wins nothing
        (Transfer(num_copies=8, relay=True, bucket_bytes=0.5e9), 2.87),  # 140 GB, and 7 buckets of 0.5 GB
    ],
)
def test_broadcast_by_hand(transfer: Transfer, seconds: float):
    assert LARGE.sync_times(transfer).broadcast_s == pytest.approx(seconds)


def test_gather_by_hand():
    # the sender lacks 7/8 of 140 GB, at 450 GB/s; where everybody sends its own part, nothing is gathered
    assert LARGE.sync_times(Transfer(num_learners=8)).gather_s == pytest.approx(122.5 / 450)
    assert LARGE.sync_times(Transfer(num_learners=8, num_senders=8)).gather_s == 0.0
    # two senders need 70 GB each and have 17.5
    assert LARGE.sync_times(Transfer(num_learners=8, num_senders=2)).gather_s == pytest.approx(52.5 / 450)


def test_cast_by_hand():
    assert LARGE.sync_times(Transfer(num_learners=8)).cast_s == 0.0
    # a delta reads old and new weights and writes 2.94 GB
    delta = Transfer(num_learners=8, encoding="delta")
    assert LARGE.sync_times(delta).cast_s == pytest.approx(282.94 / 8 / 3350)


def test_reshard_by_hand():
    # 7/8 of 140 GB go on to the other devices, and each reads and writes its 17.5 GB
    times = LARGE.sync_times(Transfer(tensor_parallel=8))
    assert times.reshard_s == pytest.approx(122.5 / 450 + 35 / 3350)


def test_buckets_let_the_four_run_at_once():
    parts = {"gather_s": 2.0, "cast_s": 1.0, "broadcast_s": 5.0, "reshard_s": 2.0}
    assert SyncTimes(**parts).total_s == 10.0
    assert SyncTimes(**parts, num_buckets=10).total_s == 5.5  # 5, and a tenth of 2 + 1 + 2


def test_bucketing_by_hand():
    transfer = Transfer(num_learners=8, tensor_parallel=8, bucket_bytes=0.5e9)
    times = LARGE.sync_times(transfer)
    assert times.num_buckets == 280  # 140 / 0.5
    assert times.total_s == pytest.approx(2.8 + (122.5 / 450 + 122.5 / 450 + 35 / 3350) / 280)


def test_a_share_above_one_is_refused():
    with pytest.raises(ValidationError, match="changed_share"):
        Transfer(changed_share=1.5)
    with pytest.raises(ValidationError, match="num_copies"):
        Transfer(num_copies=0)

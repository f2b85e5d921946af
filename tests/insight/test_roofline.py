from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace.insight.hardware import Accelerator, ModelShape, find_device, model_shape
from headrace.insight.roofline import Roofline

ROUND = Accelerator(
    name="round",
    memory_bytes=1e12,
    memory_bytes_per_s=1e12,
    flops_per_s=1e14,
    link_bytes_per_s=1e11,
    network_bytes_per_s=1e10,
    dollars_per_hour=1.0,
)
MODEL = ModelShape(
    name="1B",
    num_params=1e9,
    num_active_params=1e9,
    num_layers=10,
    hidden_size=1000,
    attention_size=1000,
    kv_size=1000,  # 2 * 10 * 1,000 = 20,000 bytes a token
)
IDEAL = {"bandwidth": 1.0, "layer_overhead_s": 0.0, "mfu": 1.0}


@pytest.mark.parametrize(
    ("batch", "context", "tensor_parallel", "efficiency", "milliseconds"),
    [
        (10, 1000, 1, IDEAL, 2.2),  # 2e9 bytes of weights and 10 * 1,000 * 20,000 of cache at 1e12
        (10, 1000, 2, IDEAL, 1.1),
        (10, 1000, 1, IDEAL | {"bandwidth": 0.5}, 4.4),
        (10, 1000, 1, IDEAL | {"layer_overhead_s": 1e-4}, 3.2),  # and 10 layers of 0.1 ms
        (10_000, 0, 1, IDEAL, 200.0),  # 2 * 1e9 * 10,000 operations at 1e14: more than reading the weights
    ],
)
def test_a_decode_step_by_hand(
    batch: int, context: int, tensor_parallel: int, efficiency: dict[str, float], milliseconds: float
):
    one = Roofline(MODEL, ROUND, **efficiency)
    seconds = one.decode_step_s(batch=batch, context_tokens=context, tensor_parallel=tensor_parallel)
    assert seconds * 1e3 == pytest.approx(milliseconds)


def test_a_mixture_decodes_one_sequence_at_its_active_size():
    roofline = Roofline(model_shape("30B-A3B"), ROUND, **IDEAL)
    one = roofline.decode_step_s(batch=1, context_tokens=0)
    many = roofline.decode_step_s(batch=1000, context_tokens=0)
    assert one == pytest.approx(2 * 3e9 / 1e12)
    assert many == pytest.approx(2 * 30e9 / 1e12)  # all experts, and 2 * 3e9 * 1,000 operations take as long


def test_forward_and_training_by_hand():
    # a token: 2 * 1e9 + 2 * 10 layers * 1,000 * 1,000 = 2.02e9 operations forward, three times that with backward
    ideal, half = Roofline(MODEL, ROUND, **IDEAL), Roofline(MODEL, ROUND, mfu=0.5)
    work = {"num_tokens": 1e6, "sequence_tokens": 1000}
    assert ideal.forward_s(**work) == pytest.approx(20.2)
    assert ideal.train_s(**work) == pytest.approx(60.6)
    assert ideal.train_s(num_devices=4, **work) == pytest.approx(15.15)
    assert half.train_s(**work) == pytest.approx(121.2)


@pytest.mark.parametrize(
    ("size", "measured_ms"),
    [("0.6B", 9.01), ("1.7B", 9.80)],  # docs/results/engine.json: 256 sequences at a context of 1,050.5
)
def test_a_decode_step_takes_what_was_measured(size: str, measured_ms: float):
    roofline = Roofline(model_shape(size), find_device("H200"))
    seconds = roofline.decode_step_s(batch=256, context_tokens=1050.5)
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_training_takes_what_was_measured():
    # docs/results/grpo.json: 512 answers of 512 tokens to prompts of 128, 2.56 s; MFU 0.46 is that of learner.json
    roofline = Roofline(model_shape("0.6B"), find_device("H200"), mfu=0.46)
    seconds = roofline.train_s(num_tokens=512 * 640, sequence_tokens=640)
    assert seconds == pytest.approx(2.56, rel=0.1)


def test_no_efficiency_is_refused():
    with pytest.raises(ValidationError, match="mfu"):
        Roofline(MODEL, ROUND, mfu=0.0)

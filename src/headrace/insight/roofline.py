"""How long a device takes, from the bytes it must move and the products it must compute.

A decode step reads every weight once and every running sequence's cache once, for one token each: it is bound by
bandwidth, and a batch shares the reading of the weights. Prefill, reference and training handle many tokens per weight
they read, and are bound by computing: 2 operations per token and weight forward, 6 forward and backward, and attention
on top of it, which grows with the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.insight.checks import check_above, check_at_least
from headrace.insight.hardware import Device
from headrace.insight.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What is reached of a device's datasheet.

    The defaults for decoding are those of Headrace's engine on one H200 with models of 28 layers (docs/results/gpu.md).
    Its learner reached an MFU of 0.46 and 0.55 there; spread over many GPUs 0.35 to 0.45 is usual.

    Example:
        Efficiency(bandwidth=0.7, mfu=0.5)
    """

    bandwidth: float = 0.84  # of the memory's, while decoding
    layer_overhead_s: float = 38e-6  # of a decode step, whatever its batch: launches, small kernels, waiting
    mfu: float = 0.4  # of the matrix products'

    def __post_init__(self) -> None:
        check_above(0.0, bandwidth=self.bandwidth, mfu=self.mfu)
        check_at_least(0.0, layer_overhead_s=self.layer_overhead_s)


MEASURED = Efficiency()


def decode_step_s(
    model: ModelShape,
    device: Device,
    *,
    batch: float,
    context_tokens: float,
    tensor_parallel: int = 1,
    efficiency: Efficiency = MEASURED,
) -> float:
    """One token for each of `batch` sequences of that mean length, on an engine of `tensor_parallel` devices."""
    read_bytes = model.params_read(batch) * device.number_bytes
    read_bytes += batch * context_tokens * model.kv_bytes_per_token(device.number_bytes)
    read_s = read_bytes / (device.memory_bytes_per_s * efficiency.bandwidth)
    compute_s = 2 * model.num_active_params * batch / (device.flops_per_s * efficiency.mfu)
    return max(read_s, compute_s) / tensor_parallel + model.num_layers * efficiency.layer_overhead_s


def forward_flops(model: ModelShape, *, num_tokens: float, sequence_tokens: float) -> float:
    """Of `num_tokens` in sequences of that length: a token attends to half of its sequence on average."""
    return num_tokens * (2 * model.num_active_params + 2 * model.num_layers * model.attention_size * sequence_tokens)


def train_flops(model: ModelShape, *, num_tokens: float, sequence_tokens: float) -> float:
    """Forward and backward; what is computed again to save memory is not counted, as is the custom for MFU."""
    return 3 * forward_flops(model, num_tokens=num_tokens, sequence_tokens=sequence_tokens)


def forward_s(
    model: ModelShape,
    device: Device,
    *,
    num_tokens: float,
    sequence_tokens: float,
    num_devices: int = 1,
    efficiency: Efficiency = MEASURED,
) -> float:
    """Prefill, or the reference's log-probs."""
    check_at_least(1, num_devices=num_devices)
    flops = forward_flops(model, num_tokens=num_tokens, sequence_tokens=sequence_tokens)
    return flops / (num_devices * device.flops_per_s * efficiency.mfu)


def train_s(
    model: ModelShape,
    device: Device,
    *,
    num_tokens: float,
    sequence_tokens: float,
    num_devices: int = 1,
    efficiency: Efficiency = MEASURED,
) -> float:
    """One optimizer step on `num_tokens`, prompts included."""
    check_at_least(1, num_devices=num_devices)
    flops = train_flops(model, num_tokens=num_tokens, sequence_tokens=sequence_tokens)
    return flops / (num_devices * device.flops_per_s * efficiency.mfu)

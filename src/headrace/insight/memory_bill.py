"""Where a device's memory goes: N weights take 2N bytes to decode with, 16N to train, and a cache grows by the token.

Training state per weight: 2 bytes for itself, 2 for its gradient and 12 for the optimizer (a float32 copy and the two
averages of AdamW). Training all in float32 needs no copy and comes to 16 as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.insight.checks import check_above, check_at_least, check_share
from headrace.insight.hardware import Device
from headrace.insight.model_shape import ModelShape

TRAINING_BYTES_PER_PARAM = 16
LAYER_NUMBERS = 17
"""Numbers that a layer keeps of each token for its backward pass, in multiples of its width: norms, projections,
attention and the feed-forward part, without the attention matrix itself, which kernels compute again. A rule of thumb:
of the memory that training took on one H200 (docs/results/gpu.md) it accounts for 90 to 95%, with
`learner.checkpoint_activations` for 70 to 90%."""

USABLE_SHARE = 0.9
"""Of a device's memory: the rest is for buffers, fragments and the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBill:
    """Bytes on one device, by what they are for. Bills of stages that share a device add up.

    Example:
        MemoryBill(weight_bytes=17.5e9, kv_bytes=40e9)
    """

    weight_bytes: float = 0.0  # to decode or score with
    training_bytes: float = 0.0  # weights, gradients, optimizer
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.weight_bytes + self.training_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: MemoryBill) -> MemoryBill:
        return MemoryBill(
            weight_bytes=self.weight_bytes + other.weight_bytes,
            training_bytes=self.training_bytes + other.training_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            activation_bytes=self.activation_bytes + other.activation_bytes,
        )

    def fits(self, device: Device, usable_share: float = USABLE_SHARE) -> bool:
        """Whether one device can hold it."""
        return self.total_bytes <= usable_share * device.memory_bytes


def actor_bill(
    model: ModelShape, device: Device, *, num_running: float, context_tokens: float, tensor_parallel: int = 1
) -> MemoryBill:
    """One of the `tensor_parallel` devices of an engine that runs so many sequences of that length."""
    check_at_least(1, tensor_parallel=tensor_parallel)
    check_at_least(0, num_running=num_running, context_tokens=context_tokens)
    kv_bytes = num_running * context_tokens * model.kv_bytes_per_token(device.number_bytes)
    return MemoryBill(
        weight_bytes=model.weight_bytes(device.number_bytes) / tensor_parallel, kv_bytes=kv_bytes / tensor_parallel
    )


def learner_bill(
    model: ModelShape,
    device: Device,
    *,
    micro_batch_tokens: float,
    num_shards: int = 1,
    checkpoint_activations: bool = False,
) -> MemoryBill:
    """One of the `num_shards` devices that the training state is spread over; each has micro-batches of its own.

    With `checkpoint_activations` only every layer's input is kept, and one layer at a time is computed again.
    """
    check_at_least(1, num_shards=num_shards)
    check_at_least(0, micro_batch_tokens=micro_batch_tokens)
    width_bytes = device.number_bytes * (model.hidden_size + model.attention_size) / 2
    layers_bytes = width_bytes * model.num_layers * LAYER_NUMBERS
    if checkpoint_activations:
        layers_bytes = device.number_bytes * model.hidden_size * model.num_layers + width_bytes * LAYER_NUMBERS
    return MemoryBill(
        training_bytes=TRAINING_BYTES_PER_PARAM * model.num_params / num_shards,
        activation_bytes=micro_batch_tokens * layers_bytes,
    )


def reference_bill(model: ModelShape, device: Device, *, num_shards: int = 1) -> MemoryBill:
    """One of the devices that a frozen copy of the policy is spread over."""
    check_at_least(1, num_shards=num_shards)
    return MemoryBill(weight_bytes=model.weight_bytes(device.number_bytes) / num_shards)


def most_running(
    model: ModelShape,
    device: Device,
    *,
    context_tokens: float,
    tensor_parallel: int = 1,
    usable_share: float = USABLE_SHARE,
) -> int:
    """Sequences of that length whose cache fits an engine beside the weights; an error if not even one does."""
    check_above(0, context_tokens=context_tokens)
    check_share(usable_share=usable_share)
    weights = actor_bill(model, device, num_running=0, context_tokens=0, tensor_parallel=tensor_parallel)
    free_bytes = (usable_share * device.memory_bytes - weights.total_bytes) * tensor_parallel
    num_running = math.floor(free_bytes / (context_tokens * model.kv_bytes_per_token(device.number_bytes)))
    if num_running < 1:
        raise ConfigError(
            f"{model.name} does not fit {tensor_parallel} x {device.name} for decoding: weights of "
            f"{weights.total_bytes / 1e9:.1f} GB per device and a sequence of {context_tokens:,.0f} tokens, in "
            f"{usable_share:.0%} of {device.memory_bytes / 1e9:.0f} GB"
        )
    return num_running

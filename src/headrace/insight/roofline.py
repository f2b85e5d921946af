"""How long a device takes, how much memory a stage needs, and how long new weights travel.

A decode step reads every weight and every running sequence's cache once, for one token each: it is
bound by bandwidth, and a batch shares the reading of the weights. Prefill, reference and training
handle many tokens per weight they read, and are bound by computing: 2 operations per token and
weight forward, 6 forward and backward, and attention on top of it, which grows with the context.

Memory: N weights take 2N bytes to decode with, 16N to train, and a cache grows by the token.
Training state per weight is 2 bytes for itself, 2 for its gradient and 12 for the optimizer (a
float32 copy and the two averages of AdamW). All in float32 it needs no copy and is 16 as well.

A new version reaches the engines in four operations, each bytes x copies / bandwidth:

    gather      shards become whole tensors where they are sent from      links of a node
    cast        to what has changed, if only that is sent                 memory
    broadcast   a copy for every engine                                   network
    reshard     into the engine's own layout                              links and memory

In buckets the four run at the same time, and the slowest sets the pace. With a relay the learner
sends once, and engines pass buckets on.
"""

import math
from dataclasses import astuple, dataclass
from operator import add
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked

from headrace.insight.hardware import Accelerator, ModelShape

TRAINING_BYTES_PER_PARAM = 16
USABLE_SHARE = 0.9  # of a device's memory: the rest is for buffers, fragments and the driver
CHANGED_SHARE = 0.02  # of bfloat16 weights in a step, as others found at learning rates near 3e-6
CHANGED_BYTES = 2.1  # of a changed weight with its place: 2.0 if 4% changed, 2.1 at 2%, 2.25 at 1%
BUCKET_BYTES = 512e6
SENDERS = 8  # of the learner's devices, at most
LAYERS_WHOLE = 3  # on each device that has a part: weights of two layers, gradients of one
LAYER_NUMBERS = 17
"""Numbers that a layer keeps of each token for its backward pass, in multiples of its width: norms,
projections, attention and the feed-forward part, without the attention matrix itself, which kernels
compute again. A rule of thumb: of the memory that training took on one H200 (docs/results/gpu.md)
it accounts for 90 to 95%, with `learner.checkpoint_activations` for 70 to 90%."""


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """Bytes on one device, by what they are for. Bills of stages that share a device add up."""

    weight_bytes: float = 0.0  # to decode or score with
    training_bytes: float = 0.0  # weights, gradients, optimizer
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.training_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: "MemoryBill") -> "MemoryBill":
        return MemoryBill(*map(add, astuple(self), astuple(other)))

    def fits(self, device: Accelerator) -> bool:
        return self.total_bytes <= USABLE_SHARE * device.memory_bytes


@checked(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How weights travel."""

    num_copies: PositiveInt = 1  # engines that need them
    num_learners: PositiveInt = 1  # devices that hold a part each
    num_senders: PositiveInt = 1  # of these, those that send, each its part of every copy
    tensor_parallel: PositiveInt = 1  # devices of an engine
    # as publish.encoding: all weights, those that changed with their places, or low-rank matrices
    encoding: Literal["full", "delta", "adapter"] = "full"
    changed_share: Annotated[float, Field(ge=0, le=1)] = CHANGED_SHARE  # with delta
    adapter_rank: PositiveInt = 16  # with adapter, on the attention's four matrices
    bucket_bytes: PositiveFloat | None = None  # None: everything at once
    relay: bool = False  # engines pass on what they receive
    same_node: bool = False  # learner and engines are linked, and need no network


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimes:
    """Seconds of the four operations, and what they come to."""

    gather_s: float
    cast_s: float
    broadcast_s: float
    reshard_s: float
    num_buckets: int = 1

    @property
    def total_s(self) -> float:
        """A pipeline takes its slowest part, and one bucket's time in the others."""
        parts = (self.gather_s, self.cast_s, self.broadcast_s, self.reshard_s)
        return max(parts) + (sum(parts) - max(parts)) / self.num_buckets


@checked(frozen=True, slots=True)
class Roofline:
    """What a model takes on a device: seconds, bytes, and the way of new weights to the engines.

    What is reached of the datasheet while decoding is what Headrace's engine reached on one H200
    with models of 28 layers (docs/results/gpu.md). Its learner had an MFU of 0.46 and 0.55 there;
    spread over many GPUs 0.35 to 0.45 is usual.
    """

    model: ModelShape
    device: Accelerator
    bandwidth: PositiveFloat = 0.84  # of the memory's, while decoding
    layer_overhead_s: NonNegativeFloat = 38e-6  # of any decode step: launches, small kernels
    mfu: PositiveFloat = 0.4  # of the matrix products'

    @property
    def weight_bytes(self) -> float:
        return self.device.number_bytes * self.model.num_params

    @property
    def kv_bytes(self) -> float:
        return self.device.number_bytes * self.model.num_layers * self.model.kv_size

    def decode_step_s(self, batch: float, context_tokens: float, tensor_parallel: int = 1) -> float:
        """One token for each of `batch` sequences, on an engine of `tensor_parallel` devices."""
        model, device = self.model, self.device
        read_bytes = model.params_read(batch) * device.number_bytes
        read_bytes += batch * context_tokens * self.kv_bytes
        read_s = read_bytes / (device.memory_bytes_per_s * self.bandwidth)
        compute_s = 2 * model.num_active_params * batch / (device.flops_per_s * self.mfu)
        return max(read_s, compute_s) / tensor_parallel + model.num_layers * self.layer_overhead_s

    def forward_s(self, num_tokens: float, sequence_tokens: float, num_devices: int = 1) -> float:
        """Prefill, or the reference's log-probs. A token attends to half of its sequence."""
        model = self.model
        attention = 2 * model.num_layers * model.attention_size * sequence_tokens
        flops = num_tokens * (2 * model.num_active_params + attention)
        return flops / (num_devices * self.device.flops_per_s * self.mfu)

    def train_s(self, num_tokens: float, sequence_tokens: float, num_devices: int = 1) -> float:
        """Forward and backward, on prompts too; recomputing to save memory is not counted."""
        return 3 * self.forward_s(num_tokens, sequence_tokens, num_devices)

    def actor_bill(self, num_running: float, context_tokens: float, tensor_parallel: int = 1) -> MemoryBill:
        """One of the `tensor_parallel` devices of an engine that runs `num_running` sequences."""
        cached = num_running * context_tokens * self.kv_bytes / tensor_parallel
        return MemoryBill(weight_bytes=self.weight_bytes / tensor_parallel, kv_bytes=cached)

    def learner_bill(
        self, micro_batch_tokens: float, num_shards: int = 1, *, checkpoint_activations: bool = False
    ) -> MemoryBill:
        """One of the `num_shards` devices that share the training state; each has its micro-batch.

        `checkpoint_activations` keeps every layer's input, and one layer at a time is recomputed.
        """
        model, number_bytes = self.model, self.device.number_bytes
        layer_bytes = number_bytes * (model.hidden_size + model.attention_size) / 2 * LAYER_NUMBERS
        layers_bytes = layer_bytes * model.num_layers
        whole_bytes = LAYERS_WHOLE * number_bytes / model.num_layers if num_shards > 1 else 0.0
        if checkpoint_activations:
            layers_bytes = number_bytes * model.hidden_size * model.num_layers + layer_bytes
        return MemoryBill(
            training_bytes=(TRAINING_BYTES_PER_PARAM / num_shards + whole_bytes) * model.num_params,
            activation_bytes=micro_batch_tokens * layers_bytes,
        )

    def full_transfer(self, num_gpus: int, engines: int, learners: int, tensor_parallel: int) -> Transfer:
        """All weights, in buckets, sent by several learners and passed on from engine to engine."""
        return Transfer(
            num_copies=engines,
            num_learners=learners,
            num_senders=min(SENDERS, learners),
            tensor_parallel=tensor_parallel,
            bucket_bytes=BUCKET_BYTES,
            relay=engines > 1,
            same_node=num_gpus <= self.device.num_per_node,
        )

    def payload_bytes(self, transfer: Transfer) -> float:
        model = self.model
        if transfer.encoding == "full":
            return self.weight_bytes
        if transfer.encoding == "delta":
            return CHANGED_BYTES * transfer.changed_share * model.num_params
        query_and_output = 2 * (model.hidden_size + model.attention_size)
        size = query_and_output + 2 * model.hidden_size + model.kv_size  # with key and value
        return self.device.number_bytes * transfer.adapter_rank * model.num_layers * size

    def sync_times(self, transfer: Transfer) -> SyncTimes:
        """The four operations of one new version, at the datasheet's speeds."""
        payload, learners, tp = self.payload_bytes(transfer), transfer.num_learners, transfer.tensor_parallel
        link, memory = self.device.link_bytes_per_s, self.device.memory_bytes_per_s
        part = payload / min(transfer.num_senders, learners)  # that each sender sends of each copy
        bucket = min(part, transfer.bucket_bytes or part)
        is_delta = transfer.encoding == "delta"
        cast = 2 * self.weight_bytes + payload if is_delta else 0.0  # the new ones beside the old
        # A relay passes a bucket on while the next arrives, so further copies cost a bucket each.
        sent = part + (transfer.num_copies - 1) * (bucket if transfer.relay else part)
        return SyncTimes(
            gather_s=(part - payload / learners) / link,  # a sender has a part itself
            cast_s=cast / learners / memory,
            broadcast_s=sent / (link if transfer.same_node else self.device.network_bytes_per_s),
            reshard_s=payload * (tp - 1) / tp / link + 2 * payload / tp / memory,
            num_buckets=math.ceil(part / bucket),
        )

"""How long a new version takes to reach the engines: bytes x copies / bandwidth, in four operations.

    gather      shards of the learner's devices become whole tensors where they are sent from     links of a node
    cast        to the numbers on the wire, or to what has changed                                 memory
    broadcast   a copy for every engine                                                            network
    reshard     into the engine's own layout                                                       links and memory

What can be done about it: send less (fewer bytes a number; only what changed; only an adapter); send in buckets, so
that the four run at the same time and the slowest sets the pace; relay, so that the learner sends once and engines pass
buckets on; send from many devices; overlap it with generation. Where stages share their weights, nothing is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from headrace.insight.checks import check_above, check_at_least, check_share
from headrace.insight.hardware import Device
from headrace.insight.model_shape import ModelShape

CHANGED_SHARE = 0.02
"""Of bfloat16 weights in a step of RL: at learning rates near 3e-6, others found at least 98% the same to the bit."""

CHANGED_BYTES = 2.1
"""Of a changed weight: where it is and by how much it moved. 2.0 where 4% changed, 2.1 at 2%, 2.25 at 1%."""


class Encoding(StrEnum):
    """What is sent of the weights."""

    FULL = "full"
    DELTA = "delta"  # those that changed, each with its place
    ADAPTER = "adapter"  # low-rank matrices beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How weights travel.

    Example:
        Transfer(num_copies=8, num_learners=8, bucket_bytes=512e6, relay=True)
    """

    num_copies: int = 1  # engines that need them
    num_learners: int = 1  # devices that hold a part each
    num_senders: int = 1  # of these, those that send, each its part of every copy
    tensor_parallel: int = 1  # devices of an engine
    encoding: Encoding = Encoding.FULL
    wire_bytes: int | None = None  # of a weight: 1 is float8; None for the device's own
    changed_share: float = CHANGED_SHARE  # with delta
    adapter_rank: int = 16  # with adapter, on the attention's four matrices
    bucket_bytes: float | None = None  # None: everything at once
    relay: bool = False  # engines pass on what they receive
    same_node: bool = False  # learner and engines are linked, and need no network
    overlap: float = 0.0  # the share of it during which generation goes on

    def __post_init__(self) -> None:
        check_at_least(1, num_copies=self.num_copies, num_learners=self.num_learners, num_senders=self.num_senders)
        check_at_least(1, tensor_parallel=self.tensor_parallel, adapter_rank=self.adapter_rank)
        check_share(changed_share=self.changed_share, overlap=self.overlap)
        for name in ("wire_bytes", "bucket_bytes"):
            if getattr(self, name) is not None:
                check_above(0.0, **{name: getattr(self, name)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimes:
    """Seconds of the four operations, and what they come to.

    Example:
        SyncTimes(gather_s=0.3, cast_s=0.0, broadcast_s=2.8, reshard_s=0.2, num_buckets=280, overlap=0.5)
    """

    gather_s: float
    cast_s: float
    broadcast_s: float
    reshard_s: float
    num_buckets: int = 1
    overlap: float = 0.0

    @property
    def total_s(self) -> float:
        """From the first byte to the last: a pipeline takes its slowest part, and one bucket's time in the others."""
        parts = (self.gather_s, self.cast_s, self.broadcast_s, self.reshard_s)
        return max(parts) + (sum(parts) - max(parts)) / self.num_buckets

    @property
    def exposed_s(self) -> float:
        """What the engines wait: τS of the equation."""
        return self.total_s * (1.0 - self.overlap)


def payload_bytes(model: ModelShape, device: Device, transfer: Transfer) -> float:
    """One copy, on the wire."""
    number_bytes = transfer.wire_bytes or device.number_bytes
    match transfer.encoding:
        case Encoding.FULL:
            return number_bytes * model.num_params
        case Encoding.DELTA:
            return CHANGED_BYTES * transfer.changed_share * model.num_params
        case Encoding.ADAPTER:
            query_and_output = 2 * (model.hidden_size + model.attention_size)
            key_and_value = 2 * model.hidden_size + model.kv_size
            return number_bytes * transfer.adapter_rank * model.num_layers * (query_and_output + key_and_value)


def sync_times(model: ModelShape, device: Device, transfer: Transfer) -> SyncTimes:
    """The four operations of one new version, at the datasheet's speeds."""
    payload = payload_bytes(model, device, transfer)
    part = payload / min(transfer.num_senders, transfer.num_learners)  # that each sender sends of each copy
    bucket = min(part, transfer.bucket_bytes or part)
    # Who sends a part has 1/num_learners of the weights itself, and the rest comes from its neighbours.
    gather_s = (part - payload / transfer.num_learners) / device.link_bytes_per_s
    wire = device.link_bytes_per_s if transfer.same_node else device.network_bytes_per_s
    # A relay that has received a bucket passes it on while the next arrives, so further copies cost a bucket each.
    sent = part + (transfer.num_copies - 1) * (bucket if transfer.relay else part)
    tp = transfer.tensor_parallel
    return SyncTimes(
        gather_s=gather_s,
        cast_s=_cast_bytes(model, device, transfer, payload) / transfer.num_learners / device.memory_bytes_per_s,
        broadcast_s=sent / wire,
        reshard_s=payload * (tp - 1) / tp / device.link_bytes_per_s + 2 * payload / tp / device.memory_bytes_per_s,
        num_buckets=math.ceil(part / bucket),
        overlap=transfer.overlap,
    )


def _cast_bytes(model: ModelShape, device: Device, transfer: Transfer, payload: float) -> float:
    """Read and written by all learners together, before anything is sent."""
    weights = model.weight_bytes(device.number_bytes)
    if transfer.encoding is Encoding.DELTA:
        return 2 * weights + payload  # the new ones beside the old
    if transfer.encoding is Encoding.FULL and transfer.wire_bytes not in (None, device.number_bytes):
        return weights + payload
    return 0.0

"""What is sent of a version: its bytes in buckets, and a manifest that describes them.

The tensors' bytes are laid end to end and cut into buckets of one size, wherever tensors begin or
end. Every bucket has a checksum, so a receiver knows that it has what was sent before it touches a
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from headrace.errors import PublishError

BUCKET_BYTES = 64 << 20  # large enough for a network, small enough that a few fit anywhere
_ROW_WORDS = 4096
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number: torch has no uint64 sums


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor and its bytes in the payload; in a delta, also its changed elements.

    Example:
        TensorSpec("model.norm.weight", "bfloat16", (1024,), num_bytes=2048)
        TensorSpec("model.norm.weight", "bfloat16", (1024,), num_bytes=37, num_changed=12, place_bytes=13)
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_changed: int = 0
    place_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a payload contains. Small; sent beside the buckets as JSON or pickled."""

    version: int
    base: int | None  # the version that a receiver must have; None if any will do
    encoding: str
    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]  # bytes of each bucket
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        tensors = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in plain["tensors"])
        lists = {name: tuple(plain[name]) for name in ("sizes", "checksums")}
        return cls(**{**plain, **lists, "tensors": tensors})


@dataclass(frozen=True, slots=True)
class Payload:
    """A version as it is sent: its buckets are tensors of uint8."""

    manifest: Manifest
    buckets: tuple[Tensor, ...]

    def pieces(self, start: int, num_bytes: int) -> Iterator[Tensor]:
        """`num_bytes` from `start` on, as views; several if they cross the end of a bucket."""
        for bucket in self.buckets:
            if num_bytes and start < bucket.numel():
                piece = bucket[start : start + num_bytes]
                yield piece
                start, num_bytes = start + piece.numel(), num_bytes - piece.numel()
            start -= bucket.numel()

    def read(self, start: int, num_bytes: int) -> Tensor:
        pieces = list(self.pieces(start, num_bytes)) or [torch.empty(0, dtype=torch.uint8)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class BucketWriter:
    """Lays bytes end to end into buckets."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._bucket_bytes, self._device = bucket_bytes, device
        self._buckets: list[Tensor] = []
        self._free = 0  # bytes of the last bucket
        self.num_bytes = 0

    def write(self, content: Tensor) -> None:
        self.num_bytes += content.numel()
        while content.numel():
            if not self._free:
                self._buckets.append(new_bucket(self._bucket_bytes, self._device))
                self._free = self._bucket_bytes
            part, content = content[: self._free], content[self._free :]
            end = self._bucket_bytes - self._free + part.numel()
            self._buckets[-1][end - part.numel() : end].copy_(part)
            self._free -= part.numel()

    def payload(self, version: int, base: int | None, encoding: str, tensors: Sequence[TensorSpec]) -> Payload:
        buckets = tuple(self._buckets)
        if self._free:  # give the unused memory back
            buckets = (*buckets[:-1], buckets[-1][: -self._free].clone())
        sizes, sums = tuple(map(Tensor.numel, buckets)), tuple(map(checksum, buckets))
        return Payload(Manifest(version, base, encoding, tuple(tensors), sizes, sums), buckets)


def new_bucket(num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.empty(num_bytes, np.uint8))  # huge pages: three times faster to fill
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat tensor of uint8 (a view)."""
    return tensor.detach().view(-1).view(torch.uint8)


def checksum(bucket: Tensor) -> int:
    """A 64-bit checksum, equal on all devices. Detects any changed word and nearly any swap.

    The words are arranged in rows. Every row sum has an odd weight of its own, every column sum an
    even one, so a change of a single word always shows. Integer sums do not depend on their order.
    """
    row_bytes = 8 * _ROW_WORDS
    num_whole = bucket.numel() // row_bytes * row_bytes
    last = torch.zeros(row_bytes, dtype=torch.uint8, device=bucket.device)
    last[: bucket.numel() - num_whole].copy_(bucket[num_whole:])
    last = last.view(torch.int64)
    rows = bucket[:num_whole].view(torch.int64).view(-1, _ROW_WORDS)
    by_row = torch.cat([rows.sum(1), last.sum(0, keepdim=True)])
    by_column = rows.sum(0) + last
    row_weights = 2 * torch.arange(len(by_row), device=bucket.device) + 1
    column_weights = 2 * torch.arange(1, _ROW_WORDS + 1, device=bucket.device)
    total = (by_row * row_weights * _ODD).sum() + (by_column * column_weights * (_ODD >> 1)).sum()
    return (int(total) + bucket.numel()) & ((1 << 64) - 1)


def verify(payload: Payload) -> None:
    """Raise PublishError unless all buckets have the size and checksum of the manifest."""
    manifest, buckets, total = payload.manifest, payload.buckets, len(payload.manifest.sizes)
    version = f"version {manifest.version}"
    if len(buckets) != total:
        raise PublishError(f"{version} arrived in {len(buckets)} buckets in place of {total}")
    facts = zip(buckets, manifest.sizes, manifest.checksums, strict=True)
    for number, (bucket, size, known) in enumerate(facts, 1):
        where = f"{version}: bucket {number} of {total}"
        if bucket.numel() != size:
            raise PublishError(f"{where} has {bucket.numel():,} bytes in place of {size:,}")
        if checksum(bucket) != known:
            raise PublishError(f"{where} was damaged on the way: its checksum differs")
    if (listed := sum(spec.num_bytes for spec in manifest.tensors)) != manifest.num_bytes:
        has = f"its buckets have {manifest.num_bytes:,} bytes, its tensors {listed:,}"
        raise PublishError(f"{version}: the manifest is damaged: {has}")

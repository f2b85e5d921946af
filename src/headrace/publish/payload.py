"""What travels: a version's bytes in buckets, and a manifest that says what they are.

The tensors' bytes stand end to end and are cut into buckets of one size, wherever the tensors' borders fall. Every
bucket has a checksum, so a receiver knows that it has what was sent before it touches a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from headrace.errors import PublishError

BUCKET_BYTES = 64 << 20  # large enough for a wire, small enough that a few fit anywhere
_ROW_WORDS = 4096
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number, which is what torch counts with


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, and how many of the payload's bytes are its own; of a delta, also how many of its elements changed.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a payload holds. Small: it travels beside the buckets, in JSON or pickled.

    Example:
        Manifest(version=8, base=7, encoding="delta", tensors=(TensorSpec(...),), sizes=(41_000,), checksums=(9137,))
    """

    version: int
    base: int | None  # the version that a receiver must hold; None if any will do
    encoding: str
    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]  # bytes of each bucket
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of all buckets."""
        return sum(self.sizes)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """From what `to_json` gave."""
        tensors = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in plain["tensors"])
        lists = {name: tuple(plain[name]) for name in ("sizes", "checksums")}
        return cls(**{**plain, **lists, "tensors": tensors})


@dataclass(frozen=True, slots=True)
class Payload:
    """A version as it travels.

    Example:
        Payload(Manifest(version=8, ...), buckets=(tensor of uint8, tensor of uint8))
    """

    manifest: Manifest
    buckets: tuple[Tensor, ...]

    def pieces(self, start: int, num_bytes: int) -> Iterator[Tensor]:
        """Bytes from `start` on, as views: several where a bucket ends between."""
        for bucket in self.buckets:
            if num_bytes and start < bucket.numel():
                piece = bucket[start : start + num_bytes]
                yield piece
                start, num_bytes = start + piece.numel(), num_bytes - piece.numel()
            start -= bucket.numel()

    def read(self, start: int, num_bytes: int) -> Tensor:
        """The same in one piece."""
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
        """Append a flat tensor of uint8."""
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
        """All that was written, with its manifest."""
        buckets = tuple(self._buckets)
        if self._free:  # the rest of its room goes back
            buckets = (*buckets[:-1], buckets[-1][: -self._free].clone())
        manifest = Manifest(
            version=version,
            base=base,
            encoding=encoding,
            tensors=tuple(tensors),
            sizes=tuple(bucket.numel() for bucket in buckets),
            checksums=tuple(map(checksum, buckets)),
        )
        return Payload(manifest, buckets)


def new_bucket(num_bytes: int, device: torch.device) -> Tensor:
    """Room for bytes."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(num_bytes, np.uint8))  # huge pages: filled in a third of the time
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's own memory, as uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def checksum(bucket: Tensor) -> int:
    """64 bits that differ if a word differs, and nearly always if words changed places; the same on every device.

    The words stand in rows; a row's sum and a column's sum count with weights of their own. An odd and an even weight
    meet in every word, so no change of a single one is lost. Sums of integers do not depend on their order.
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


def verify_bucket(manifest: Manifest, index: int, bucket: Tensor) -> None:
    """Raise unless the bucket is what the manifest says."""
    where = f"version {manifest.version}: bucket {index + 1} of {len(manifest.sizes)}"
    if bucket.numel() != manifest.sizes[index]:
        raise PublishError(f"{where} has {bucket.numel():,} bytes in place of {manifest.sizes[index]:,}")
    if checksum(bucket) != manifest.checksums[index]:
        raise PublishError(f"{where} is not what was sent: its checksum differs")


def verify(payload: Payload) -> None:
    """Raise unless every bucket is there and is what the manifest says."""
    manifest = payload.manifest
    if len(payload.buckets) != len(manifest.sizes):
        raise PublishError(
            f"version {manifest.version} came in {len(payload.buckets)} buckets in place of {len(manifest.sizes)}"
        )
    for index, bucket in enumerate(payload.buckets):
        verify_bucket(manifest, index, bucket)
    if (listed := sum(spec.num_bytes for spec in manifest.tensors)) != manifest.num_bytes:
        raise PublishError(
            f"version {manifest.version}: {manifest.num_bytes:,} bytes, {listed:,} of them listed: a damaged manifest"
        )

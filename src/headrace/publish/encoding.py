"""Encodings: weights to a payload, and a payload back into weights, bit for bit.

    full      every tensor's bytes
    delta     the elements whose bits changed since the last committed version; full when that is smaller
    adapter   the tensors of a LoRA adapter; the base model never changes

Tensors come one at a time, in the precision that rollout computes in, so that a sharded
learner needs memory for one whole tensor only. A delta always starts from the last *committed*
version, which every receiver has.

A payload is the tensors' bytes, laid end to end and cut into buckets of one size, wherever tensors
begin or end, and a manifest that describes them. Every bucket has a checksum, so a receiver knows
that it has what was sent before it touches a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from headrace.errors import PublishError

ADAPTER_MARK = "lora_"
CPU = torch.device("cpu")
BUCKET_BYTES = 64 << 20  # large enough for a network, small enough that a few fit anywhere
_ROW_WORDS = 4096
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number: torch has no uint64 sums

Named = Iterable[tuple[str, Tensor]]
Changes = dict[str, tuple[Tensor, Tensor]]  # by tensor: places that changed, and their new bits


class Encoder:
    """Makes payloads, in CPU memory. For deltas it keeps a copy of the committed weights there."""

    def __init__(self, kind: str, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.kind, self._bucket_bytes = kind, bucket_bytes
        self.version: int | None = None  # the committed one
        self._held: dict[str, Tensor] = {}  # for deltas: weights of the committed version, or of the first
        self._changes: Changes = {}  # of the version encoded last

    def encode(self, version: int, tensors: Named) -> Payload:
        """The payload of `version`. It replaces a version that was not committed."""
        if self.version is not None and version <= self.version:
            raise PublishError(f"version {version} cannot follow version {self.version}")
        self._changes = {}
        if self.kind == "delta" and self.version is not None:
            return self._delta(version, tensors)
        if self.kind == "delta":
            self._held = {name: t.detach().to(CPU, copy=True).contiguous() for name, t in tensors}
            tensors = self._held.items()
        return self._full(version, tensors)

    def committed(self, version: int) -> None:
        """Every receiver has `version`, the last one encoded: the next delta starts from it."""
        for name, (places, values) in self._changes.items():
            bits(self._held[name])[places] = values
        self.version, self._changes = version, {}

    def rebase(self) -> Payload:
        """The committed version in full, for new receivers. Only with the delta encoding."""
        assert self.version is not None, "nothing was committed"
        return self._full(self.version, self._held.items())

    def _full(self, version: int, tensors: Named) -> Payload:
        writer = BucketWriter(self._bucket_bytes)
        for name, tensor in tensors:
            writer.write(name, tensor, bits(tensor.contiguous(), torch.uint8))
        return writer.payload(version, None, "full" if self.kind == "delta" else self.kind)

    def _delta(self, version: int, tensors: Named) -> Payload:
        writer, changes = BucketWriter(self._bucket_bytes), Changes()
        for name, tensor in tensors:
            old = self._held.get(name)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                raise PublishError(f"version {version}: '{name}' is not a tensor of version {self.version}")
            new = bits(tensor.detach().to(CPU).contiguous())
            # several times faster than torch's nonzero
            places = torch.from_numpy(np.flatnonzero((new != bits(old)).numpy()))
            changes[name] = places, new[places]
            if num_changed := len(places):
                coded = code_places(places), code_changes(new[places], bits(old)[places])
                writer.write(name, tensor, *coded, num_changed=num_changed)
        if missing := self._held.keys() - changes.keys():
            raise PublishError(f"version {version} lacks '{min(missing)}', which version {self.version} has")
        self._changes = changes
        if writer.num_bytes < sum(tensor.nbytes for tensor in self._held.values()):
            return writer.payload(version, self.version, "delta")
        held = ((name, self._held[name], *change) for name, change in changes.items())
        flat = ((name, t, bits(t).index_put((places,), new)) for name, t, places, new in held)
        return self._full(version, ((name, x.view(t.dtype).view_as(t)) for name, t, x in flat))


def decoded(payload: Payload, live: Mapping[str, Tensor], held: int | None) -> Iterator[Callable[[], object]]:
    """The calls that write a payload into the weights `live` of version `held` (None: never published).

    Raises PublishError if versions are out of order, or names, shapes or precisions differ.
    """
    _check(payload.manifest, live, held)
    start = 0
    for spec in payload.manifest.tensors:
        target = live[spec.name]
        if payload.manifest.encoding == "delta":
            flat, coded = bits(target), torch.cat([*payload.pieces(start, spec.num_bytes)])
            where = read_places(coded[: spec.place_bytes], spec.num_changed, len(flat)).to(target.device)
            changes = read_changes(coded[spec.place_bytes :], spec.num_changed, flat.dtype)
            yield partial(flat.index_put_, (where,), flat[where] + changes.to(target.device))
        else:
            room = bits(target, torch.uint8)
            for piece in payload.pieces(start, spec.num_bytes):
                yield partial(room[: len(piece)].copy_, piece)
                room = room[len(piece) :]
        start += spec.num_bytes


def _check(manifest: Manifest, live: Mapping[str, Tensor], held: int | None) -> None:
    where = f"version {manifest.version}"
    if manifest.base not in (None, held):
        holds = "none" if held is None else f"version {held}"
        raise PublishError(f"{where} is a delta from version {manifest.base}, and the receiver holds {holds}")
    if held is not None and manifest.version <= held:
        raise PublishError(f"{where} came after version {held}, which the receiver holds")
    names = {spec.name for spec in manifest.tensors}
    if unknown := names - live.keys():
        raise PublishError(f"{where}: the receiver has no tensor '{min(unknown)}'")
    expected = {name for name in live if manifest.encoding == "full" or ADAPTER_MARK in name}
    if manifest.encoding != "delta" and (missing := expected - names):
        raise PublishError(f"{where} lacks the tensor '{min(missing)}'")
    for spec in manifest.tensors:
        target = live[spec.name]
        dtype, shape = _kind(target)
        if (spec.dtype, spec.shape) != (dtype, shape):
            sent = f"{where}: '{spec.name}' is {spec.dtype} {list(spec.shape)}"
            raise PublishError(f"{sent}, and the receiver's is {dtype} {list(shape)}")
        if not target.is_contiguous():
            raise PublishError(f"{where}: the receiver's '{spec.name}' is not contiguous in memory")
        if manifest.encoding != "delta" and spec.num_bytes != target.nbytes:
            has = f"{spec.num_bytes:,} bytes in place of {target.nbytes:,}"
            raise PublishError(f"{where}: '{spec.name}' has {has}")


# ---- the payload


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor and its bytes in the payload; in a delta, also its changed elements."""

    name: str
    dtype: str  # as torch names it: "bfloat16"
    shape: tuple[int, ...]
    num_bytes: int
    num_changed: int = 0
    place_bytes: int = 0  # the first of `num_bytes`, which say where; the others say what


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a payload contains. Small; sent beside the buckets as JSON or pickled."""

    version: int
    base: int | None  # the version that a receiver must have; None if any will do
    encoding: str  # full, delta or adapter
    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]  # bytes of each bucket
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Payload:
    """A version as it is sent: its buckets are tensors of uint8."""

    manifest: Manifest
    buckets: tuple[Tensor, ...]

    def pieces(self, start: int, num_bytes: int) -> Iterator[Tensor]:
        """`num_bytes` from `start` on, as views; several if they cross the end of a bucket."""
        for bucket in self.buckets:
            if max(start, 0) < min(start + num_bytes, bucket.numel()):
                yield bucket[max(start, 0) : start + num_bytes]
            start -= bucket.numel()


class BucketWriter:
    """Lays bytes end to end into buckets."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Tensor] = []
        self._free = new_bucket(0)  # the rest of the last bucket
        self._specs: list[TensorSpec] = []
        self.num_bytes = 0

    def write(self, name: str, tensor: Tensor, *contents: Tensor, num_changed: int = 0) -> None:
        """The bytes that stand for a tensor: all of its own, or coded places and changes."""
        sizes = [content.numel() for content in contents]
        place_bytes = sizes[0] if num_changed else 0
        self._specs.append(TensorSpec(name, *_kind(tensor), sum(sizes), num_changed, place_bytes))
        self.num_bytes += sum(sizes)
        for content in contents:
            while content.numel():
                if not len(self._free):
                    self._free = new_bucket(self._bucket_bytes)
                    self._buckets.append(self._free)
                part, content = content[: len(self._free)], content[len(self._free) :]
                self._free[: len(part)].copy_(part)
                self._free = self._free[len(part) :]

    def payload(self, version: int, base: int | None, encoding: str) -> Payload:
        buckets = tuple(self._buckets)
        if free := len(self._free):  # give the unused memory back
            buckets = (*buckets[:-1], buckets[-1][:-free].clone())
        sizes, sums = tuple(map(Tensor.numel, buckets)), tuple(map(checksum, buckets))
        return Payload(Manifest(version, base, encoding, tuple(self._specs), sizes, sums), buckets)


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def new_bucket(num_bytes: int, device: torch.device = CPU) -> Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.empty(num_bytes, np.uint8))  # huge pages: faster to fill
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def checksum(bucket: Tensor) -> int:
    """A 64-bit checksum, equal on all devices. Detects any changed word and nearly any swap.

    The words are arranged in rows. Every row sum has an odd weight of its own, every column sum an
    even one, so a change of a single word always shows. Integer sums do not depend on their order.
    """
    row_bytes = 8 * _ROW_WORDS
    num_left = bucket.numel() % row_bytes
    num_whole = bucket.numel() - num_left
    last = nn.functional.pad(bucket[num_whole:], (0, row_bytes - num_left)).view(torch.int64)
    rows = bucket[:num_whole].view(torch.int64).view(-1, _ROW_WORDS)
    by_row = torch.cat([rows.sum(1), last.sum(0, keepdim=True)])
    by_column = rows.sum(0) + last
    row_weights = 2 * torch.arange(len(by_row), device=bucket.device) + 1
    column_weights = 2 * torch.arange(1, _ROW_WORDS + 1, device=bucket.device)
    total = (by_row * row_weights * _ODD).sum() + (by_column * column_weights * (_ODD >> 1)).sum()
    return (int(total) + bucket.numel()) & ((1 << 64) - 1)


def verify(payload: Payload) -> Payload:
    """The payload. Raises PublishError unless all buckets have the size and checksum of the manifest."""
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
    return payload


# ---- the delta's bytes
#
# A step of RL at a small learning rate leaves most bfloat16 weights unchanged, bit for bit, and
# moves the others to a number near by. A place is stored as the gap to the place before, a change
# as the difference of the bits as integers (zigzag-coded). Both are variable-length integers
# (varints) of seven bits per byte: one byte up to 127, two up to 16,383, three up to two million. First
# bytes come first, then the second bytes of those numbers that have one, and so on.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # 8 bytes: two elements
_GROUP = 7
_MORE = 1 << _GROUP


def bits(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The memory of a contiguous tensor as a flat tensor of integers (a view)."""
    return tensor.detach().view(-1).view(dtype or _BITS[tensor.element_size()])


def code_places(places: Tensor) -> Tensor:
    """Varints of the gaps between `places`, which must be in rising order."""
    return _code(places.diff(prepend=places.new_full((1,), -1)) - 1)


def read_places(coded: Tensor, num_places: int, num_elements: int) -> Tensor:
    """Inverse of `code_places`. Raises unless there are `num_places`, all below `num_elements`."""
    places = (_read(coded, num_places) + 1).cumsum(0) - 1
    if num_places and not 0 <= int(places[-1]) < num_elements:
        raise PublishError(f"place {places[-1]} is outside a tensor of {num_elements} elements")
    return places


def code_changes(new: Tensor, old: Tensor) -> Tensor:
    """Varints of `new - old`, zigzag-coded so that small numbers of either sign are short."""
    by = (new - old).long()
    return _code((by << 1) ^ (by >> 63))


def read_changes(coded: Tensor, num_changes: int, dtype: torch.dtype) -> Tensor:
    """What to add to the old bits. Integer sums wrap around, so the result is always exact."""
    zigzag = _read(coded, num_changes)
    return ((zigzag >> 1) ^ -(zigzag & 1)).to(dtype)


def _code(numbers: Tensor) -> Tensor:
    coded = [torch.empty(0, dtype=torch.uint8, device=numbers.device)]
    while len(numbers):
        more = numbers >= _MORE
        coded.append((numbers & (_MORE - 1) | more * _MORE).to(torch.uint8))
        numbers = numbers[more] >> _GROUP
    return torch.cat(coded)


def _read(coded: Tensor, count: int) -> Tensor:
    if (num_ends := int((coded < _MORE).sum())) != count or bool((coded[-1:] >= _MORE).any()):
        raise PublishError(f"a delta has {num_ends} numbers in place of {count}")
    part, coded = coded[:count], coded[count:]
    numbers, here, shift = (part & (_MORE - 1)).long(), (part >= _MORE).nonzero().flatten(), _GROUP
    while len(here):  # each has exactly one end among what is left, so there is enough
        part, coded = coded[: len(here)], coded[len(here) :]
        numbers[here] |= (part & (_MORE - 1)).long() << shift
        here, shift = here[part >= _MORE], shift + _GROUP
    return numbers

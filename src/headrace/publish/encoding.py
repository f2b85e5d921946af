"""Encodings: weights to a payload, and a payload back into weights, bit for bit.

    full      every tensor's bytes
    delta     the elements whose bits changed since the last committed version; full when that is smaller
    adapter   the tensors of a LoRA adapter; the base never changes

Tensors come in the precision that rollout computes in (`cast`), one at a time, so that a sharded learner needs room for
one whole tensor only. A delta is taken from the last *committed* version: one that some receiver did not get never
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from headrace.errors import PublishError
from headrace.publish.delta import bits, changed_places, code_changes, code_places, read_changes, read_places
from headrace.publish.payload import BUCKET_BYTES, BucketWriter, Manifest, Payload, TensorSpec, flat_bytes

ADAPTER_MARK = "lora_"

Named = Iterable[tuple[str, Tensor]]
Changes = dict[str, tuple[Tensor, Tensor]]
"""Of each tensor: places, and the bits that are there now."""


class Encoding(StrEnum):
    """What is sent of the weights."""

    FULL = "full"
    DELTA = "delta"
    ADAPTER = "adapter"


def cast(tensors: Named, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in the precision of rollout: what is not needed there need not travel."""
    for name, tensor in tensors:
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True, slots=True)
class _Pending:
    """What makes the held weights those of a version that is not committed yet.

    Example:
        _Pending(8, changes={"model.norm.weight": (places, bits)})
    """

    version: int
    whole: dict[str, Tensor] = field(default_factory=dict)
    changes: Changes = field(default_factory=dict)


class Encoder:
    """Makes payloads, one version after the other. A delta needs a copy of the committed weights, kept on `device`."""

    def __init__(
        self, kind: Encoding | str, *, bucket_bytes: int = BUCKET_BYTES, device: torch.device | str = "cpu"
    ) -> None:
        self.kind = Encoding(kind)
        self._bucket_bytes, self._device = bucket_bytes, torch.device(device)
        self._committed: int | None = None
        self._held: dict[str, Tensor] = {}  # weights of the committed version
        self._pending: _Pending | None = None

    @torch.no_grad()
    def encode(self, version: int, tensors: Named) -> Payload:
        """A version's payload. It replaces one that was not committed."""
        if self._committed is not None and version <= self._committed:
            raise PublishError(f"version {version} cannot follow version {self._committed}")
        self._pending = _Pending(version)
        if self.kind is Encoding.DELTA:
            return self._delta(version, tensors) if self._held else self._first(version, tensors)
        payload = self._full(version, tensors, self.kind)
        if self.kind is Encoding.ADAPTER and not payload.manifest.tensors:
            raise PublishError(f"there is no adapter to publish: no tensor's name holds '{ADAPTER_MARK}'")
        return payload

    def takes(self, name: str) -> bool:
        """Whether a tensor is published at all; the others need be neither gathered nor cast."""
        return self.kind is not Encoding.ADAPTER or ADAPTER_MARK in name

    def committed(self, version: int) -> None:
        """Every receiver holds the version: the next delta starts from it."""
        if self._pending is None or self._pending.version != version:
            raise PublishError(f"version {version} was not the last one encoded")
        self._held |= self._pending.whole
        for name, (places, values) in self._pending.changes.items():
            bits(self._held[name])[places] = values
        self._committed, self._pending = version, None

    @torch.no_grad()
    def rebase(self) -> Payload:
        """The committed version in full, for receivers that hold none; only where deltas are made."""
        assert self._committed is not None
        return self._full(self._committed, self._held.items())

    def _full(self, version: int, tensors: Named, encoding: Encoding = Encoding.FULL) -> Payload:
        writer, specs = BucketWriter(self._bucket_bytes, self._device), []
        for name, tensor in tensors:
            if not self.takes(name):
                continue
            content = flat_bytes(tensor.contiguous())
            writer.write(content)
            specs.append(_spec(name, tensor, content.numel()))
        return writer.payload(version, None, encoding, specs)

    def _first(self, version: int, tensors: Named) -> Payload:
        held = {name: tensor.detach().to(self._device, copy=True).contiguous() for name, tensor in tensors}
        self._pending = _Pending(version, whole=held)
        return self._full(version, held.items())

    def _delta(self, version: int, tensors: Named) -> Payload:
        writer, specs = BucketWriter(self._bucket_bytes, self._device), []
        changes: Changes = {}
        for name, tensor in tensors:
            old = self._held.get(name)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                raise PublishError(f"version {version}: '{name}' is not a tensor of version {self._committed}")
            new = bits(tensor.detach().to(self._device).contiguous())
            places = changed_places(new, bits(old))
            changes[name] = places, new[places]
            if len(places):
                parts = code_places(places), code_changes(changes[name][1], bits(old)[places])
                for part in parts:
                    writer.write(part)
                specs.append(_spec(name, tensor, sum(map(len, parts)), len(places), len(parts[0])))
        if missing := self._held.keys() - changes.keys():
            raise PublishError(f"version {version} lacks '{min(missing)}', which version {self._committed} has")
        self._pending = _Pending(version, changes=changes)
        if writer.num_bytes >= sum(flat_bytes(tensor).numel() for tensor in self._held.values()):
            return self._full(version, self._with(changes))
        return writer.payload(version, self._committed, Encoding.DELTA, specs)

    def _with(self, changes: Changes) -> Iterator[tuple[str, Tensor]]:
        """The committed weights with the changes made, one at a time."""
        for name, (places, values) in changes.items():
            tensor = self._held[name].clone()
            bits(tensor)[places] = values
            yield name, tensor


def _spec(name: str, tensor: Tensor, num_bytes: int, num_changed: int = 0, place_bytes: int = 0) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape), num_bytes, num_changed, place_bytes)


class Update:
    """A payload that fits the weights it is for: all that could be wrong with it was looked for."""

    def __init__(self, payload: Payload, live: Mapping[str, Tensor], held: int | None) -> None:
        """`held` is the version that `live` has now, None for one that was never published.

        Raises if versions are out of order, or names, shapes or precisions differ.
        """
        self.version, self.num_bytes = payload.manifest.version, payload.manifest.num_bytes
        _check_order(payload.manifest, held)
        _check_tensors(payload.manifest, live)
        self._writes: list[Callable[[], object]] = []
        start = 0
        for spec in payload.manifest.tensors:
            if payload.manifest.encoding == Encoding.DELTA:
                self._change(payload, spec, start, live[spec.name])
            else:
                self._replace(payload, spec, start, live[spec.name])
            start += spec.num_bytes

    @torch.no_grad()
    def write(self) -> None:
        """Into the live weights, in place. Call it between two engine steps."""
        for write in self._writes:
            write()

    def _replace(self, payload: Payload, spec: TensorSpec, start: int, target: Tensor) -> None:
        room = flat_bytes(target)
        for piece in payload.pieces(start, spec.num_bytes):
            part, room = room[: len(piece)], room[len(piece) :]
            self._writes.append(lambda part=part, piece=piece: part.copy_(piece))  # type: ignore[misc]

    def _change(self, payload: Payload, spec: TensorSpec, start: int, target: Tensor) -> None:
        flat = bits(target)
        coded = payload.read(start, spec.place_bytes)
        places = read_places(coded, spec.num_changed, len(flat)).to(target.device)
        coded = payload.read(start + spec.place_bytes, spec.num_bytes - spec.place_bytes)
        changes = read_changes(coded, spec.num_changed, flat.dtype).to(target.device)
        self._writes.append(lambda: flat.index_put_((places,), flat[places] + changes))


def _check_order(manifest: Manifest, held: int | None) -> None:
    if manifest.base is not None and manifest.base != held:
        raise PublishError(
            f"version {manifest.version} is a delta from version {manifest.base}, and the receiver holds "
            f"{'none' if held is None else f'version {held}'}"
        )
    if held is not None and manifest.version <= held:
        raise PublishError(f"version {manifest.version} came after version {held}, which the receiver holds")


def _check_tensors(manifest: Manifest, live: Mapping[str, Tensor]) -> None:
    where = f"version {manifest.version}"
    names = {spec.name for spec in manifest.tensors}
    if unknown := names - live.keys():
        raise PublishError(f"{where}: the receiver has no tensor '{min(unknown)}'")
    expected = {name for name in live if manifest.encoding == Encoding.FULL or ADAPTER_MARK in name}
    if manifest.encoding != Encoding.DELTA and (missing := expected - names):
        raise PublishError(f"{where} lacks the tensor '{min(missing)}'")
    for spec in manifest.tensors:
        target = live[spec.name]
        has = _spec(spec.name, target, 0)
        if (spec.dtype, spec.shape) != (has.dtype, has.shape):
            raise PublishError(
                f"{where}: '{spec.name}' is {spec.dtype} {list(spec.shape)}, and the receiver's is "
                f"{has.dtype} {list(has.shape)}"
            )
        if not target.is_contiguous():
            raise PublishError(f"{where}: the receiver's '{spec.name}' does not lie in one piece in memory")
        size = target.numel() * target.element_size()
        if manifest.encoding != Encoding.DELTA and spec.num_bytes != size:
            raise PublishError(f"{where}: '{spec.name}' has {spec.num_bytes:,} bytes in place of {size:,}")

"""Transport through a shared directory. A full version is a loadable safetensors file.

    version-00000008/
      model.safetensors    of a full version: the buckets' bytes end to end
                           (adapter.safetensors of an adapter, changes.bin of a delta)
      config.json ...      the model's other files, if the sender was given their directory
      manifest.json
      complete             written last: without it there is no version

Nothing is flushed to the disk (fsync): the checksums detect what a crash of the machine lost.
"""

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from headrace.errors import PublishError
from headrace.publish.encoding import Manifest, Payload, verify
from headrace.roles import SendingEnd
from headrace.types import Ticket

MANIFEST, COMPLETE = "manifest.json", "complete"
CONTENT = {"full": "model.safetensors", "adapter": "adapter.safetensors", "delta": "changes.bin"}
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
_DTYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
_DTYPES |= {"float8_e4m3fn": "F8_E4M3"}
_BESIDE = {".json", ".txt", ".model", ".jinja"}  # configuration and tokenizer
_POLL_S = 0.02


class DiskSender(SendingEnd):
    """Writes a directory per version, which with the files of `model_dir` loads like any model."""

    def __init__(self, directory: Path, *, model_dir: Path | None = None) -> None:
        self._directory, self._model_dir = directory, model_dir
        self._staged: dict[int, Manifest] = {}

    def stage(self, payload: Payload) -> None:
        manifest, path = payload.manifest, self._path(payload.manifest.version)
        try:
            _remove(path)  # after a restart a version may come a second time
            path.mkdir(parents=True)
            with (path / CONTENT[manifest.encoding]).open("wb") as file:
                file.write(_header(manifest))
                for bucket in payload.buckets:
                    file.write(bucket.cpu().numpy().data)
            if self._model_dir is not None and manifest.encoding == "full":
                for beside in self._model_dir.iterdir():
                    if beside.suffix in _BESIDE and "safetensors" not in beside.name:
                        shutil.copy(beside, path)
            (path / MANIFEST).write_text(json.dumps(asdict(manifest)))
            (path / COMPLETE).touch()
        except OSError as error:
            _remove(path)
            raise PublishError(f"version {manifest.version} cannot be written to {path}: {error.strerror}") from error
        self._staged[manifest.version] = manifest

    def ticket(self, version: int) -> Ticket:
        return Ticket(self._staged[version], str(self._path(version)))

    def forget(self, version: int) -> None:
        if self._staged.pop(version, None) is not None:
            _remove(self._path(version))

    def _path(self, version: int) -> Path:
        return self._directory.resolve() / f"version-{version:08}"


class DiskReceiver:
    """Reads complete versions."""

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        """Waits up to `timeout_s` for the files: a network file system may show them late."""
        manifest, version = ticket.manifest, f"version {ticket.version}"
        path, deadline = Path(ticket.where), time.monotonic() + timeout_s
        while not (path / COMPLETE).exists():
            if time.monotonic() > deadline:
                raise PublishError(f"{version} is not complete after {timeout_s:g} s: {path}")
            time.sleep(_POLL_S)
        try:
            if (path / MANIFEST).read_text() != json.dumps(asdict(manifest)):
                raise PublishError(f"{path} contains another version than the ticket says")
            with (path / CONTENT[manifest.encoding]).open("rb", buffering=0) as file:
                file.seek(len(_header(manifest)))
                buckets = [torch.from_numpy(np.fromfile(file, np.uint8, size)) for size in manifest.sizes]
        except (OSError, ValueError) as error:
            raise PublishError(f"{version} cannot be read from {path}: {error}") from error
        return verify(Payload(manifest, tuple(buckets)))


def _header(manifest: Manifest) -> bytes:
    """The header of a safetensors file; a delta has none."""
    if manifest.encoding == "delta":
        return b""
    entries, start = {}, 0
    for spec in manifest.tensors:
        dtype, shape, end = _DTYPES[spec.dtype], list(spec.shape), start + spec.num_bytes
        entries[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _remove(path: Path) -> None:
    if path.is_dir():
        (path / COMPLETE).unlink(missing_ok=True)  # first: nobody may read a half-deleted version
        shutil.rmtree(path, ignore_errors=True)

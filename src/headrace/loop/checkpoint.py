"""Checkpoints on disk: complete or not there at all.

A checkpoint is a directory with tensors (`policy.tensor_files`) and a manifest with the checksum
of every file. It is written under another name, flushed to disk (fsync) and renamed, so a
half-written one is never used. The rest (groups, steps, prompt cursor) is in the ledger.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import RunError
from headrace.ledger.files import CHECKPOINTS

MANIFEST, TENSORS = "manifest.json", "tensors"
LAYOUT = 1


class Checkpoint(NamedTuple):
    """A complete checkpoint, its checksums verified."""

    tensors: Path  # a directory
    version: int
    facts: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run; the newest `keep` stay."""

    def __init__(self, run_dir: Path, keep: int, directory: str = CHECKPOINTS) -> None:
        self._directory, self._keep = run_dir / directory, keep

    def write(self, version: int, write_tensors: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
        """Write a checkpoint and delete the oldest. `write_tensors(directory)` writes its tensors.

        If it cannot be written, earlier checkpoints stay as they are.
        """
        final = self._directory / f"step-{version:06}"
        unfinished = self._directory / f".writing-{final.name}"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write_tensors(unfinished / TENSORS)
            manifest = {"layout": LAYOUT, "version": version, "facts": facts, "files": _checksums(unfinished)}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            for path in (*unfinished.rglob("*"), unfinished):
                _sync(path)
            shutil.rmtree(final, ignore_errors=True)  # a resumed run reaches a version again
            unfinished.rename(final)
            _sync(self._directory)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            cause: BaseException = error
            while cause.__cause__ is not None:  # libraries wrap an error such as a full disk several times
                cause = cause.__cause__
            reason = str(getattr(cause, "strerror", "") or cause) or type(cause).__name__
            raise RunError(f"the checkpoint of step {version} could not be written: {reason}") from error
        for old in self._complete()[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)

    @property
    def versions(self) -> list[int]:
        """Of every complete checkpoint, newest first; the others serve if that is damaged."""
        return [int(path.name.removeprefix("step-")) for path in self._complete()]

    def newest(self, on_damage: Callable[[str], None]) -> Checkpoint | None:
        """The newest undamaged checkpoint; `on_damage` is told of damaged ones."""
        for path in self._complete():
            try:
                return _checked(path)
            except (RunError, OSError, ValueError, KeyError) as error:
                on_damage(f"the checkpoint {path} is damaged and not used: {error}")
        return None

    def _complete(self) -> list[Path]:
        """Newest first."""
        return sorted(self._directory.glob("step-*"), reverse=True)


def _checked(path: Path) -> Checkpoint:
    manifest = json.loads((path / MANIFEST).read_text())
    if (layout := manifest["layout"]) != LAYOUT:
        raise RunError(f"it has layout {layout}, and this version of headrace reads layout {LAYOUT}")
    found = _checksums(path)
    if wrong := [name for name, expected in manifest["files"].items() if found.get(name) != expected]:
        raise RunError(f"{wrong[0]} is not what was written")
    return Checkpoint((path / TENSORS).absolute(), manifest["version"], manifest["facts"])


def _checksums(directory: Path) -> dict[str, str]:
    """Of all files in it, by name. Several at a time: hashing does not hold Python's lock."""

    def checksum(file: Path) -> tuple[str, str]:
        with file.open("rb") as content:
            return str(file.relative_to(directory)), hashlib.file_digest(content, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(checksum, sorted(filter(Path.is_file, directory.rglob("*")))))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Models on disk, and tensors: of models and checkpoints, by `torch.distributed.checkpoint`.

The ranks of a sharded learner write their shards into one directory, for any number to read.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.distributed_c10d import ProcessGroup, all_reduce
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from headrace.user_code import quiet

FILE_BYTES = 2**30  # of checkpoints; what a rank is writing is in memory twice more
# torch's logger of checkpoints has a line for every tensor; a single process is no mistake here
QUIET = "c10d-NullHandler-dcp_logger", "torch.distributed is disabled"


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, which stay as they are while training goes on."""

    def copied(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or not tensor.is_cuda:
            return tensor.detach().to("cpu", copy=True)
        # a GPU copies four times as fast into memory that was written to, here by several threads
        return torch.empty_like(tensor, device="cpu").zero_().copy_(tensor.detach())

    return {name: copied(tensor) for name, tensor in tensors.items()}


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """All processes of a `group` call this, and each writes the shards it holds."""
    parts = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    broken = [name for name, part in parts.items() if not bool(torch.isfinite(part).all())]
    num_broken = torch.tensor(len(broken))
    if group is not None:  # what one finds stops all: alone, it would leave the others waiting
        all_reduce(num_broken, group=group)
    if num_broken:
        where = broken[0] if broken else "a part on another rank"
        raise ValueError(f"{where} holds what is not a finite number")
    ends = accumulate(tensor.nbytes for tensor in tensors.values())
    files = {name: end // FILE_BYTES + 1 for name, end in zip(tensors, ends, strict=True)}
    if group is not None:
        writer = HuggingFaceStorageWriter(str(directory), files, save_distributed=True)
        with _plain_errors():
            save(dict(tensors), storage_writer=writer, process_group=group)
        return
    directory.mkdir(parents=True, exist_ok=True)
    for number in sorted(set(files.values())):  # torch's own writer copies all of it twice
        file = directory / f"{number:05}.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == number}, file)
        file.chmod(directory.stat().st_mode & 0o666)  # as the umask says


def read_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place. Parts of sharded ones are filled with what belongs there."""
    with _plain_errors():
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)


def sizes_of_model(directory: Path) -> dict[str, torch.Size]:
    """The shape of every tensor of a model; none if there are files that are not the model's."""
    index, files = directory / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    if files != {path.name for path in directory.glob("*.safetensors")}:
        return {}
    found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong on the first rank: torch's own error, no `Exception`, has the traces of all in its text."""
    try:
        with quiet(*QUIET):
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, `transformers` reports errors only; afterwards its settings are as they were."""
    had_bars, had_no_downloads = is_progress_bar_enabled(), are_progress_bars_disabled()
    if had_bars:
        disable_progress_bar()
    try:
        with quiet("transformers"):
            yield
    finally:
        if had_bars:
            enable_progress_bar()
            if had_no_downloads:  # one switch of `transformers` turns on the bars of downloads too
                disable_progress_bars()


@quiet_transformers()
def save_model(model: Any, tokenizer: Any, directory: Path, weights: dict[str, Any] | None = None) -> None:
    """Write a model directory. Its files have the mode that the umask gives.

    safetensors writes files that nobody else may read, whatever the umask is.
    """
    model.save_pretrained(directory, state_dict=weights)
    tokenizer.save_pretrained(directory)
    mode = (directory / "config.json").stat().st_mode  # a file that was just opened and written
    for file in directory.rglob("*.safetensors"):
        file.chmod(mode)

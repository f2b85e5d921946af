from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from headrace.policy import tensor_files


def test_what_is_larger_than_a_file_is_written_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that a checkpoint needs the memory of one file more, and not that of all of them twice."""
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 4000)
    sizes = [300, 700, 20, 5000, 1, 600]  # floats; one is larger than a file
    tensors = {f"layer.{i}": torch.randn(size) for i, size in enumerate(sizes)}
    tensor_files.write_tensors(tmp_path, tensors)
    files = sorted(tmp_path.glob("*.safetensors"))
    held = []
    for file in files:
        with safe_open(file, "pt") as opened:
            held.append([opened.get_tensor(name).nbytes for name in opened.keys()])  # noqa: SIM118
    assert len(files) == 3
    assert all(sum(each) - max(each) <= 4000 for each in held)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    tensor_files.read_tensors(tmp_path, found)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)

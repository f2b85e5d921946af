"""Versions in a directory: other engines load them, and what is not complete is not there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from doubles import tiny_model
from safetensors.torch import load_file
from small_weights import copied, same_bits, stepped, weights

from headrace.errors import PublishError
from headrace.publish.disk import DiskReceiver, DiskSender
from headrace.publish.encoding import Encoder


def test_safetensors_reads_a_full_version_of_any_precision(tmp_path: Path) -> None:
    sender = DiskSender(tmp_path)
    sender.stage(Encoder("full", bucket_bytes=100).encode(3, weights().items()))
    assert same_bits(load_file(Path(sender.ticket(3).where) / "model.safetensors"), weights())


def test_transformers_loads_a_full_version_like_any_model(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    sender = DiskSender(tmp_path / "weights", model_dir=tmp_path / "model")
    sender.stage(Encoder("full").encode(3, model.named_parameters()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(sender.ticket(3).where)
    assert same_bits(dict(loaded.named_parameters()), copied(dict(model.named_parameters())))
    transformers.AutoTokenizer.from_pretrained(sender.ticket(3).where)


def test_what_is_forgotten_is_deleted(tmp_path: Path) -> None:
    sender, encoder = DiskSender(tmp_path), Encoder("full")
    for version in (1, 2):
        sender.stage(encoder.encode(version, weights().items()))
    sender.forget(1)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000002"]


def test_another_version_in_the_place_of_the_announced_one_is_refused(tmp_path: Path) -> None:
    sender, encoder = DiskSender(tmp_path), Encoder("full")
    sender.stage(encoder.encode(1, weights(0).items()))
    announced = sender.ticket(1)
    sender.stage(encoder.encode(1, weights(1).items()))  # a run that begins again
    with pytest.raises(PublishError, match="contains another version than the ticket says"):
        DiskReceiver().fetch(announced, 1.0)


def test_files_that_are_cut_short_although_marked_complete_are_refused(tmp_path: Path) -> None:
    sender = DiskSender(tmp_path)
    sender.stage(Encoder("full").encode(1, weights().items()))
    file = Path(sender.ticket(1).where) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(PublishError, match="bucket 1 of 1 has"):
        DiskReceiver().fetch(sender.ticket(1), 1.0)
    file.unlink()
    with pytest.raises(PublishError, match="version 1 cannot be read"):
        DiskReceiver().fetch(sender.ticket(1), 1.0)


def test_the_manifest_on_disk_says_what_the_sender_said(tmp_path: Path) -> None:
    sender, encoder = DiskSender(tmp_path), Encoder("delta", bucket_bytes=100)
    for version in (1, 2):
        sender.stage(encoder.encode(version, stepped(weights(), version).items()))
        encoder.committed(version)
        said = asdict(sender.ticket(version).manifest)
        written = json.loads((Path(sender.ticket(version).where) / "manifest.json").read_text())
        assert written.keys() == said.keys()
        assert written["tensors"] == [{**spec, "shape": list(spec["shape"])} for spec in said["tensors"]]
        assert all(
            written[name] == (list(x) if isinstance(x, tuple) else x) for name, x in said.items() if name != "tensors"
        )
        assert DiskReceiver().fetch(sender.ticket(version), 1.0).manifest == sender.ticket(version).manifest


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PublishError, match=r"version 1 cannot be written to .*file/version-00000001: Not a directory"):
        DiskSender(tmp_path / "file").stage(Encoder("full").encode(1, weights().items()))

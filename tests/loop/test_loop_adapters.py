"""A whole run that trains adapters."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Workshop, play, rank_of, rows_of, same_bits, weights

from headrace import api
from headrace.errors import RunError
from headrace.loop.loop import Loop
from headrace.measured import Row
from headrace.place.place import Place

SETTINGS = ("learner.lora_rank=4", "learner.lr=1e-2")


async def test_a_run_trains_adapters_and_writes_a_model_without(workshop: Workshop):
    places: list[Place] = []

    def watch(place: Place, loop: Loop) -> None:
        places.append(place)

    await play(workshop.config("adapters", *SETTINGS, "learner.kl_coef=0.01", reward="dense"), watch)
    run_dir = workshop.directory / "adapters"
    rows = rows_of(run_dir)
    assert [row.step for row in rows] == [1, 2, 3]
    assert all(row.grad_norm > 0 and row.mismatch_mean < 1e-5 for row in rows)
    start, end = load_file(workshop.model / "model.safetensors"), weights(run_dir)
    assert start.keys() == end.keys()
    moved = {name for name, weight in end.items() if not torch.equal(weight, start[name])}
    assert moved == {name for name in end if "_proj." in name}
    base = dict(rank_of(places[0]).policy.model.named_parameters())
    assert all(torch.equal(base[name.replace("_proj.", "_proj.base_layer.")], start[name]) for name in start)


async def test_adapters_have_an_exact_form(workshop: Workshop):
    await play(workshop.config("adapters-exact", *SETTINGS, "model.exact=true", reward="dense"))
    rows = rows_of(workshop.directory / "adapters-exact")
    assert all(row.grad_norm > 0 and row.mismatch_mean == 0.0 for row in rows)
    assert len(rows) == 3


class Impatient(api.Watcher):
    """Interrupts the run after its first step."""

    def row(self, row: Row) -> None:
        if row.step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_goes_on_with_its_adapters(workshop: Workshop, tmp_path: Path):
    api.train(workshop.config("adapters-whole", *SETTINGS, reward="dense"))
    assert not api.train(workshop.config("adapters-cut", *SETTINGS, reward="dense"), Impatient())["finished"]
    assert api.resume(workshop.directory / "adapters-cut")["finished"]
    assert same_bits(weights(workshop.directory / "adapters-cut"), weights(workshop.directory / "adapters-whole"))
    api.export(workshop.directory / "adapters-cut", tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter").exists()
    api.export(workshop.directory / "adapters-cut", tmp_path / "alone", adapter=True)
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in (tmp_path / "alone").iterdir()} == names
    (tmp_path / "without" / "model").mkdir(parents=True)
    with pytest.raises(RunError, match="no adapter: it trained all weights"):
        api.export(tmp_path / "without", tmp_path / "out", adapter=True)

"""Runs on Ray, with somebody who meddles."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from tiny_runs import Workshop, weights

from headrace import api
from headrace.ledger.ledger import Ledger
from headrace.ledger.recovery import Recovery
from headrace.loop.loop import Loop
from headrace.measured import Row
from headrace.place.place import Place
from headrace.publish.disk import DiskReceiver
from headrace.publish.encoding import Payload
from headrace.types import Ticket

IN_TURNS = ("place.layout=colocated", "publish.encoding=delta", "publish.transport=collective")
ON_RAY = ("place.cluster=ray", "rollout.workers=2", "learner.ranks=2")


@contextmanager
def local_ray(num_gpus: int = 0, **environment: str) -> Iterator[None]:
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=1,  # workers ask for none, and Ray starts an idle process for each
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment}},
    )
    try:
        yield
    finally:
        ray.shutdown()


@dataclass
class Run(api.Watcher):
    """A run and what was heard of it."""

    run_dir: Path = Path()
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    on_row: Callable[[Place, Row], None] = lambda place, row: None
    on_note: Callable[[str], None] = lambda text: None
    summary: dict[str, Any] = field(default_factory=dict)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.on_note(text)

    def row(self, row: Row) -> None:
        self.rows.append(row)
        if self.places:
            self.on_row(self.places[-1], row)


def train(
    workshop: Workshop,
    name: str,
    *settings: str,
    on_row: Callable[[Place, Row], None] = lambda place, row: None,
    on_loop: Callable[[Place, Loop], None] = lambda place, loop: None,
    on_note: Callable[[str], None] = lambda text: None,
    monkeypatch: Any = None,
) -> Run:
    """Train as `headrace train` does; `on_loop` and `on_row` get the place, and may do it harm."""
    run = Run(run_dir=workshop.directory / name, on_row=on_row, on_note=on_note)
    if monkeypatch is not None:
        built = Place.loop

        async def loop(place: Place, *args: Any) -> Loop:
            run.places.append(place)
            made = await built(place, *args)
            on_loop(place, made)
            return made

        monkeypatch.setattr(Place, "loop", loop)
    config = workshop.config(name, *workshop.settings, *settings, reward="dense")
    run.summary = api.train(config, run)
    return run


def trained_tokens(run_dir: Path) -> dict[str, list[int]]:
    """By id, the tokens of every answer that was trained on."""
    with Ledger.open(run_dir) as ledger:
        recovery = Recovery(ledger)
        groups = [pair for _, named in recovery.steps_after(0) for pair in named]
        return {t.id: t.token_ids.tolist() for pair in groups for t in recovery.trajectories(*pair)}


def assert_same_result(run_dir: Path, expected: Path, attempt: int = 1) -> None:
    """Trained on the same answers, some of which a later attempt may have sampled, and with the same weights."""
    found = {id.replace(f".{attempt}:", ":"): tokens for id, tokens in trained_tokens(run_dir).items()}
    assert found == trained_tokens(expected)
    here, there = weights(expected), weights(run_dir)
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < 1e-5


def begun_here(workshop: Workshop, name: str, stop_at: int) -> Path:
    """A strictly on-policy run in this process that stopped after a step."""

    class Stop(api.Watcher):
        def row(self, row: Row) -> None:
            if row.step == stop_at:
                raise RuntimeError("the machine is wanted for something else")

    with pytest.raises(RuntimeError, match="something else"):
        api.train(workshop.config(name, "loop.max_lag=0", reward="dense"), Stop())
    return workshop.directory / name


def kill(worker: Any) -> None:
    worker.wait_ready()  # its process is known
    os.kill(worker.pid, signal.SIGKILL)


class SlowReceiver(DiskReceiver):
    """Takes a second for every version."""

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        time.sleep(1.0)
        return super().fetch(ticket, timeout_s)


class GatedReceiver(DiskReceiver):
    """In the worker that comes first: takes no version but the first while `gate` is there."""

    def __init__(self, gate: Path) -> None:
        self._gate, self._gated = gate, False
        with suppress(FileExistsError):
            gate.with_suffix(".taken").mkdir()
            self._gated = True

    def fetch(self, ticket: Ticket, timeout_s: float) -> Payload:
        while self._gated and ticket.version and self._gate.exists():
            time.sleep(0.01)
        return super().fetch(ticket, timeout_s)

"""Kill a run that trains in a process of its own, and resume it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import forked
from tiny_runs import Workshop

from headrace import api
from headrace.config_file import load_config
from headrace.ledger.files import SUMMARY


def train(settings: list[str]) -> None:
    api.train(load_config(None, settings))


def killed_runs(workshop: Workshop, name: str, settings: tuple[str, ...]) -> Iterator[tuple[Path, Path]]:
    """An unbroken run, and two that are killed twice each; at least one of the kills hits a living process."""
    began_s = time.monotonic()
    api.train(workshop.config(name, *settings))
    took_s = time.monotonic() - began_s
    rng, num_hit = random.Random(name), 0
    for killed in (f"{name}-killed{i}" for i in range(2)):
        kills_s = [rng.uniform(0.1, 0.8) * took_s for _ in range(2)]
        num_hit += num_kills_that_hit(workshop, killed, workshop.overrides(killed, *settings), kills_s)
        yield workshop.directory / killed, workshop.directory / name
    assert num_hit, "no kill hit a living process"


def num_kills_that_hit(workshop: Workshop, name: str, settings: list[str], kills_s: list[float]) -> int:
    """SIGKILL the process after each of these many seconds and start another; the last one runs to the end."""
    directory, log = workshop.directory / name, workshop.directory / f"{name}.log"
    for num_hit, most_s in enumerate([*kills_s, 300.0]):
        summary = directory / SUMMARY
        if summary.exists() and json.loads(summary.read_text())["finished"]:  # killed on its way out
            return num_hit
        if (directory / "config.toml").exists():
            process = forked.start(log, api.resume, directory)
        else:
            process = forked.start(log, train, settings)
        process.join(most_s)
        if process.exitcode is not None:
            assert process.exitcode == 0, log.read_text()
            return num_hit
        process.kill()
        process.join()
    raise TimeoutError("the last run did not end")

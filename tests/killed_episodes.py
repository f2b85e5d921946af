"""What a killed run with episodes has kept of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headrace.errors import RunError
from headrace.ledger.journal import read_partials, read_trajectories
from headrace.ledger.ledger import Ledger
from headrace.types import Trajectory


def finished(run: Path) -> dict[tuple[int, int], Trajectory]:
    """The newest attempt at each episode that is over."""
    with Ledger.open(run) as ledger:
        found = read_trajectories(ledger.connection, "t.serial IS NOT NULL", ())
        serials = dict(ledger.read("SELECT id, serial FROM trajectories"))
    return {(serials[t.id], t.index): t for t in sorted(found, key=lambda t: len(t.id.partition(":")[0]))}


def kept_turns(run: Path) -> dict[tuple[int, int], Trajectory]:
    """Episodes under way, as a killed run left them."""
    try:
        ledger = Ledger.open(run)
    except RunError:  # it is just starting
        return {}
    with ledger:
        serials = [serial for (serial,) in ledger.read("SELECT serial FROM attempts WHERE state = 'open'")]
        return {
            (serial, episode.index): episode
            for serial in serials
            for episode in read_partials(ledger.connection, serial)
        }


def kill_in_mid_episode(process: Any, run: Path, more_s: float | None, turns: int = 2) -> None:
    """Kill the process some time after an episode has so many turns; or let it come to its end."""
    if more_s is None:
        process.join(300)
    else:
        while process.is_alive() and not any(len(t.turns) >= turns for t in kept_turns(run).values()):
            time.sleep(0.01)
        time.sleep(more_s)
    process.kill()
    process.join()

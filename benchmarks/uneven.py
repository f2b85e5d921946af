"""What it gains that a rollout worker with nothing to do takes over groups of a slower one.

    python benchmarks/uneven.py                  # about three minutes
    python benchmarks/uneven.py --step-ms 30 --slower 2

Two rollout workers on a Ray cluster of this machine, and a tiny model at `loop.max_lag = 0`. Every decode step takes at
least `--step-ms`, and `--slower` times as long in one of the workers. One run with equal workers, one with a slow one
whose groups stay, one with a slow one whose groups may move. Printed are the median times of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headrace import api
from headrace.config_file import DEMO, load_config
from headrace.ledger.ledger import Ledger
from headrace.place import place
from headrace.publish.object_store_ray import ObjectStoreReceiver, ObjectStoreSender
from headrace.rollout import pool
from headrace.rollout.engine import Engine
from headrace.runs.audit import audit

STEPS, SKIPPED = 4, 1


class Slowing(ObjectStoreReceiver):
    """Made in each worker's process, it makes decode steps there take longer; the worker that comes first is slow."""

    def __init__(self, step_s: float, slower: float, taken: Path) -> None:
        with suppress(FileExistsError):
            taken.mkdir()
            step_s *= slower
        fast = Engine.advance

        def advance(engine: Engine) -> Any:
            end_s = time.monotonic() + step_s
            found = fast(engine)
            time.sleep(max(0.0, end_s - time.monotonic()))
            return found

        Engine.advance = advance  # type: ignore[method-assign]


def median_step_s(directory: Path, step_s: float, slower: float, *, moves: bool) -> float:
    place._ends = lambda *of_run: (ObjectStoreSender, partial(Slowing, step_s, slower, directory.with_suffix(".taken")))
    settings = {
        "run.dir": directory, "model.path": "demo", "place.cluster": "ray", "rollout.workers": 2, "loop.max_lag": 0,
        "loop.steps": STEPS, "loop.groups_per_step": 96, "rollout.samples": 4, "prompts.eval_count": 8,
        "rollout.max_running": 16, "rollout.max_new_tokens": 96, "model.threads": 1, "buffer.drop": "nothing",
        "prompts.source": f"{DEMO.parent}/arithmetic.py:tasks", "reward.function": f"{DEMO.parent}/arithmetic.py:score",
    }  # fmt: skip
    with patch.object(pool, "MOVE_ANSWERS", pool.MOVE_ANSWERS if moves else 1 << 30):
        api.train(load_config(None, [f"{key}={value}" for key, value in settings.items()]), api.Watcher())
    with Ledger.open(directory) as ledger:
        steps_s = [row.wall_s for row in ledger.rows()[SKIPPED:]]
    if problems := audit(directory):
        raise SystemExit(f"the books are not in order: {problems}")
    return statistics.median(steps_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--slower", type=float, default=2.0)
    arguments = parser.parse_args()
    step_s, slower = arguments.step_ms / 1000, arguments.slower
    with tempfile.TemporaryDirectory() as directory:
        room = Path(directory)
        equal = median_step_s(room / "equal", step_s, 1.0, moves=False)
        stay = median_step_s(room / "stay", step_s, slower, moves=False)
        move = median_step_s(room / "move", step_s, slower, moves=True)
    print(f"median step: {equal:.2f} s with equal workers; with one {slower:g} times slower {stay:.2f} s where its")
    print(f"groups stay and {move:.2f} s where they may move: {1 - move / stay:.0%} less; the books are in order")


if __name__ == "__main__":
    main()

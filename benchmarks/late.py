"""Whether a rollout worker that is slow to take new weights delays the others.

    python benchmarks/late.py                    # about three minutes
    python benchmarks/late.py --seconds 5 --lag 2

Two rollout workers on a Ray cluster of this machine, and a tiny model. In the first run both fetch at once, in the
second one of them takes `--seconds` longer for every version. Printed is the median time of a step in both, and their
ratio; the versions that the late worker took; how old the trained tokens were; and whether the books are in order.
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

from headrace import api
from headrace.config_file import DEMO, load_config
from headrace.ledger.ledger import Ledger
from headrace.measured import Row
from headrace.place import place
from headrace.publish.object_store_ray import ObjectStoreReceiver, ObjectStoreSender
from headrace.runs.audit import audit

STEPS, SKIPPED = 40, 4  # steps in which everything warms up


class SlowReceiver(ObjectStoreReceiver):
    """Slow in the worker that comes first, except for the first version."""

    def __init__(self, seconds: float, taken: Path) -> None:
        self._seconds = 0.0
        with suppress(FileExistsError):
            taken.mkdir()
            self._seconds = seconds

    def fetch(self, ticket: Any, timeout_s: float) -> Any:
        time.sleep(self._seconds if ticket.version else 0.0)
        return super().fetch(ticket, timeout_s)


class Listener(api.Watcher):
    """Keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        print(f"  said: {text}")


def steps(directory: Path, seconds: float, lag: float) -> tuple[list[float], list[Row], list[list[int]]]:
    """Seconds of each step, the rows, and the versions that each worker took."""
    place._ends = lambda *of_run: (ObjectStoreSender, partial(SlowReceiver, seconds, directory.with_suffix(".taken")))
    settings = {
        "run.dir": directory, "model.path": "demo", "place.cluster": "ray", "rollout.workers": 2, "loop.max_lag": lag,
        "loop.steps": STEPS, "loop.groups_per_step": 8, "rollout.samples": 4, "prompts.eval_count": 8,
        "rollout.max_new_tokens": 16, "model.threads": 1, "buffer.drop": "nothing",
        "prompts.source": f"{DEMO.parent}/arithmetic.py:tasks", "reward.function": f"{DEMO.parent}/arithmetic.py:score",
    }  # fmt: skip
    listener = Listener()
    api.train(
        load_config(None, [f"{key}={value}".replace("False", "false") for key, value in settings.items()]), listener
    )
    with Ledger.open(directory) as ledger:
        found = ledger.read("SELECT worker, version FROM spans WHERE detail = 'apply' ORDER BY start_s")
    taken: dict[str, list[int]] = {}
    for worker, version in found:
        taken.setdefault(worker, []).append(version)
    if problems := audit(directory):
        raise SystemExit(f"the books are not in order: {problems}")
    return [row.wall_s for row in listener.rows[SKIPPED:]], listener.rows, sorted(taken.values(), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--lag", type=float, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        usual, _, _ = steps(Path(directory) / "usual", 0.0, arguments.lag)
        slow, rows, taken = steps(Path(directory) / "slow", arguments.seconds, arguments.lag)
    median, median_slow = statistics.median(usual), statistics.median(slow)
    print(f"median step: {median:.3f} s, and {median_slow:.3f} s where one worker takes {arguments.seconds:g} s longer")
    print(f"ratio {median_slow / median:.2f}; the longest step took {max(usual):.2f} s and {max(slow):.2f} s")
    print(f"versions: the late worker took {taken[0]}, the other {len(taken[-1])}")
    print(f"lag of trained tokens: at most {max(row.lag_max for row in rows)}; the books are in order")


if __name__ == "__main__":
    main()

"""The demo alone, and with one core taken by another process: how much of its speed it keeps. See benchmarks/README.md.

    python benchmarks/beside.py              # some minutes on two cores
    python benchmarks/beside.py --steps 5 --repeats 1 --out /tmp/beside.json

Each run is a process of its own, on --cores cores. Runs alone and runs beside a busy process take turns.
Timed is what a newcomer waits for: from the first warm-start step to the last row, without the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from demo import Stopwatch
from script import commit, positive

from headrace.api import train
from headrace.config_file import DEMO, load_config

OUT = Path("docs/results/beside.json")
KEPT = 0.45  # of the speed alone: the target
BUSY = "while True: pass"


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(Path(arguments.child), arguments.steps)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    load = os.getloadavg()[0]
    seconds: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(arguments.repeats):
        seconds["alone"].append(_timed(arguments.steps))
        busy = subprocess.Popen([sys.executable, "-c", BUSY])
        try:
            seconds["beside"].append(_timed(arguments.steps))
        finally:
            busy.kill()
            busy.wait()
        print({name: [round(s, 1) for s in values] for name, values in seconds.items()}, flush=True)
    kept = statistics.median(seconds["alone"]) / statistics.median(seconds["beside"])
    results = {
        "kept_share": kept,
        "target": KEPT,
        "seconds": seconds,
        "steps": arguments.steps,
        "cores": arguments.cores,
        "load_before": load,
        "machine": platform.machine(),
        "commit": commit(),
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"beside a busy process the demo keeps {kept:.0%} of its speed alone (target: {KEPT:.0%})")


def _timed(steps: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--child", directory, "--steps", str(steps)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _child(directory: Path, steps: int) -> None:
    settings = [f"run.dir={directory / 'run'}", f"loop.steps={steps}", f"warmstart.steps={4 * steps}"]
    watch = Stopwatch(alone=True)
    train(load_config(DEMO, [*settings, "loop.target_reward=2"]), watch)
    print(watch.ended_s - watch.begun_s)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=15, help="RL steps, after four times as many of warm start")
    parser.add_argument("--repeats", type=positive, default=3, help="of both; medians are compared")
    parser.add_argument("--cores", type=positive, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What recovery costs and whether it holds: checkpoints' share of the demo, the time to resume it, kills at random.

    python benchmarks/recovery.py cost                    # the demo with checkpoints; killed in the middle and resumed
    python benchmarks/recovery.py soak --kills 50         # short runs, killed with SIGKILL at random instants

`cost` runs `headrace train` and `headrace resume` as a user does. `soak` compares the weights of every run that was
killed with those of one that was not, bit for bit (`equal`), and audits its books.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.config_file import DEMO
from headrace.errors import RunError
from headrace.ledger.ledger import Ledger
from headrace.measured import STALL
from headrace.runs.audit import audit, books

SHORT = [
    "model.path=demo",
    "model.device=cpu",
    "model.threads=1",
    "warmstart.steps=0",
    f"prompts.source={DEMO.parent}/arithmetic.py:tasks",
    f"reward.function={DEMO.parent}/arithmetic.py:score",
    "prompts.eval_count=4",
    "rollout.samples=4",
    "rollout.max_new_tokens=16",
    "buffer.drop=nothing",
    "learner.lr=3e-4",
    "loop.steps=20",
    "loop.groups_per_step=4",
    "recovery.every_steps=6",
]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", *words]


def rows_of(run: Path) -> int:
    if not (run / "ledger.sqlite").exists():
        return 0
    with Ledger.open(run) as ledger:
        return len(ledger.rows())


# ---- what it costs


def cost(directory: Path, kill_after: int) -> None:
    """The demo: killed after so many steps, resumed to its end."""
    run = directory / "demo"
    with subprocess.Popen(command("train", f"run.dir={run}"), stdout=subprocess.DEVNULL) as process:
        while rows_of(run) < kill_after:
            time.sleep(0.1)
            assert process.poll() is None, "the demo ended too soon"
        process.send_signal(signal.SIGKILL)
    held = rows_of(run)
    started = time.perf_counter()
    with subprocess.Popen(command("resume", str(run)), stdout=subprocess.DEVNULL) as process:
        resumed_s = first_row_s = 0.0
        while process.poll() is None and not first_row_s:
            time.sleep(0.02)
            with Ledger.open(run) as ledger:
                if not resumed_s and ledger.restarts():
                    resumed_s = time.perf_counter() - started
                if len(ledger.rows()) > held:
                    first_row_s = time.perf_counter() - started
        assert process.wait() == 0
    assert audit(run) == []
    with Ledger.open(run) as ledger:
        (restart,) = ledger.restarts()
        steps_s = sum(row.wall_s for row in ledger.rows())
        query = "SELECT end_s - start_s FROM spans WHERE stage = 'checkpoint' AND detail = ?"
        spans = [seconds for (seconds,) in ledger.read(query, (STALL,))]
    stalled_s = sum(spans)
    print(f"killed after step {held}; resumed from the checkpoint of step {restart.checkpoint}")
    print(f"resume: {resumed_s:.1f} s from the command until {restart.redone_steps} steps were taken again")
    print(f"        {first_row_s:.1f} s until the first new step was done")
    print(
        f"checkpoints: {len(spans)}, {1e3 * stalled_s / len(spans):.0f} ms each, {stalled_s / steps_s:.2%} of the steps"
    )
    print(f"lost in flight: {restart.lost_trajectories} answers, {restart.lost_tokens} tokens")


# ---- whether it holds


def soak(directory: Path, num_kills: int, max_lag: int, seed: int) -> None:
    """Runs that are killed up to three times each, until there were so many kills."""
    rng, settings = random.Random(seed), [*SHORT, f"loop.max_lag={max_lag}"]
    whole = directory / "whole"
    started = time.perf_counter()
    subprocess.run(command("train", f"run.dir={whole}", *settings, "--quiet"), check=True)
    whole_s = time.perf_counter() - started
    with Ledger.open(whole) as ledger:
        steps_s = sum(row.wall_s for row in ledger.rows())
    weights = (whole / "model" / "model.safetensors").read_bytes()
    kills = runs = same = 0
    lost = 0
    while kills < num_kills:
        run = directory / f"run{runs}"
        # a fifth of the kills comes before the steps begin or go on, the others somewhere in what they take
        early = [rng.random() < 0.2 for _ in range(3)]
        delays_s = [rng.uniform(0, whole_s - steps_s if is_early else steps_s) for is_early in early]
        kills += killed(run, settings, list(zip(early, delays_s, strict=True)))
        problems = audit(run)
        assert not problems, (run, problems)
        same += (run / "model" / "model.safetensors").read_bytes() == weights
        lost += books(run).dropped["redone"].tokens if "redone" in books(run).dropped else 0
        runs += 1
        with Ledger.open(run) as ledger:
            at = [f"{r.version} (+{r.redone_steps} steps, {r.lost_trajectories} answers)" for r in ledger.restarts()]
        print(f"{runs} runs, {kills} kills, {same} equal; {lost} tokens redone; resumed at {', '.join(at)}", flush=True)
    if max_lag == 0:
        assert same == runs
    print(f"unbroken: {whole_s:.1f} s, {steps_s:.1f} s of it steps, {books(whole).generated.tokens} tokens")


def killed(run: Path, settings: list[str], kills: list[tuple[bool, float]]) -> int:
    """How many kills hit, on the way to the end of a run; each is (before the steps?, seconds to wait)."""
    for num_hit, (early, delay_s) in enumerate([*kills, (True, 600.0)]):
        summary = run / "summary.json"
        if summary.exists() and json.loads(summary.read_text())["finished"]:
            return num_hit
        before = num_restarts(run)
        words = ("resume", str(run)) if (run / "config.toml").exists() else ("train", f"run.dir={run}", *settings)
        with subprocess.Popen(command(*words, "--quiet"), env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
            while not early and num_restarts(run) == before and process.poll() is None:
                time.sleep(0.01)
            try:
                assert process.wait(delay_s) == 0
                return num_hit
            except subprocess.TimeoutExpired:
                process.kill()
    raise TimeoutError(f"{run} did not end")


def num_restarts(run: Path) -> int:
    """-1 while there is no ledger."""
    try:
        with Ledger.open(run) as ledger:
            return len(ledger.restarts())
    except RunError:  # not there, or just being made
        return -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "soak"])
    parser.add_argument("--kill-after", type=int, default=30, help="steps of the demo (cost)")
    parser.add_argument("--kills", type=int, default=50, help="in all (soak)")
    parser.add_argument("--max-lag", type=int, default=0, help="loop.max_lag (soak)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants (soak)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.what == "cost":
            cost(Path(directory), options.kill_after)
        else:
            soak(Path(directory), options.kills, options.max_lag, options.seed)


if __name__ == "__main__":
    main()

"""The demo, seed by seed: scores, time and arithmetic. See benchmarks/README.md.

    python benchmarks/demo.py                            # seeds 0 to 4, each at max_lag 0 and 4, one after the other
    python benchmarks/demo.py --at-once 2                # two runs at a time with one thread each: CPU time, then
    python benchmarks/demo.py --seeds 1 --lags 0 --out /tmp/demo.json
    python benchmarks/demo.py --report                   # write the page again from the JSON, without running

Each run is `headrace.train` in a process of its own. FLOPs are those of matrix products and attention, counted by torch
on the demo's model, per token, times the tokens that the run warmed up on, sampled, trained on and evaluated with.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from script import commit, positive
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from headrace.api import Watcher, train
from headrace.config_file import DEMO, load_config
from headrace.measured import Row
from headrace.policy.demo import build_demo
from headrace.recipes.arithmetic import tasks

OUT = Path("docs/results/demo.json")
BELOW, ABOVE = 0.45, 0.90  # the scores before and after, targets
MAX_TFLOP = 6.0
FIRST_STEP = 0.25  # the first RL step comes within this share of the time
RECORDS = 2000  # of the source, for mean lengths


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(json.loads(arguments.child))
    if not arguments.report:
        jobs = [{"seed": seed, "max_lag": lag} for lag in arguments.lags for seed in arguments.seeds]
        if arguments.at_once > 1:
            jobs = [job | {"threads": 1} for job in jobs]
        results: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "machine": f"{platform.machine()}, torch {torch.__version__}",
            "at_once": arguments.at_once,
            "settings": tomllib.loads(DEMO.read_text()),
            "runs": [],
        }
        with ThreadPoolExecutor(arguments.at_once) as threads:
            for run in threads.map(_run, jobs):  # what is done is kept, should a later one fail
                results["runs"].append(run)
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(arguments.out.read_text())
    arguments.out.with_suffix(".md").write_text(page(results))
    print(page(results))


@dataclass(frozen=True)
class Flops:
    """Of one token of the demo's model, in sequences of the demo's mean length."""

    forward: float
    training: float
    prompt_tokens: float
    solution_tokens: float

    def tera(self, run: dict[str, Any], settings: dict[str, Any]) -> float:
        """TFLOP of a whole run: warm start, generation, training, and an evaluation before and after."""
        sequence = self.prompt_tokens + self.solution_tokens
        warm = settings["warmstart"]["steps"] * settings["warmstart"]["examples"] * sequence * self.training
        answers = run["generated_tokens"] / self.solution_tokens
        prompts = answers / settings["rollout"]["samples"]  # the answers to a prompt share its prefill
        generation = (run["generated_tokens"] + prompts * self.prompt_tokens) * self.forward
        learning = self.training + (self.forward if settings["learner"].get("kl_coef") else 0.0)  # and the reference
        training = run["trained_tokens"] * sequence / self.solution_tokens * learning
        evaluation = 2 * settings["prompts"]["eval_count"] * sequence * self.forward
        return (warm + generation + training + evaluation) / 1e12


def count_flops() -> Flops:
    """By torch's counter, on a forward and a backward pass of the model that the demo makes."""
    with tempfile.TemporaryDirectory() as directory:
        build_demo(Path(directory), seed=0)
        model = AutoModelForCausalLM.from_pretrained(directory)
    records = tasks(count=RECORDS, seed=0)
    prompt = sum(len(record["prompt"]) for record in records) / RECORDS
    solution = sum(len(record["worked"]) + 1 for record in records) / RECORDS  # and the end token
    length = round(prompt + solution)
    counter = FlopCounterMode(display=False)
    with counter:
        loss = model(torch.zeros(1, length, dtype=torch.int64)).logits.sum()
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    backward = counter.get_total_flops()
    return Flops(forward / length, (forward + backward) / length, prompt, solution)


def page(results: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    flops, settings = count_flops(), results["settings"]
    lines = [
        "# The demo, seed by seed",
        "",
        f"Measured on {results['date']} at commit `{results['commit'][:7]}` ({results['machine']}, float32) with",
        "",
        f"    python benchmarks/demo.py --at-once {results['at_once']}",
        "",
        "| run | held-out score | steps | sampled tokens | trained on | TFLOP | time | first RL step after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        name = f"seed {run['seed']}" + (f", `loop.max_lag={run['max_lag']}`" if run["max_lag"] else "")
        lines.append(
            f"| {name} | {run['score_before']:.3f} → {run['score_after']:.3f} | {run['steps']} | "
            f"{run['generated_tokens']:,} | {run['trained_tokens'] / run['generated_tokens']:.0%} | "
            f"{flops.tera(run, settings):.1f} | {run['seconds']:.0f} s | {run['first_step_share']:.0%} |"
        )
    worst = max(flops.tera(run, settings) for run in results["runs"])
    lowest, highest = min(r["score_after"] for r in results["runs"]), max(r["score_before"] for r in results["runs"])
    lines += [
        "",
        f"Targets: from below {BELOW} (at most {highest:.3f} here) to above {ABOVE} (at least {lowest:.3f} here),",
        f"at most {MAX_TFLOP:.0f} TFLOP (at most {worst:.1f} here), the first RL step within {FIRST_STEP:.0%} of",
        "the time.",
        "",
        f"The score is that of {settings['prompts']['eval_count']} held-out prompts, one sampled answer each; its",
        "standard error is about 0.01 at 0.95. What is not trained on was dropped because all answers to a prompt",
        'got the same reward, towards the end nearly always "all right". The time is from the first warm-start step',
        "to the last row, without the imports. TFLOP are counted by torch's `FlopCounterMode`, per token, times the",
        "tokens of the run.",
    ]
    if results["at_once"] > 1:
        lines.append(f"With {results['at_once']} runs at a time, the time is that of the training process on its CPU.")
    return "\n".join(lines) + "\n"


def _run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    run = json.loads(done.stdout.splitlines()[-1])
    print(run, flush=True)
    return run


class Stopwatch(Watcher):
    """From the first phase to the first and the last row; CPU time of this process where it is not `alone`."""

    begun_s = first_s = last_s = 0.0

    def __init__(self, *, alone: bool) -> None:
        self.now = time.perf_counter if alone else time.process_time

    def phase(self, text: str) -> None:
        self.begun_s = self.begun_s or self.now()

    def row(self, row: Row) -> None:
        self.last_s = self.now()
        self.first_s = self.first_s or self.last_s


def _child(job: dict[str, Any]) -> None:
    watch = Stopwatch(alone="threads" not in job)
    with tempfile.TemporaryDirectory() as directory:
        settings = [f"run.dir={directory}/run", f"run.seed={job['seed']}", f"loop.max_lag={job['max_lag']}"]
        summary = train(load_config(DEMO, [*settings, f"model.threads={job.get('threads', 0)}"]), watch)
    kept = ("score_before", "score_after", "steps", "generated_tokens", "trained_tokens")
    seconds = watch.last_s - watch.begun_s
    share = (watch.first_s - watch.begun_s) / seconds
    print(json.dumps(job | {key: summary[key] for key in kept} | {"seconds": seconds, "first_step_share": share}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4])
    parser.add_argument(
        "--at-once", type=positive, default=1, help="runs at a time; with more than one each has one thread"
    )
    parser.add_argument("--report", action="store_true", help="only write the page again")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

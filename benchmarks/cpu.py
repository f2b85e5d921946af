"""Speed and memory on a CPU, beside TRL and `model.generate` in the same run. See benchmarks/README.md.

    python benchmarks/cpu.py                 # everything, about ten minutes on two quiet cores
    python benchmarks/cpu.py --only tail --steps 5 --repeats 1 --out /tmp/cpu.json
    python benchmarks/cpu.py --report        # write the page again from the JSON, without measuring
    python benchmarks/cpu.py --against DIR   # only Headrace, in turns with that of another checkout of this repository

This process only starts others and waits: each contender runs in its own, one after the other, again in each repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from cpu_job import PROMPTS, SAMPLES, Job, Record, peak_rss_bytes, pin
from cpu_report import page, summary_table
from script import ROOT, commit

OUT = Path("docs/results/cpu.json")
SKIPPED = 2  # the first steps warm up caches, allocators and thread pools
MAX_NEW_TOKENS = {"equal": 32, "tail": 256}
CONTENDERS = ("generate", "engine", "trl", "headrace")
ONCE = ("trl_small", "headrace_small")  # in the first repeat only: their memory is of interest, not their speed


def main() -> None:
    arguments = _arguments()
    if arguments.role == "prepare":
        return _prepare(Path(arguments.where), arguments.threads)
    if arguments.role == "contender":
        return _contend(arguments.name, Job(**json.loads(arguments.job)), Path(arguments.where))
    if not arguments.report and arguments.steps <= SKIPPED:
        raise SystemExit(f"--steps must be more than {SKIPPED}: that many are skipped as warm-up")
    if arguments.against:
        return compare(arguments)
    if not arguments.report:
        results = measure(arguments)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(arguments.out.read_text())
    arguments.out.with_suffix(".md").write_text(page(results))
    print(summary_table(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help=f"per contender and repeat; {SKIPPED} are not counted")
    parser.add_argument("--repeats", type=int, default=3, help="the median is reported")
    parser.add_argument("--only", choices=list(MAX_NEW_TOKENS), help="one kind of lengths")
    parser.add_argument("--threads", type=int, default=2, help="and cores")
    parser.add_argument("--models", type=Path, help="keep the models here, and use those that are here already")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON; the page is written beside it")
    parser.add_argument("--against", type=Path, help="another checkout, e.g. a git worktree of an older commit")
    parser.add_argument("--report", action="store_true", help="only write the page from the JSON")
    roles = parser.add_subparsers(dest="role", metavar="")  # what this script starts itself as
    prepare = roles.add_parser("prepare")
    prepare.add_argument("where")
    contender = roles.add_parser("contender")
    for name in ("name", "job", "where"):
        contender.add_argument(name)
    return parser.parse_args()


# ---- the measuring process


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everybody, and say where and on what."""
    regimes = [arguments.only] if arguments.only else list(MAX_NEW_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        models = arguments.models or Path(scratch)
        if not (models / "facts.json").exists():
            print("making the models", flush=True)
            _start(["--threads", str(arguments.threads), "prepare", str(models)], arguments.threads)
        runs = _run_all(regimes, models.resolve(), arguments)
        facts = json.loads((models / "facts.json").read_text())
    return {
        "commit": commit(),
        "command": shlex.join(["python", "benchmarks/cpu.py", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": _machine(arguments.threads),
        "model": facts,
        "steps": arguments.steps,
        "skipped": SKIPPED,
        "repeats": arguments.repeats,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "regimes": {name: {"max_new_tokens": MAX_NEW_TOKENS[name], "runs": runs[name]} for name in regimes},
    }


def _run_all(regimes: list[str], models: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Interleaved, so that a slow minute of the machine meets everybody."""
    runs: dict[str, list[dict[str, Any]]] = {regime: [] for regime in regimes}
    for repeat in range(arguments.repeats):
        for regime in regimes:
            for name in CONTENDERS + (ONCE if repeat == 0 else ()):
                run = {"contender": name, "repeat": repeat, **_run(name, _job(models, regime, arguments, repeat))}
                runs[regime].append(run)
                speed = f"{run['tokens_per_s']:7.0f} tok/s {run['peak_rss_bytes'] / 2**20:6.0f} MiB"
                print(f"{regime:5s} {repeat} {name:14s} {speed}", flush=True)
    return runs


def compare(arguments: argparse.Namespace) -> None:
    """Print the speed of engine and loop as a share of the other checkout's, both run in turns, with medians."""
    checkouts = {"there": arguments.against.resolve(), "here": ROOT}
    if not (checkouts["there"] / "benchmarks" / "cpu.py").exists():
        raise SystemExit(f"--against {arguments.against}: that is no checkout of this repository")
    with tempfile.TemporaryDirectory() as scratch:
        models = (arguments.models or Path(scratch)).resolve()
        if not (models / "facts.json").exists():
            _start(["--threads", str(arguments.threads), "prepare", str(models)], arguments.threads)
        for regime in [arguments.only] if arguments.only else list(MAX_NEW_TOKENS):
            for name in ("engine", "headrace"):
                speeds: dict[str, list[float]] = {where: [] for where in checkouts}
                for repeat in range(arguments.repeats):
                    for where, root in checkouts.items():
                        job = _job(models, regime, arguments, repeat)
                        speeds[where].append(_run(name, job, root)["tokens_per_s"])
                here, there = statistics.median(speeds["here"]), statistics.median(speeds["there"])
                tried = {where: [round(speed) for speed in found] for where, found in speeds.items()}
                print(
                    f"{regime:5s} {name:8s} {here / there:.3f} of the other checkout's speed: {tried} tok/s", flush=True
                )


def _job(models: Path, regime: str, arguments: argparse.Namespace, repeat: int) -> Job:
    return Job(
        model=str(models / regime),
        prompts=str(models / "prompts.jsonl"),
        max_new_tokens=MAX_NEW_TOKENS[regime],
        steps=arguments.steps,
        threads=arguments.threads,
        seed=repeat,
    )


def _run(name: str, job: Job, root: Path = ROOT) -> dict[str, Any]:
    """One contender in a process of its own, and what it measured, boiled down."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "record.json"
        _start(["contender", name, json.dumps(asdict(job)), str(result)], job.threads, root)
        record = json.loads(result.read_text())
    tokens = [sum(lengths) for lengths in record["lengths"]]
    counted = [length for lengths in record["lengths"][SKIPPED:] for length in lengths]
    mean = sum(counted) / len(counted)
    return {
        "tokens_per_s": sum(tokens[SKIPPED:]) / sum(record["seconds"][SKIPPED:]),
        "peak_rss_bytes": record["peak_rss_bytes"],
        "length_mean": mean,
        "length_cv": (sum((length - mean) ** 2 for length in counted) / len(counted)) ** 0.5 / mean,
        "length_min": min(counted),
        "length_max": max(counted),
        "load_before": load,
        "step_seconds": record["seconds"],
        "step_tokens": tokens,
        "step_longest": [max(lengths) for lengths in record["lengths"]],
        "notes": record["notes"],
    }


def _start(arguments: list[str], threads: int, root: Path = ROOT) -> None:
    """This script again, in another process, with the package of the checkout `root`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(root / "benchmarks" / "cpu.py"), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{shlex.join(arguments[:2])} failed with exit code {done.returncode}")


def _machine(threads: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "trl", "numpy")
    return {
        "cpu": _cpu_name(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def _cpu_name() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines.splitlines() if line.startswith("Model name")]
    return names[0] if names else "unknown"


# ---- the other processes


def _prepare(models: Path, threads: int) -> None:
    pin(threads)
    model = import_module("cpu_model")
    models.mkdir(parents=True, exist_ok=True)
    model.write_prompts(models / "prompts.jsonl")
    num_weights = model.build(models / "equal", endless=True)
    model.build_tail(models / "tail")
    (models / "facts.json").write_text(json.dumps({"architecture": "Qwen3", "num_weights": num_weights}))


def _contend(name: str, job: Job, result: Path) -> None:
    pin(job.threads)
    runs = {
        "generate": lambda: import_module("cpu_generate").run,
        "engine": lambda: import_module("cpu_headrace").run_engine,
        "trl": lambda: import_module("cpu_trl").run,
        "trl_small": lambda: partial(import_module("cpu_trl").run, small=True),
        "headrace": lambda: import_module("cpu_headrace").run_loop,
        "headrace_small": lambda: partial(import_module("cpu_headrace").run_loop, small=True),
    }
    record: Record = runs[name]()(job)
    record.peak_rss_bytes = max(record.peak_rss_bytes, peak_rss_bytes())
    result.write_text(json.dumps(asdict(record)))


if __name__ == "__main__":
    main()

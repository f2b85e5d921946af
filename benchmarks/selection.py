"""Prompts drawn uniformly against prompts drawn by signal, at equal generated tokens. See benchmarks/README.md.

    python benchmarks/selection.py                                   # the demo, seeds 0 to 4
    python benchmarks/selection.py --data mixed                      # 900 prompts; one in three cannot be solved
    python benchmarks/selection.py --model RUN/model --seeds 0 1 2   # from a policy that has learnt already

All runs begin with one model: the demo after its warm start, or `--model`. Each goes on until it has generated
`--tokens`, at a constant learning rate, and is evaluated every ten steps on the demo's held-out prompts, and at its end
on more that are made for it. A run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from script import commit, positive, result_of

from headrace.api import Watcher, evaluate_run, train
from headrace.config_file import DEMO, load_config
from headrace.errors import StalledError
from headrace.measured import Row
from headrace.recipes.arithmetic import tasks

EVERY = 10  # steps between evaluations
NUM_MIXED, ONE_IN = 900, 3  # prompts, and how many of them have an answer that is wrong
TASK = f"{DEMO.parent}/arithmetic.py"
AT_THE_END = (f"prompts.eval_source={TASK}:tasks", "prompts.eval_count=2048")
COMMON = ("loop.target_reward=10", "learner.schedule=constant", "model.threads=1")


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as directory:
        model, data = arguments.model, []
        if model is None:
            settings = ["loop.steps=1", "learner.lr=1e-12", f"run.dir={directory}/warm", *COMMON]
            train(load_config(DEMO, settings))
            model = f"{directory}/warm/model"
        if arguments.data == "mixed":
            data = mixed(Path(directory) / "mixed.jsonl")
        runs = [
            _run(arguments.tokens, select, seed, [*data, f"model.path={model}"], f"{directory}/{select}-{seed}")
            for seed in arguments.seeds
            for select in ("uniform", "signal")
        ]
    print(json.dumps({"commit": commit(), "data": arguments.data, "tokens": arguments.tokens, "runs": runs}))


def mixed(path: Path) -> list[str]:
    """Settings for a data set in which one prompt in `ONE_IN` cannot be solved, and problems as they are held out."""
    source = tasks(count=NUM_MIXED, seed=99)
    with path.open("w") as file:
        for i in range(NUM_MIXED):
            wrong = {"answer": f"1{source[i]['answer']}"} if i % ONE_IN == 0 else {}
            file.write(json.dumps({"id": f"m{i}", **source[i], **wrong}) + "\n")
    return [f"prompts.source={path}", f"prompts.eval_source={TASK}:tasks", f"reward.function={TASK}:score"]


def _run(tokens: int, select: str, seed: int, settings: list[str], directory: str) -> dict[str, Any]:
    settings = [*settings, f"run.dir={directory}", f"prompts.select={select}", f"run.seed={seed}"]
    job = {"tokens": tokens, "settings": settings, "directory": directory}
    run = {"select": select, "seed": seed, **result_of(__file__, job)}
    print(
        f"{select:8} seed {seed}: {run['no_signal'] / run['generated']:.1%} dropped as no_signal, held-out scores:",
        f"{run['score']:.3f} at the end,",
        *(f"{score:.3f} at {at:,}" for at, score in run["scores"]),
        flush=True,
    )
    return run


class Meter(Watcher):
    """Adds up tokens, and ends the run once enough were generated."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.generated, self.no_signal, self.steps = tokens, 0, 0, 0
        self.scores: list[tuple[int, float]] = []
        self.rows: list[Row] = []

    def row(self, row: Row) -> None:
        self.rows.append(row)
        if self.generated >= self.tokens:
            return
        self.generated, self.steps = self.generated + row.generated_tokens, row.step
        self.no_signal += row.dropped_tokens.get("no_signal", 0)
        if row.score is not None:
            self.scores.append((self.generated, row.score))
        if self.generated >= self.tokens:
            os.kill(os.getpid(), signal.SIGINT)


def score_in_the_end(settings: list[str], meter: Meter, run_dir: str) -> float | None:
    """Trains the demo with these settings; None if no answer was right any more: there was nothing to train on."""
    try:
        train(load_config(DEMO, [*COMMON, *settings, f"run.dir={run_dir}"]), meter)
    except StalledError:
        return None
    return evaluate_run(run_dir, AT_THE_END)


def _child(job: dict[str, Any]) -> None:
    meter = Meter(job["tokens"])
    train(load_config(DEMO, [*COMMON, "warmstart.steps=0", f"loop.eval_every={EVERY}", *job["settings"]]), meter)
    found = {name: getattr(meter, name) for name in ("steps", "generated", "no_signal", "scores")}
    print(json.dumps(found | {"score": evaluate_run(job["directory"], AT_THE_END)}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=positive, default=150_000, help="that a run generates")
    parser.add_argument("--data", choices=["demo", "mixed"], default="demo")
    parser.add_argument("--model", help="directory to begin with; the demo after its warm start, if none is given")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""A sparse reward: GRPO, replay, trajectory balance, at equal generated tokens. See benchmarks/README.md.

    python benchmarks/sparse.py --json docs/results/sparse.json            # 3 seeds of each
    python benchmarks/sparse.py --ways GRPO "replay, four epochs" --seeds 0

All runs begin with one model, that of recipes/sparse.toml after its warm start, and go on until they have generated
`--tokens`. The score is that of 2,048 problems that none of them drew, one sampled answer each. A run is a process of
its own with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from contextlib import suppress
from typing import Any

from script import ROOT, all_of, commit, options_of_runs, result_of
from selection import Meter

from headrace.api import evaluate_run, train
from headrace.config_file import load_config
from headrace.errors import StalledError

RECIPE = ROOT / "src/headrace/recipes/sparse.toml"
ONCE, ONE_UPDATE = "buffer.replay=[0,4]", "learner.epochs=1"
SIGNAL = ["loop.groups_per_step=1", "buffer.drop=no_signal", "buffer.patience=1000"]
WAYS = {  # what differs from the recipe
    "GRPO": [ONCE, ONE_UPDATE],
    "GRPO, learning rate 1e-3": [ONCE, ONE_UPDATE, "learner.lr=1e-3"],
    "GRPO, steps of one group that has a signal": [ONCE, ONE_UPDATE, *SIGNAL, "learner.lr=6e-4"],
    "GRPO, four epochs": [ONCE],
    "replay": [ONE_UPDATE],
    "replay, four epochs": [],
    "replay, four epochs, two temperatures": ["rollout.temperature=[1.0,1.4]"],
    "TBA, replay, four epochs": ["learner.loss=tba", "learner.kl_coef=0.1", "learner.kl_in=reward"],
}


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as directory:
        train(load_config(RECIPE, ["loop.steps=1", "learner.lr=1e-12", f"run.dir={directory}/warm"]))
        before = score_of(f"{directory}/warm")
        print(f"before: {before:.4f}", flush=True)
        jobs = [
            {"way": way, "seed": seed, "tokens": arguments.tokens, "in": directory, "more": arguments.set, "at": number}
            for number, (seed, way) in enumerate(itertools.product(arguments.seeds, arguments.ways))
        ]
        results: dict[str, Any] = {"commit": commit(), "tokens": arguments.tokens, "before": before, "runs": []}
        all_of(_run, jobs, results, arguments)
    print(table(results["runs"]))


def score_of(run_dir: str) -> float:
    settings = [f"prompts.eval_source={RECIPE.parent}/sparse.py:words", "prompts.eval_count=2048"]
    return evaluate_run(run_dir, [*settings, "loop.eval_samples=1", "loop.eval_temperature=1"]) or 0.0


def _run(job: dict[str, Any]) -> dict[str, Any]:
    run = {**{name: job[name] for name in ("way", "seed", "more")}, **result_of(__file__, job)}
    print(run, flush=True)
    return run


def _child(job: dict[str, Any]) -> None:
    meter, run_dir = Meter(job["tokens"]), f"{job['in']}/run-{job['at']}"
    settings = [f"model.path={job['in']}/warm/model", "warmstart.steps=0", "loop.steps=10000", "loop.eval_every=0"]
    settings += [f"run.seed={job['seed']}", f"run.dir={run_dir}", "model.threads=1", *WAYS[job["way"]], *job["more"]]
    with suppress(StalledError):  # what was trained before counts
        train(load_config(RECIPE, settings), meter)
    found = {"steps": meter.steps, "generated": meter.generated, "again": sum(row.again_tokens for row in meter.rows)}
    print(json.dumps({**found, "score": score_of(run_dir)}))


def table(runs: list[dict[str, Any]]) -> str:
    lines = ["| way | score, mean and seeds | steps | generated | trained on again |", "|---" * 5 + "|"]
    for way in dict.fromkeys(run["way"] for run in runs):
        of_way = [run for run in runs if run["way"] == way]
        scores = ", ".join(f"{run['score']:.3f}" for run in of_way)
        means = [statistics.fmean(run[name] for run in of_way) for name in ("score", "steps", "generated", "again")]
        lines.append(f"| {way} | **{means[0]:.3f}** ({scores}) | {' | '.join(f'{mean:,.0f}' for mean in means[1:])} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = options_of_runs(__doc__, tokens=20_000)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--set", nargs="*", default=[], help="settings of all runs, such as learner.lr=1e-3")
    return parser.parse_args()


if __name__ == "__main__":
    main()

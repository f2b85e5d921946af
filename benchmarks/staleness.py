"""What lag costs: losses at several `loop.max_lag`, at equal generated tokens. See benchmarks/README.md.

    python benchmarks/staleness.py --json docs/results/staleness.json              # 72 runs; an hour on two cores
    python benchmarks/staleness.py --lags 0 8 --losses ppo masked --seeds 0 --at-once 2

All runs begin with one model, the demo after its warm start, and go on until they have generated `--tokens`, at a
constant learning rate. The score is that of 2,048 problems that none of them drew. So that tokens become as old as they
may, as many sequences run at a time as the lag lets begin. A run is a process of its own with one thread. One that
falls so far that no answer is right any more counts as 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from typing import Any

from script import all_of, commit, options_of_runs, result_of
from selection import COMMON, Meter, score_in_the_end

from headrace.api import train
from headrace.config_file import DEMO, load_config

NUMBERS = ("generated_tokens", "lag_mean", "lag_max", "effective_samples", "clipped_share", "reward_mean")
LOSSES = {
    "ppo": ["learner.loss=ppo"],
    "decoupled": ["learner.loss=decoupled-ppo", "learner.minibatches=2", "learner.lr=6e-4"],  # two updates a step
    "truncated": ["learner.loss=reinforce", "learner.correction=truncated"],
    "masked": ["learner.loss=reinforce", "learner.correction=masked"],
}


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as directory:
        train(load_config(DEMO, ["loop.steps=1", "learner.lr=1e-12", f"run.dir={directory}/warm", *COMMON]))
        kinds = list(itertools.product(arguments.seeds, arguments.lags, arguments.losses))
        jobs = [
            {"loss": loss, "lag": lag, "seed": seed, "tokens": arguments.tokens, "in": directory, "at": number}
            for number, (seed, lag, loss) in enumerate(kinds)
        ]
        results: dict[str, Any] = {"commit": commit(), "tokens": arguments.tokens, "runs": []}
        all_of(_run, jobs, results, arguments)
    print(table(results["runs"]))


def _run(job: dict[str, Any]) -> dict[str, Any]:
    run = {**{name: job[name] for name in ("loss", "lag", "seed")}, **result_of(__file__, job)}
    print({name: value for name, value in run.items() if name != "rows"}, flush=True)
    return run


def _child(job: dict[str, Any]) -> None:
    meter = Meter(job["tokens"])
    settings = [
        f"loop.max_lag={job['lag']}",
        f"rollout.max_running={128 * (int(job['lag']) + 1)}",
        f"run.seed={job['seed']}",
    ]
    settings += [f"model.path={job['in']}/warm/model", "warmstart.steps=0", "loop.steps=1000", *LOSSES[job["loss"]]]
    score = score_in_the_end(settings, meter, f"{job['in']}/run-{job['at']}")
    rows = [{name: getattr(row, name) for name in NUMBERS} for row in meter.rows]
    found: dict[str, Any] = {"steps": meter.steps, "generated": meter.generated, "stalled": score is None}
    found["lag_max"] = max(row["lag_max"] for row in rows)
    found |= {name: statistics.fmean(row[name] for row in rows) for name in ("lag_mean", "effective_samples")}
    print(json.dumps({**found, "score": score or 0.0, "rows": rows}))


def table(runs: list[dict[str, Any]]) -> str:
    """Lags in lines, losses in columns: the mean score, and its range over seeds."""
    losses = list(dict.fromkeys(run["loss"] for run in runs))
    lines = [f"| max_lag | mean lag | {' | '.join(losses)} |", "|---" * (len(losses) + 2) + "|"]
    for lag in dict.fromkeys(run["lag"] for run in runs):
        of_lag = [run for run in runs if run["lag"] == lag]
        cells = [str(lag), f"{statistics.fmean(run['lag_mean'] for run in of_lag):.1f}"]
        for loss in losses:
            scores = [run["score"] for run in of_lag if run["loss"] == loss]
            found = f"{statistics.fmean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})" if scores else ""
            cells.append(found)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = options_of_runs(__doc__, tokens=250_000)
    parser.add_argument("--lags", type=float, nargs="+", default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--losses", choices=LOSSES, nargs="+", default=list(LOSSES))
    return parser.parse_args()


if __name__ == "__main__":
    main()

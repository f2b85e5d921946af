"""Whether asynchrony pays: the demo on a Ray cluster, strictly on-policy and four versions ahead.

    python benchmarks/placements.py slow --seeds 3        # rewards that take 0.2 to 3 s of waiting
    python benchmarks/placements.py quick --seeds 1       # rewards that take none
    python benchmarks/placements.py slow --steps 100 --lags 4      # for the scores alone
    python benchmarks/placements.py slow --steps 6 --seeds 1 --cluster local

Both run with the same workers, from the same warm-started weights, for the same number of trained groups. Goodput is
trained tokens over seconds of the steps; the held-out score is that of 512 prompts with four answers each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REWARD = Path(__file__).with_name("placements_reward.py")


def headrace(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "headrace.cli", *words, "--quiet"], check=True)


def warm(directory: Path) -> Path:
    """The demo's weights after its warm start."""
    headrace("train", "loop.steps=0", f"run.dir={directory / 'warm'}", "prompts.eval_count=8")
    return directory / "warm" / "model"


def run(directory: Path, model: Path, kind: str, lag: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    name = directory / f"{kind}-{lag}-{seed}"
    place = [f"place.cluster={arguments.cluster}"]
    if arguments.cluster == "ray":
        place += [f"rollout.workers={arguments.workers}", f"learner.ranks={arguments.ranks}"]
    reward = [f"reward.function={REWARD}:slow", "reward.workers=8"] if kind == "slow" else []
    headrace(
        "train",
        f"run.dir={name}",
        f"model.path={model}",
        f"run.seed={seed}",
        "warmstart.steps=0",
        f"loop.steps={arguments.steps}",
        "loop.target_reward=inf",
        f"loop.max_lag={lag}",
        "loop.eval_samples=4",
        "reward.cache=false",
        *reward,
        *place,
        *arguments.settings,
    )
    return json.loads((name / "summary.json").read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["slow", "quick"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cluster", choices=["ray", "local"], default="ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--settings", nargs="+", default=[], help="of all runs, such as learner.loss=cispo")
    arguments = parser.parse_args()
    found: dict[int, list[dict[str, Any]]] = {lag: [] for lag in arguments.lags}
    print("| seed | max_lag | trained tokens | s a step | goodput, tok/s | mean lag | score before | after |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        model = warm(Path(directory))
        for seed in range(arguments.seeds):
            for lag in arguments.lags:
                s = run(Path(directory), model, arguments.kind, lag, seed, arguments)
                found[lag].append(s)
                print(
                    f"| {seed} | {lag} | {s['trained_tokens']:,} | {s['loop_s'] / s['steps']:.2f} "
                    f"| {s['goodput_tokens_per_s']:,.0f} | {s['mean_lag_seen']:.1f} | {s['score_before']:.3f} "
                    f"| {s['score_after']:.3f} |",
                    flush=True,
                )
    first, *others = arguments.lags
    for lag in others:
        goodput, score = (
            [statistics.mean(s[key] for s in found[which]) for which in (first, lag)]
            for key in ("goodput_tokens_per_s", "score_after")
        )
        print(
            f"\nmax_lag {lag} against {first}: goodput {goodput[1] / goodput[0]:.2f}x, held-out score "
            f"{100 * (score[1] - score[0]):+.1f} points"
        )


if __name__ == "__main__":
    main()

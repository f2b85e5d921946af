"""What exactness and replay buy: how far learner and engine differ, and what is learned. See benchmarks/README.md.

    python benchmarks/mismatch.py                            # dense and mixture, three ways, seeds 0 to 2; float32
    python benchmarks/mismatch.py --max-lag 4

Sampling is cut at top-p 0.9. The engine notes which tokens it sampled from, and the learner takes log-probs over the
same; with `no masks` it does not get them. Experts are replayed in every run. All runs of a model begin with its
warm start, and go on until they have generated `--tokens`, at a constant learning rate. A run is a
process of its own with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from script import commit, positive
from selection import AT_THE_END, COMMON, Meter
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.api import evaluate_run, train
from headrace.config_file import DEMO, load_config
from headrace.errors import StalledError
from headrace.learner.ranks import Intake
from headrace.measured import Row
from headrace.policy.demo import character_tokenizer
from headrace.types import Group, Trajectory

WAYS = ("default", "exact", "no masks")
NUMBERS = ("ratio_mean", "ratio_p01", "ratio_p99", "ratio_outside", "effective_samples", "mismatch_k3", "clipped_share")


class Watch(Meter):
    """Also what the steps say of the ratio."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.rows: list[Row] = []

    def row(self, row: Row) -> None:
        super().row(row)
        self.rows.append(row)


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as directory:
        write_mixture(Path(directory) / "mixture")
        for model, path in {"dense": "demo", "mixture": f"{directory}/mixture"}.items():
            begin = [
                f"model.path={path}",
                f"run.dir={directory}/warm-{model}",
                "loop.steps=1",
                "learner.lr=1e-12",
            ]
            train(load_config(DEMO, [*COMMON, *begin]))
        jobs = [
            {
                "model": model,
                "way": way,
                "seed": seed,
                "tokens": arguments.tokens,
                "lag": arguments.max_lag,
                "in": directory,
            }
            for seed, model, way in itertools.product(arguments.seeds, ("dense", "mixture"), WAYS)
        ]
        with ThreadPoolExecutor(arguments.at_once) as pool:
            runs = list(pool.map(_run, jobs))
    print(json.dumps({"commit": commit(), "max_lag": arguments.max_lag, "tokens": arguments.tokens, "runs": runs}))
    print(table(runs))


def write_mixture(directory: Path) -> None:
    """The demo's shape, with eight experts in each layer of which two see a token."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    run = {**{name: job[name] for name in ("model", "way", "seed")}, **json.loads(done.stdout.splitlines()[-1])}
    print(run, flush=True)
    return run


def _child(job: dict[str, Any]) -> None:
    if job["way"] == "no masks":
        forget_masks()
    watch, run_dir = Watch(job["tokens"]), f"{job['in']}/{job['model']}-{job['way']}-{job['seed']}"
    settings = [f"model.path={job['in']}/warm-{job['model']}/model", f"run.dir={run_dir}", f"run.seed={job['seed']}"]
    settings += [
        f"loop.max_lag={job['lag']}",
        "warmstart.steps=0",
        "loop.steps=1000",
        "rollout.top_p=0.9",
        "buffer.drop_no_signal=true",
    ]
    settings.append(f"model.exact={'true' if job['way'] == 'exact' else 'false'}")
    stalled = False
    try:
        train(load_config(DEMO, [*COMMON, *settings]), watch)
    except StalledError:
        stalled = True
    found: dict[str, Any] = {name: statistics.fmean(getattr(row, name) for row in watch.rows) for name in NUMBERS}
    score = 0.0 if stalled else evaluate_run(run_dir, AT_THE_END)
    print(json.dumps({"steps": watch.steps, "generated": watch.generated, "score": score, **found}))


def forget_masks() -> None:
    """From now on the learner does not get the masks that the engine noted."""
    add = Intake.add

    def without(t: Trajectory) -> Trajectory:
        return t if t.replay is None else replace(t, replay=replace(t.replay, support_ids=None, support_offsets=None))

    def add_without(self: Intake, group: Group, *rest: Any) -> Any:
        return add(self, replace(group, trajectories=tuple(map(without, group.trajectories))), *rest)

    Intake.add = add_without  # type: ignore[method-assign]


def table(runs: list[dict[str, Any]]) -> str:
    lines = ["| model | way | score of each seed | " + " | ".join(NUMBERS) + " |", "|---" * (len(NUMBERS) + 3) + "|"]
    for model, way in dict.fromkeys((run["model"], run["way"]) for run in runs):
        alike = [run for run in runs if (run["model"], run["way"]) == (model, way)]
        means = (f"{statistics.fmean(run[name] for run in alike):.4g}" for name in NUMBERS)
        scores = ", ".join(f"{run['score']:.3f}" for run in alike)
        lines.append(f"| {model} | {way} | {scores} | {' | '.join(means)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-lag", type=float, default=0)
    parser.add_argument("--tokens", type=positive, default=200_000, help="that a run generates")
    parser.add_argument("--at-once", type=positive, default=2, help="runs beside each other, one thread each")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

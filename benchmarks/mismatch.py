"""What exactness and replay buy: how far learner and engine differ, and what is learned. See benchmarks/README.md.

    python benchmarks/mismatch.py                            # dense and mixture, three ways, seeds 0 to 2; float32
    python benchmarks/mismatch.py --max-lag 4
    python benchmarks/mismatch.py --device cuda              # in bfloat16

Sampling is cut at top-p 0.9. The engine notes which tokens it sampled from and which experts saw a token, and the
learner takes log-probs over the same; with `no masks`, or `no routes`, it does not get them. All runs of a model begin
with its warm start, and go on until they have generated `--tokens`, at a constant learning rate. A run is a
process of its own with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from script import commit, positive, result_of
from selection import COMMON, Meter, score_in_the_end
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.api import train
from headrace.config_file import DEMO, load_config
from headrace.learner import learner
from headrace.learner.batch import Batch, pack
from headrace.policy.demo import character_tokenizer
from headrace.policy.routes import Routers
from headrace.types import Item

WAYS = ("default", "exact", "no masks", "no routes")
DTYPES = {"cpu": "model.dtype=float32", "cuda": "model.dtype=bfloat16"}
NUMBERS = ("ratio_mean", "ratio_p01", "ratio_p99", "ratio_outside", "effective_samples", "mismatch_k3", "clipped_share")


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        return _child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as directory:
        write_mixture(Path(directory) / "mixture")
        for model, path in {"dense": "demo", "mixture": f"{directory}/mixture"}.items():
            begin = [f"model.path={path}", f"model.device={arguments.device}", f"run.dir={directory}/warm-{model}"]
            train(load_config(DEMO, [*COMMON, *begin, DTYPES[arguments.device], "loop.steps=1", "learner.lr=1e-12"]))
        every = {"tokens": arguments.tokens, "lag": arguments.max_lag, "device": arguments.device, "in": directory}
        jobs = [
            {"model": model, "way": way, "seed": seed, **every}
            for seed, model, way in itertools.product(arguments.seeds, ("dense", "mixture"), WAYS)
            if (model, way) != ("dense", "no routes")
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
    run = {**{name: job[name] for name in ("model", "way", "seed")}, **result_of(__file__, job)}
    print(run, flush=True)
    return run


def _child(job: dict[str, Any]) -> None:
    if job["way"].startswith("no "):
        learner.pack = without(job["way"].removeprefix("no "))  # type: ignore[attr-defined]
    meter = Meter(job["tokens"])
    settings = [f"model.path={job['in']}/warm-{job['model']}/model", f"run.seed={job['seed']}", "rollout.top_p=0.9"]
    settings += [f"loop.max_lag={job['lag']}", "warmstart.steps=0", "loop.steps=1000"]
    settings += [f"model.device={job['device']}", DTYPES[job["device"]]]
    settings.append(f"model.exact={'true' if job['way'] == 'exact' else 'false'}")
    score = score_in_the_end(settings, meter, f"{job['in']}/{job['model']}-{job['way']}-{job['seed']}")
    means = {name: statistics.fmean(getattr(row, name) for row in meter.rows) for name in NUMBERS}
    print(json.dumps({"steps": meter.steps, "generated": meter.generated, "score": score or 0.0, **means}))


def without(what: str) -> Callable[..., Batch]:
    """`pack`, without the masks or the routes that the engine noted."""

    def packed(items: Sequence[Item], device: torch.device, routers: Routers | None = None, *heats: Any) -> Batch:
        batch = pack(items, device, None if what == "routes" else routers, *heats)
        return replace(batch, support=None) if what == "masks" else batch

    return packed


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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--at-once", type=positive, default=2, help="runs beside each other, one thread each")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""One whole GRPO step on one GPU, beside TRL in the same run. See benchmarks/README.md.

    python benchmarks/grpo.py --json docs/results/grpo.json
    python benchmarks/grpo.py --only equal/headrace
    python benchmarks/grpo.py --only headrace --only vllm \\
        --vllm "/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server --gpu-memory-utilization 0.4"
    python benchmarks/grpo.py --tiny --only headrace           # on a CPU, to see that it runs

`equal`: every answer has 512 tokens. `tail`: the model ends its answers by itself, at log-normal lengths with mean 512
and cv 1, cut at 4,096. Both contenders load the same weights and sample their own lengths. Headrace runs its own
loop with `loop.max_lag = 0`, on-policy as TRL is: generation, reward, gradient, optimizer step, books. With `--max-lag`
answers of the next steps are generated in between. `vllm`: the same loop, with vLLM as its engine on the same GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_model import SHAPES, Lengths, Shape, write_stairs
from gpu_record import (
    Part,
    free_memory,
    options,
    peak_bytes,
    read,
    run,
    show,
    show_bytes,
    spread,
    table,
)
from timed_loop import timed_loop

import headrace  # noqa: F401  (before torch's first use, as the command does it: it says how idle threads wait)
from headrace.config import Config

REWARD = Path(__file__).with_name("gpu_reward.py")
# every step does all its work, but the weights stay: one real update and the model would no longer end its answers
LR = 1e-12
HELD_OUT = 4  # prompts that the loop sets aside and nobody uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a step is made of.

    Example:
        Job(shape=SHAPES["0.6b"], stairs=4096, lengths=None, prompts=64, max_new_tokens=512, trl_prompts=64, ...)
    """

    shape: Shape
    stairs: int
    lengths: Lengths | None  # None: all answers run to the limit
    prompts: int
    max_new_tokens: int
    trl_prompts: int
    trl_at_once: int  # sequences in one pass of TRL's training, by what fits into memory
    trl_warm_up: int  # steps that are not counted
    prompt_tokens: int = 128
    samples: int = 8


TAIL = Lengths(mean=512, cv=1.0, cap=4096)
# `generate` keeps every sequence of a batch as long as the longest: 512 sequences of 4,224 tokens would be 230 GiB of
# cache, so TRL gets a quarter of the prompts per step, and one step of some thousand decode steps warms itself up
JOBS = {
    "equal": Job(
        shape=SHAPES["0.6b"],
        stairs=4096,
        lengths=None,
        prompts=64,
        max_new_tokens=512,
        trl_prompts=64,
        trl_at_once=16,
        trl_warm_up=1,
    ),
    "tail": Job(
        shape=SHAPES["0.6b"],
        stairs=4096,
        lengths=TAIL,
        prompts=64,
        max_new_tokens=TAIL.cap,
        trl_prompts=16,
        trl_at_once=4,
        trl_warm_up=0,
    ),
}
SMALL: dict[str, Any] = {
    "shape": SHAPES["tiny"],
    "stairs": 64,
    "prompts": 2,
    "trl_prompts": 2,
    "trl_at_once": 4,
    "prompt_tokens": 6,
    "samples": 4,
}
TINY = {
    "equal": Job(lengths=None, max_new_tokens=8, trl_warm_up=1, **SMALL),
    "tail": Job(lengths=Lengths(mean=8, cv=1.0, cap=24), max_new_tokens=24, trl_warm_up=0, **SMALL),
}


def prompt_texts(job: Job, count: int) -> list[str]:
    """Random words, and at the end one from the foot of the staircase."""
    rng = np.random.default_rng(0)
    return [
        " ".join(f"w{i}" for i in [*rng.integers(0, job.shape.vocab - 2, job.prompt_tokens - 1), 0])
        for _ in range(count)
    ]


def make_model(job: Job, directory: Path, device: torch.device) -> Path:
    if not (directory / "config.json").exists():
        write_stairs(directory, job.shape, device, stairs=job.stairs, lengths=job.lengths)
        free_memory()
    return directory


# ---- Headrace


def run_headrace(job: Job, models: Path, arguments: argparse.Namespace, command: str = "") -> dict[str, Any]:
    """The loop, with vLLM if there is its `command`; the first step records CUDA graphs and is not counted."""
    device = torch.device(arguments.device)
    model, steps = make_model(job, models, device), 1 + arguments.repeats
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, prompts = Path(scratch), Path(scratch) / "prompts.jsonl"
        texts = prompt_texts(job, job.prompts * steps + HELD_OUT)
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        engine = {"engine": "vllm", "command": command, "on_update": "recompute"} if command else {}
        config = settings(job, model, prompts, steps, arguments, engine)
        seconds, rows = asyncio.run(timed_loop(config, run_dir))
    for row in rows:
        assert row.generated_tokens == row.trained_tokens or arguments.max_lag, row
        assert row.num_trajectories == job.prompts * job.samples, row
        assert row.lag_max <= arguments.max_lag, row
    return {
        "sequences": job.prompts * job.samples,
        "first_step_s": seconds[0],
        "step_s": spread(seconds[1:]),
        "tokens_per_s": spread([row.trained_tokens / s for row, s in zip(rows[1:], seconds[1:], strict=True)]),
        "tokens": [row.trained_tokens for row in rows],
        "longest": [row.length_max for row in rows],
        "stage_s": [asdict(row.stage_s) for row in rows],
        "mismatch_mean": [row.mismatch_mean for row in rows],
        "mfu": [row.mfu for row in rows],
        "bandwidth_share": [row.bandwidth_share for row in rows],
        "peak_bytes": peak_bytes(device),
    }


def settings(
    job: Job, model: Path, prompts: Path, steps: int, arguments: argparse.Namespace, engine: dict[str, str]
) -> Config:
    """Defaults, but for the shapes and what makes the step the same as the peer's."""
    return Config.model_validate(
        {
            "model": {"path": str(model), "device": arguments.device},
            "prompts": {"source": str(prompts), "chat": "never", "eval_count": HELD_OUT},
            "rollout": {
                "samples": job.samples,
                "max_new_tokens": job.max_new_tokens,
                "max_running": job.prompts * job.samples,
                "prefill_tokens": 16384,
                **engine,
            },
            "reward": {"function": f"{REWARD}:score", "cache": False},
            "buffer": {"drop": "nothing"},
            "learner": {
                "lr": LR,
                "micro_batch_tokens": arguments.micro_batch_tokens,
                "lora_rank": arguments.lora_rank,
            },
            "loop": {"steps": steps, "groups_per_step": job.prompts, "max_lag": arguments.max_lag},
        }
    )


# ---- TRL


def run_trl(job: Job, models: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    records = import_module("gpu_trl").run(
        str(make_model(job, models, device)),
        prompt_texts(job, job.trl_prompts),
        steps=job.trl_warm_up + arguments.trl_steps,
        samples=job.samples,
        at_once=job.trl_at_once,
        max_new_tokens=job.max_new_tokens,
        lr=LR,
        device=device,
    )
    counted = records[job.trl_warm_up :]
    return {
        "sequences": job.trl_prompts * job.samples,
        "first_step_s": records[0]["seconds"],
        "step_s": spread([r["seconds"] for r in counted]),
        "generating_s": spread([r["generating_s"] for r in counted]),
        "tokens_per_s": spread([sum(r["lengths"]) / r["seconds"] for r in counted]),
        "tokens": [sum(r["lengths"]) for r in records],
        "longest": [max(r["lengths"]) for r in records],
        "peak_bytes": peak_bytes(device),
    }


# ---- the command


def parts(arguments: argparse.Namespace, models: Path) -> dict[str, Part]:
    jobs = TINY if arguments.tiny else JOBS
    found: dict[str, Part] = {}
    for name, job in jobs.items():
        found[f"{name}/headrace"] = partial(run_headrace, job, models / name, arguments)
        if arguments.vllm:
            found[f"{name}/vllm"] = partial(run_headrace, job, models / name, arguments, arguments.vllm)
        found[f"{name}/trl"] = partial(run_trl, job, models / name, arguments)
    return found


def summary(results: dict[str, Any]) -> str:
    header = [
        "part",
        "tok/s (median, range)",
        "to TRL",
        "s a step",
        "of it generating",
        "MFU",
        "of bandwidth",
        "sequences",
        "tokens",
        "memory",
    ]
    rows = []
    for part, found in results["parts"].items():
        if "error" in found:
            rows.append([part, found["error"], *[""] * (len(header) - 2)])
            continue
        peer = results["parts"].get(part.split("/")[0] + "/trl", {})
        ratio = ""
        if not part.endswith("/trl") and "tokens_per_s" in peer:
            ratio = f"{found['tokens_per_s']['median'] / peer['tokens_per_s']['median']:.1f}x"
        generating = found.get("generating_s") or spread([s["rollout"] for s in found["stage_s"][1:]])
        rows.append(
            [
                part,
                show(found["tokens_per_s"]),
                ratio,
                show(found["step_s"], ".2f"),
                show(generating, ".2f"),
                *(
                    f"{found[name][-1]:.2f}" if found.get(name, [None])[-1] else ""
                    for name in ("mfu", "bandwidth_share")
                ),
                str(found["sequences"]),
                f"{found['tokens'][-1]:,}, longest {found['longest'][-1]:,}",
                show_bytes(found["peak_bytes"]),
            ]
        )
    return table(header, rows)


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="learner.micro_batch_tokens")
    parser.add_argument("--lora-rank", type=int, default=0, help="learner.lora_rank of Headrace")
    parser.add_argument("--vllm", help="rollout.command of vLLM; without it, not measured")
    parser.add_argument("--trl-steps", type=int, default=1, help="counted steps of TRL")
    parser.add_argument("--max-lag", type=float, default=0, help="loop.max_lag")
    parser.set_defaults(repeats=2)
    arguments = read(parser, given)
    with tempfile.TemporaryDirectory() as models:
        return run("grpo", arguments, lambda chosen, _: parts(chosen, Path(models)), summary)


if __name__ == "__main__":
    main()

"""What exact mode costs: decoding and training, default against exact, taking turns.

    python benchmarks/exact.py --threads 2 --repeats 7         # small models, on the CPU
    python benchmarks/exact.py --device cuda                   # the shapes of Qwen3-0.6B and 1.7B, bfloat16

Both have the same random weights, each in a process of its own: exact mode chooses matrix products for a whole
process. A ratio is the time of an exact turn over that of the default turn before it; the table gives the median and
the range over the repeats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from gpu_model import SHAPES as GPU_SHAPES
from gpu_model import Shape, random_model
from gpu_record import facts, free_memory, synchronise

from headrace.policy.attention import PackedPlan
from headrace.policy.demo import character_tokenizer
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request
from headrace.types import Sampling

SHAPES = GPU_SHAPES | {
    "demo": Shape(hidden=192, intermediate=576, layers=4, heads=6, kv_heads=3, head_size=32, vocab=99),
    "30M": Shape(hidden=512, intermediate=1536, layers=8, heads=8, kv_heads=4, head_size=64, vocab=8192),
}
ON = {"cpu": ["demo", "30M"], "cuda": ["0.6b", "1.7b"]}  # what runs where, unless --only says so
SAMPLES = 8
Job = dict[str, int]


def jobs(shape: str, device: str) -> dict[str, Job]:
    """Sizes of the work, by its name."""
    if device == "cuda":
        return {
            "decode, 256 rows at 1,024": {"rows": 256, "prompt_tokens": 960, "new_tokens": 128},
            "decode, 8 rows at 1,024": {"rows": 8, "prompt_tokens": 960, "new_tokens": 128},
            "train, 16,384 packed tokens": {"num_tokens": 16384, "longest": 1024},
        }
    tokens = 4096 if shape == "demo" else 1024
    return {
        "decode, 128 rows": {"rows": 128, "prompt_tokens": 16, "new_tokens": 32},
        "decode, 8 rows": {"rows": 8, "prompt_tokens": 64, "new_tokens": 64},
        f"train, {tokens:,} packed tokens": {"num_tokens": tokens, "longest": 160},
    }


# ---- a contender, in its own process


def contend(pipe: Connection, shape: str, device: str, threads: int, exact: bool) -> None:
    """Do the jobs that come through the pipe, and answer each with (tokens, seconds)."""
    torch.set_num_threads(threads)
    policy = Policy(random_model(SHAPES[shape], torch.device(device)), character_tokenizer(), exact=exact)
    policy.eos_ids = frozenset()  # every answer runs to its limit
    engines: dict[int, Engine] = {}
    while job := pipe.recv():
        if "longest" in job:
            engines.clear()  # their caches would not leave room for two trainings
            free_memory()
        pipe.send(train(policy, **job) if "longest" in job else decode(policy, engines, **job))


def decode(policy: Policy, engines: dict[int, Engine], *, rows: int, prompt_tokens: int, new_tokens: int) -> Any:
    """Tokens and seconds from when every row has its first token until all have ended; eight rows share a prompt."""
    kv_tokens = rows * (prompt_tokens + new_tokens + 128)
    if rows not in engines:
        engines[rows] = Engine(
            policy, max_running=rows, prefill_tokens=65536, kv_tokens=kv_tokens, on_update="keep", speculate=0
        )
    engine, rng = engines[rows], np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=new_tokens)
    for i in range(rows // SAMPLES):
        prompt = rng.integers(3, 99, prompt_tokens).astype(np.int32)
        engine.submit(prompt, [Request(id=f"{i}/{j}", sampling=sampling, seed=8 * i + j) for j in range(SAMPLES)])
    engine.begun.clear()
    while len(engine.begun) < rows:
        engine.step()
    before, start = engine.sampled_tokens, time.perf_counter()
    while engine.has_work:
        engine.advance()
    return engine.sampled_tokens - before, time.perf_counter() - start


def train(policy: Policy, *, num_tokens: int, longest: int) -> Any:
    """Tokens and seconds of forward and backward over one micro-batch of sequences of uneven length."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(min(int(rng.integers(longest // 4, longest)), num_tokens - sum(lengths)))
    plan = PackedPlan(lengths, policy.device)
    ids = torch.from_numpy(rng.integers(3, 99, num_tokens)).to(policy.device)
    at = torch.nonzero(plan.positions[0]).squeeze(1)
    policy.model.zero_grad()
    synchronise(policy.device)
    start = time.perf_counter()
    policy.logprobs(ids, plan, at, 1.0)[0].sum().backward()
    synchronise(policy.device)
    return num_tokens, time.perf_counter() - start


# ---- the command


def take_turns(pipes: dict[str, Connection], job: Job, repeats: int) -> tuple[float, list[float]]:
    """Median tokens per second in default mode, and the ratios exact / default, one for each repeat."""
    turns: dict[str, list[tuple[int, float]]] = {name: [] for name in pipes}
    for _ in range(repeats + 1):
        for name, pipe in pipes.items():
            pipe.send(job)
            turns[name].append(pipe.recv())
    default, exact = (turns[name][1:] for name in ("default", "exact"))  # the first turns warm up
    rate = statistics.median(tokens / seconds for tokens, seconds in default)
    return rate, [e[1] / d[1] for e, d in zip(exact, default, strict=True)]


def compare(shape: str, arguments: argparse.Namespace) -> None:
    """Print the lines of one model."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in ("default", "exact"):
        pipes[name], far = context.Pipe()
        given = (far, shape, arguments.device, arguments.threads, name == "exact")
        context.Process(target=contend, args=given, daemon=True).start()
        far.close()  # a contender that dies ends the wait for it
    for name, job in jobs(shape, arguments.device).items():
        rate, ratios = take_turns(pipes, job, arguments.repeats)
        middle = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {shape} | {name} | {rate:,.0f} tokens/s | {middle} |", flush=True)
    for pipe in pipes.values():
        pipe.send(None)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(ON))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=list(SHAPES))
    arguments = parser.parse_args()
    found = facts("exact", torch.device(arguments.device))
    print(f"{found['device']}, commit {found['commit'][:12]}, {found['command']}, {found['versions']}\n")
    print("| model | work | default | exact / default, median | range |\n|---|---|---|---|---|")
    for shape in [arguments.only] if arguments.only else ON[arguments.device]:
        compare(shape, arguments)


if __name__ == "__main__":
    main()

"""What exact mode costs: decoding and training, default against exact, taking turns.

    python benchmarks/exact.py --device cpu --threads 2 --repeats 7

Both policies have the same random weights. A ratio is the time of an exact turn over that of the default turn before
it; the table gives the median and the range over the repeats.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.policy.attention import PackedPlan
from headrace.policy.demo import character_tokenizer
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.request import Request
from headrace.rollout.sampling import Sampling

SHAPES: dict[str, dict[str, int]] = {
    "demo": {
        "vocab_size": 99,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
    },
    "30M": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def policies(shape: dict[str, int], device: str) -> dict[str, Policy]:
    """The same weights in both modes."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = Qwen3ForCausalLM(config).to(device, dtype).eval()
    made = {
        name: Policy(copy.deepcopy(model), character_tokenizer(), exact=name == "exact")
        for name in ("default", "exact")
    }
    for policy in made.values():
        policy.eos_ids = frozenset()  # every answer runs to its limit
    return made


def decode(policy: Policy, *, rows: int, prompt_tokens: int, new_tokens: int) -> float:
    """Seconds to answer `rows` prompts, eight samples each."""
    engine = Engine(policy, max_running=rows, prefill_tokens=2048, kv_tokens=10**6, on_update="keep")
    rng = np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=new_tokens)
    for i in range(rows // 8):
        prompt = rng.integers(3, 99, prompt_tokens).astype(np.int32)
        engine.submit(prompt, [Request(id=f"{i}/{j}", sampling=sampling, seed=8 * i + j) for j in range(8)])
    start = time.perf_counter()
    while engine.has_work:
        engine.advance()
    return time.perf_counter() - start


def train(policy: Policy, *, num_tokens: int, longest: int) -> float:
    """Seconds for forward and backward over one micro-batch of sequences of uneven length."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(min(int(rng.integers(longest // 4, longest)), num_tokens - sum(lengths)))
    plan = PackedPlan(lengths, policy.device)
    ids = torch.from_numpy(rng.integers(3, 99, num_tokens)).to(policy.device)
    at = torch.nonzero(plan.positions[0]).squeeze(1)
    policy.model.zero_grad()
    start = time.perf_counter()
    policy.logprobs(ids, plan, at, 1.0).sum().backward()
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(made: dict[str, Policy], work: Callable[[Policy], float], repeats: int) -> tuple[float, list[float]]:
    """Median seconds in default mode, and the ratios exact / default, one for each repeat."""
    turns: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats + 1):
        for name, policy in made.items():
            turns[name].append(work(policy))
    default, exact = (turns[name][1:] for name in ("default", "exact"))  # the first turns warm up
    return statistics.median(default), [e / d for e, d in zip(exact, default, strict=True)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=[*SHAPES, ""], default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| model | work | default | exact / default, median | range |\n|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        if args.only in ("", name):
            made = policies(shape, args.device)
            small = name == "demo"
            jobs: dict[str, tuple[int, dict[str, Any]]] = {
                "decode, 128 rows": (128 * 32, {"rows": 128, "prompt_tokens": 16, "new_tokens": 32}),
                "decode, 8 rows": (8 * 64, {"rows": 8, "prompt_tokens": 64, "new_tokens": 64}),
            }
            jobs["train"] = (4096 if small else 1024, {"num_tokens": 4096 if small else 1024, "longest": 160})
            for job, (num_tokens, sizes) in jobs.items():
                work = train if job == "train" else decode
                seconds, ratios = compare(made, lambda policy: work(policy, **sizes), args.repeats)  # noqa: B023
                middle = statistics.median(ratios)
                print(
                    f"| {name} | {job} | {num_tokens / seconds:,.0f} tokens/s | {middle:.2f} | "
                    f"{min(ratios):.2f} to {max(ratios):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

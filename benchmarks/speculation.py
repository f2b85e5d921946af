"""What drafts bring, and what they cost where nothing repeats: one engine with and one without, taking turns.

    python benchmarks/speculation.py                             # a model of a million weights, on the CPU
    python benchmarks/speculation.py --device cuda --shape 0.6b  # the shape of Qwen3-0.6B, bfloat16

Weights are random. At a temperature of 1 their answers never repeat. At a low one they fall into loops, and answers to
the same prompt resemble each other; every epoch draws other noise. No token ends an answer. On a CPU, seconds are those
of the processor, on one thread: other work on the machine disturbs them less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import headrace  # noqa: F401  (before torch works, as the command does it: it says how idle threads wait)
from headrace.policy.demo import character_tokenizer
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.request import Request
from headrace.rollout.sampling import Sampling, request_seed

SHAPES = {
    "tiny": {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
PROMPT_TOKENS = 64
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Epochs over some prompts, at a multiple of the temperature at which the model's logits spread by one.

    Example:
        Workload(name="loops", spread=12.0, epochs=1)
    """

    name: str
    spread: float  # standard deviation of the logits after the temperature; 0 leaves the temperature at 1
    epochs: int


WORKLOADS = [Workload("loops", 12.0, 1), Workload("epochs", 6.0, 3), Workload("random", 0.0, 1)]


def make_policy(shape: str, device: str) -> Policy:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    policy = Policy(model, character_tokenizer())
    policy.eos_ids = frozenset()  # type: ignore[misc]
    return policy


def temperature(policy: Policy, spread: float) -> float:
    """The final norm makes states of length sqrt(E), so logits spread by that times the spread of the embedding."""
    weight = policy.head_weight.detach().float()
    return float(weight.std() * weight.shape[1] ** 0.5) / spread if spread else 1.0


def generate(policy: Policy, work: Workload, running: int, tokens: int, speculate: int, seed: int) -> dict[str, Any]:
    """Tokens per second over all epochs, and what came of the drafts."""
    engine = Engine(
        policy, max_running=running, prefill_tokens=2048, kv_tokens=running * (PROMPT_TOKENS + tokens + 128),
        on_update="keep", speculate=speculate,
    )  # fmt: skip
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature(policy, work.spread))
    rng = np.random.default_rng(seed)
    samples = min(SAMPLES, running)
    prompts = rng.integers(3, 99, (running // samples, PROMPT_TOKENS)).astype(np.int32)
    answers: dict[str, list[int]] = {}
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
    started = clock()
    for epoch in range(work.epochs):
        for p, prompt in enumerate(prompts):
            seeds = [request_seed(seed, epoch, p, i) for i in range(samples)]
            ids = [f"{epoch}:{p}/{i}" for i in range(samples)]
            engine.submit(prompt, [Request(id=id, sampling=sampling, seed=s) for id, s in zip(ids, seeds, strict=True)])
        while engine.has_work:
            answers |= {g.id: g.token_ids.tolist() for g in engine.advance()}
    seconds = clock() - started
    return {
        "answers": answers,
        "tokens_per_s": sum(map(len, answers.values())) / seconds,
        "drafted": engine.drafted_tokens,
        "accepted": engine.accepted_tokens,
        "drafts": engine.num_drafts,
    }


def compare(policy: Policy, work: Workload, running: int, options: argparse.Namespace) -> dict[str, Any]:
    """Repeats that take turns; the first is not counted."""
    ratios, plain_speeds, drafted_speeds, parted = [], [], [], 0
    last: dict[str, Any] = {}
    for repeat in range(options.repeats + 1):
        order = [0, options.speculate] if repeat % 2 else [options.speculate, 0]
        both = {s: generate(policy, work, running, options.tokens, s, seed=repeat) for s in order}
        plain, last = both[0], both[options.speculate]
        parted += sum(plain["answers"][id] != answer for id, answer in last["answers"].items())
        if repeat:
            ratios.append(last["tokens_per_s"] / plain["tokens_per_s"])
            plain_speeds.append(plain["tokens_per_s"])
            drafted_speeds.append(last["tokens_per_s"])
    return {
        "workload": work.name,
        "running": running,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "tokens_per_s": statistics.median(drafted_speeds),
        "plain_tokens_per_s": statistics.median(plain_speeds),
        "accepted_per_draft": last["accepted"] / max(1, last["drafts"]),
        "accepted_share": last["accepted"] / max(1, last["drafted"]),
        "from_drafts": last["accepted"] / sum(map(len, last["answers"].values())),
        "answers_that_differ": parted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 128], help="sequences at the same time")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--speculate", type=int, default=8, help="longest draft")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policy = make_policy(options.shape, options.device)
    results = []
    print("workload  running   speed-up (range)       tok/s with, without    accepted per draft, share; of all tokens")
    for work in WORKLOADS:
        for running in options.running:
            r = compare(policy, work, running, options)
            results.append(r)
            print(
                f"{work.name:9} {running:6}"
                f"   {r['ratio']:5.2f} ({r['ratio_range'][0]:.2f} to {r['ratio_range'][1]:.2f})"
                f"   {r['tokens_per_s']:9,.0f} {r['plain_tokens_per_s']:9,.0f}"
                f"      {r['accepted_per_draft']:5.2f} {r['accepted_share']:6.1%} {r['from_drafts']:6.1%}"
                f"   {r['answers_that_differ']} answers differ",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

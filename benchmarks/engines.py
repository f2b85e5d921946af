"""The embedded engine, vLLM and SGLang on one job, taking turns: tokens per second, and how far log-probs are off.

    python benchmarks/engines.py --vllm "/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server" \\
        --sglang "/opt/sglang/bin/python -m sglang.launch_server"    # small models, on the CPU
    python benchmarks/engines.py --sglang "..." --only demo --repeats 2

A job is 32 prompts with 4 answers each, 64 at a time, all answers of one length or of log-normal lengths; from the
first request to the last token. A ratio is a server's tokens per second over those of the embedded engine in the same
round. Off is the mean |difference| of sampled log-probs to a forward pass of transformers with the same weights, of
8 answers. An update hands new weights over while the job's first answers are under way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from exact import SHAPES
from gpu_model import Lengths, random_model, word_tokenizer
from gpu_record import facts, table

from headrace.config import RolloutSection
from headrace.place.rollout_worker import SERVERS
from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.engine_server import ServerEngine
from headrace.rollout.rows import Generation, Request
from headrace.types import Sampling

PROMPTS, SAMPLES, PROMPT_TOKENS, MAX_RUNNING = 32, 4, 32, 64
EQUAL, TAIL, CONTEXT = 64, Lengths(mean=64, cv=1.0, cap=256), 512


def job(name: str, vocab: int, repeat: int) -> list[tuple[np.ndarray, list[Request]]]:
    """Prompts, each with its requests."""
    rng = np.random.default_rng(repeat)
    prompts = rng.integers(vocab - 2, size=(PROMPTS, PROMPT_TOKENS), dtype=np.int32)
    lengths = TAIL.draw(PROMPTS * SAMPLES, repeat) if name == "tail" else [EQUAL] * (PROMPTS * SAMPLES)
    samplings = iter([Sampling(max_new_tokens=max(1, int(length))) for length in lengths])
    return [
        (prompt, [Request(id=f"{repeat}/{i}/{j}", sampling=next(samplings), seed=100 * i + j) for j in range(SAMPLES)])
        for i, prompt in enumerate(prompts)
    ]


def generate(
    engine: Engine | ServerEngine, work: Sequence[tuple[np.ndarray, list[Request]]], update: int = 0
) -> tuple[list[Generation], float, float]:
    """What was sampled, in how many seconds; and those of an update to version `update`."""
    began_s, update_s, found = time.perf_counter(), 0.0, list[Generation]()
    for prompt, requests in work:
        engine.submit(prompt, requests)
    while engine.has_work:
        found += engine.advance()
        if update and engine.sampled_tokens and not update_s:
            from_s = time.perf_counter()
            engine.weights_changed(update)
            update_s = time.perf_counter() - from_s
    return found, time.perf_counter() - began_s, update_s


@torch.no_grad()
def off(policy: Policy, work: Sequence[tuple[np.ndarray, list[Request]]], found: Sequence[Generation]) -> float:
    prompts = {request.id: prompt for prompt, requests in work for request in requests}
    differences = []
    for generation in found[:8]:
        prompt = prompts[generation.id]
        tokens = torch.tensor(np.concatenate([prompt, generation.token_ids])).long()
        with policy.stock_attention():
            logits = policy.model(tokens[None]).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0].numpy()
        differences.append(np.abs(expected - generation.logprobs).mean())
    return float(np.mean(differences))


def compare(policy: Policy, engines: dict[str, Engine | ServerEngine], name: str, repeats: int) -> dict[str, Any]:
    vocab = int(policy.config.vocab_size)
    rates: dict[str, list[float]] = {engine: [] for engine in engines}
    updates: dict[str, float] = {}
    distance: dict[str, float] = {}
    for repeat in range(repeats + 1):  # the first warms up
        work = job(name, vocab, repeat)
        for which, engine in engines.items():
            found, seconds, _ = generate(engine, work)
            assert len(found) == PROMPTS * SAMPLES
            if repeat:
                rates[which].append(sum(len(g.token_ids) for g in found) / seconds)
            distance[which] = off(policy, work, found)
    for which, engine in engines.items():
        updates[which] = generate(engine, job(name, vocab, repeats + 1), update=engine.version + 1)[2]
    pairs = {which: zip(rates["embedded"], rates[which], strict=True) for which in engines}
    ratios = {which: [theirs / ours for ours, theirs in pair] for which, pair in pairs.items()}
    return {"rates": rates, "ratios": ratios, "off": distance, "update_s": updates}


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="rollout.command of vLLM; without it, not measured")
    parser.add_argument("--sglang", help="the same of SGLang")
    parser.add_argument("--only", choices=["demo", "30M"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    noted = facts("engines", device)
    print(f"{noted['device']}, commit {noted['commit'][:12]}, {noted['command']}, {noted['versions']}\n")
    commands = {which: getattr(arguments, which) for which in SERVERS if getattr(arguments, which)}
    found, rows = dict[str, Any](), []
    for model in [arguments.only] if arguments.only else ["demo", "30M"]:
        shape = SHAPES[model]
        policy = Policy(random_model(shape, device, CONTEXT), word_tokenizer(shape.vocab, ends=False), exact=False)
        engines: dict[str, Engine | ServerEngine] = {
            "embedded": Engine(policy, max_running=MAX_RUNNING, prefill_tokens=2048, kv_tokens=2**16, on_update="keep")
        }
        with ExitStack() as servers:
            for which, command in commands.items():
                section = RolloutSection.model_validate(
                    {"engine": which, "command": command, "max_running": MAX_RUNNING}
                )
                server = engines[which] = SERVERS[which](policy, section, CONTEXT, time.monotonic)
                servers.callback(server.close)
                server.weights_changed(0)
            for name in ("equal", "tail"):
                one = found[f"{model}/{name}"] = compare(policy, engines, name, arguments.repeats)
                fresh = [[model, name, *line(one, which)] for which in engines]
                print(*("  ".join(row) for row in fresh), sep="\n", file=sys.stderr, flush=True)
                rows += fresh
    columns = ["engine", "tok/s", "of the embedded engine's", "off", "update, s"]
    print(table(["model", "job", *columns], rows))
    return found


def line(one: dict[str, Any], which: str) -> list[str]:
    ratios = one["ratios"][which]
    return [
        which,
        f"{statistics.median(one['rates'][which]):,.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{one['off'][which]:.1e}",
        f"{one['update_s'][which]:.3f}",
    ]


if __name__ == "__main__":
    main()

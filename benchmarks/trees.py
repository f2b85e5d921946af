"""Common prefixes in training: computed once against once per sequence, taking turns.

    python benchmarks/trees.py --threads 2                     # small models, on the CPU
    python benchmarks/trees.py --device cuda                   # the shapes of Qwen3-0.6B and 1.7B, bfloat16
    python benchmarks/trees.py --tiny                          # to see that it runs

A turn is the packing, the forward and the backward pass of one micro-batch. A ratio is the time of a turn with separate
sequences over that of the turn with shared prefixes before it; the table gives median and range over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from exact import SHAPES
from gpu_model import random_model, word_tokenizer
from gpu_record import facts, synchronise, table

from headrace.learner import tree
from headrace.learner.batch import pack
from headrace.policy.policy import Policy
from headrace.types import FinishReason, Item, Span, Timing, Trajectory

ON = {"cpu": ["demo", "30M"], "cuda": ["0.6b", "1.7b"]}  # what runs where, unless --only says so
LEAST, NEVER = 16, 10**9  # tokens that are worth sharing
TINY = 8  # that part of all lengths


def jobs(groups: int, part: int) -> dict[str, list[Item]]:
    """By name, one micro-batch of so many groups; all lengths divided by `part`."""
    shapes = {
        f"8 answers of {64 // part} to a prompt of {length // part}": answers(length // part, 64 // part)
        for length in (512, 128, 64, 32, 16)
    }
    kept, rest = 16 // part, 32 // part
    shapes["8 turns, history rewritten"] = turns(prompt=256 // part, kept=kept, seen=rest, sampled=rest)
    return {f"{groups} x {name}" if groups > 1 else name: batch(groups, shape) for name, shape in shapes.items()}


def answers(prompt: int, answer: int) -> list[tuple[str, int]]:
    """Words of a group: the letter names a text, the number its length; the last is sampled."""
    return [(f"p:{prompt} a{i}:{answer}", answer) for i in range(8)]


def turns(*, prompt: int, kept: int, seen: int, sampled: int) -> list[tuple[str, int]]:
    """A turn sees the prompt, what was kept of each turn before, and an observation."""
    pasts = [" ".join(f"k{j}:{kept}" for j in range(i)) for i in range(8)]
    return [(f"p:{prompt} {past} s{i}:{seen} a{i}:{sampled}", sampled) for i, past in enumerate(pasts)]


def batch(groups: int, members: Sequence[tuple[str, int]]) -> list[Item]:
    found = []
    for group in range(groups):
        texts: dict[str, np.ndarray] = {}
        rng = np.random.default_rng(group)
        for i, (words, num_sampled) in enumerate(members):
            for word in words.split():
                texts.setdefault(word, rng.integers(0, 97, int(word.split(":")[1])).astype(np.int32))
            ids = np.concatenate([texts[word] for word in words.split()])
            found.append(Item(trajectory=trajectory(f"{group}/{i}", ids, num_sampled), advantage=1.0))
    return found


def trajectory(id: str, ids: np.ndarray, num_sampled: int) -> Trajectory:
    first = len(ids) - num_sampled
    return Trajectory(
        id=id,
        prompt_id=id,
        index=0,
        token_ids=ids,
        sampled=np.arange(len(ids)) >= first,
        logprobs=np.zeros(len(ids), np.float32),
        spans=(Span(version=0, start=first, end=len(ids)),),
        finish=FinishReason.LENGTH,
        text="",
        timing=Timing(submitted_s=0.0, started_s=0.0, finished_s=0.0),
    )


def train(policy: Policy, items: Sequence[Item], least: int) -> tuple[int, float]:
    """Computed tokens, and seconds. Prefixes of `least` tokens are shared."""
    tree.LEAST_SHARED = least
    policy.model.zero_grad()
    synchronise(policy.device)
    start = time.perf_counter()
    found = pack(items, policy.device)
    policy.logprobs(found.token_ids, found.plan, found.at, 1.0)[0].sum().backward()
    synchronise(policy.device)
    return len(found.token_ids), time.perf_counter() - start


def compare(policy: Policy, items: Sequence[Item], least: int, repeats: int) -> dict[str, Any]:
    """Turns of both; the first round warms up."""
    rounds = [(train(policy, items, least), train(policy, items, NEVER)) for _ in range(repeats + 1)][1:]
    (shared, _), (separate, _) = rounds[0]
    return {"shared": shared, "separate": separate, "ratios": [slow[1] / fast[1] for fast, slow in rounds]}


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(ON))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--exact", action="store_true", help="model.exact")
    parser.add_argument("--tiny", action="store_true", help="one small model: seconds on a CPU")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    device, noted = torch.device(arguments.device), facts("trees", torch.device(arguments.device))
    print(f"{noted['device']}, commit {noted['commit'][:12]}, {noted['command']}, {noted['versions']}\n")
    names = [arguments.only] if arguments.only else ["tiny"] if arguments.tiny else ON[arguments.device]
    groups, part = 8 if arguments.device == "cuda" else 1, TINY if arguments.tiny else 1  # a GPU gets more at once
    found, rows = dict[str, Any](), []
    for name in names:
        model = random_model(SHAPES[name], device)
        policy = Policy(model, word_tokenizer(SHAPES[name].vocab, ends=True), exact=arguments.exact)
        for job, items in jobs(groups, part).items():
            one = found[f"{name}/{job}"] = compare(policy, items, LEAST // part, arguments.repeats)
            ratios = one["ratios"]
            tokens = f"{one['separate']:,}", f"{one['shared']:,}"
            spread = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append([name, job, *tokens, *spread])
    print(table(["model", "work", "tokens, separate", "shared", "separate / shared time", "range"], rows))
    return found


if __name__ == "__main__":
    main()

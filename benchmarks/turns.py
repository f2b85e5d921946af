"""What turns cost an engine: episodes whose replies come at once, over the same tokens sampled in one go.

    python benchmarks/turns.py --threads 1            # small models, on the CPU
    python benchmarks/turns.py --device cuda          # the shapes of Qwen3-0.6B and 1.7B, bfloat16
    python benchmarks/turns.py --tiny                 # to see that it runs

All episodes have a prompt of their own. A turn samples 4 to 8 tokens, then a reply of 12 tokens follows; half of the
turns that ended come back together, as those of an agent do. In one go, each episode samples as many tokens after its
prompt in one answer. Both take turns in one process; the table has milliseconds per turn, and medians of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from exact import SHAPES
from gpu_model import random_model, word_tokenizer
from gpu_record import facts, synchronise, table
from script import positive

from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request
from headrace.types import Sampling

ON = {"cpu": ["demo", "30M"], "cuda": ["0.6b", "1.7b"]}  # what runs where, unless --only says so
PROMPT, REPLY, LEAST, MOST = 64, 12, 4, 8  # tokens
TOGETHER = 0.5  # of the episodes: as many turns come back at the same time


def play(engine: Engine, episodes: int, turns: int, vocab: int) -> tuple[float, int]:
    """Seconds until all episodes are over, and the tokens they sampled."""
    random = np.random.default_rng(0)
    told = [random.integers(0, vocab, PROMPT).astype(np.int32) for _ in range(episodes)]
    lengths = random.integers(LEAST, MOST + 1, (episodes, turns))
    begun, going, back = engine.sampled_tokens, 0, [(i, 0) for i in range(episodes)]
    start = time.perf_counter()
    while back or going:
        if len(back) >= TOGETHER * episodes or not going:
            for i, turn in back:
                sampling = Sampling(max_new_tokens=int(lengths[i, turn]))
                engine.submit(told[i], [Request(id=f"{i} {turn}", sampling=sampling, seed=i, session=str(i))])
            going, back = going + len(back), []
        for ended in engine.advance():
            i, turn = map(int, ended.id.split())
            going -= 1
            told[i] = np.concatenate([told[i], ended.token_ids, random.integers(0, vocab, REPLY).astype(np.int32)])
            if turn + 1 < turns:
                back.append((i, turn + 1))
            else:
                engine.forget({str(i)})
    synchronise(engine.policy.device)
    return time.perf_counter() - start, engine.sampled_tokens - begun


def at_once(engine: Engine, episodes: int, num_tokens: int, vocab: int) -> float:
    """Seconds to sample about as many tokens, in one answer to each prompt."""
    random = np.random.default_rng(1)
    sampling = Sampling(max_new_tokens=num_tokens // episodes)
    start = time.perf_counter()
    for i in range(episodes):
        prompt = random.integers(0, vocab, PROMPT).astype(np.int32)
        engine.submit(prompt, [Request(id=str(i), sampling=sampling, seed=i)])
    while engine.has_work:
        engine.advance()
    synchronise(engine.policy.device)
    return time.perf_counter() - start


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(ON))
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--episodes", type=positive, default=128, help="at the same time")
    parser.add_argument("--turns", type=positive, default=8, help="of an episode")
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="one small model, few turns: seconds on a CPU")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    device, noted = torch.device(arguments.device), facts("turns", torch.device(arguments.device))
    print(f"{noted['device']}, commit {noted['commit'][:12]}, {noted['command']}, {noted['versions']}\n")
    names = [arguments.only] if arguments.only else ["tiny"] if arguments.tiny else ON[arguments.device]
    episodes, turns = (4, 3) if arguments.tiny else (arguments.episodes, arguments.turns)
    found, rows = dict[str, Any](), []
    for name in names:
        shape = SHAPES[name]
        policy = Policy(random_model(shape, device), word_tokenizer(shape.vocab, ends=False))
        policy.eos_ids = frozenset()  # every answer runs to its limit
        kv_tokens = 2 * episodes * (PROMPT + turns * (MOST + REPLY))
        engine = Engine(policy, max_running=episodes, prefill_tokens=2048, kv_tokens=kv_tokens, on_update="keep")
        pairs = []
        for _ in range(arguments.repeats + 1):  # the first one warms up
            seconds, tokens = play(engine, episodes, turns, shape.vocab)
            pairs.append((seconds, at_once(engine, episodes, tokens, shape.vocab)))
        ratios = [slow / fast for slow, fast in pairs[1:]]
        ms = 1000 * statistics.median(slow for slow, _ in pairs[1:]) / (episodes * turns)
        found[name] = {"ms": ms, "ratios": ratios, "tokens": tokens}
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{tokens:,}", f"{ms:.2f}", f"{statistics.median(ratios):.2f}", spread])
    print(table(["model", "tokens sampled", "ms per turn", "turns / in one go", "range"], rows))
    return found


if __name__ == "__main__":
    main()

"""What drafts bring, and what they cost where nothing repeats: one engine with and one without, step by step in turns.

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
from headrace.rollout.rows import Request, request_seed
from headrace.types import Sampling

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
# What the layers of a shape add to the residual stream is multiplied by this. A deep model of random weights is chaotic
# even at a low temperature; one whose tokens depend mostly on the few before them runs in circles, like the tiny one.
LAYERS_SHARE = {"tiny": 1.0, "0.6b": 0.1}
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
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(LAYERS_SHARE[shape])
            layer.mlp.down_proj.weight.mul_(LAYERS_SHARE[shape])
    policy = Policy(model, character_tokenizer())
    policy.eos_ids = frozenset()  # type: ignore[misc]
    return policy


def temperature(policy: Policy, spread: float) -> float:
    """The final norm makes states of length sqrt(E), so logits spread by that times the spread of the embedding."""
    weight = policy.head_weight.detach().float()
    return float(weight.std() * weight.shape[1] ** 0.5) / spread if spread else 1.0


class Contender:
    """An engine, its answers and the seconds it took."""

    def __init__(self, policy: Policy, running: int, tokens: int, speculate: int) -> None:
        self.engine = Engine(
            policy, max_running=running, prefill_tokens=2048, kv_tokens=running * (PROMPT_TOKENS + tokens + 128),
            on_update="keep", speculate=speculate,
        )  # fmt: skip
        self._clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
        self.restart()

    def restart(self) -> None:
        """Forget answers, seconds and counts; the engine keeps what it learned of other prompts."""
        self.answers: dict[str, list[int]] = {}
        self.seconds = 0.0
        self._counted = self._counts()

    def advance(self) -> None:
        """Four steps, timed."""
        started = self._clock()
        finished = self.engine.advance(max_steps=4)
        self.seconds += self._clock() - started
        self.answers |= {g.id: g.token_ids.tolist() for g in finished}

    def _counts(self) -> np.ndarray:
        return np.array([self.engine.num_drafts, self.engine.counts.drafted_tokens, self.engine.counts.accepted_tokens])

    def result(self) -> Result:
        """Of one race."""
        drafts, drafted, accepted = (self._counts() - self._counted).tolist()
        return Result(self.seconds, drafts, drafted, accepted, self.answers)


@dataclass(frozen=True, slots=True)
class Result:
    """What a contender did in one race.

    Example:
        Result(seconds=1.2, drafts=100, drafted=640, accepted=610, answers={"0:0/0": [7, 4, ...]})
    """

    seconds: float
    drafts: int
    drafted: int
    accepted: int
    answers: dict[str, list[int]]


def race(
    both: list[Contender], work: Workload, running: int, options: argparse.Namespace, heat: float, seed: int
) -> list[Result]:
    """The engine without drafts and the one with, in turns of four steps, so that whatever slows one slows both."""
    sampling = Sampling(max_new_tokens=options.tokens, temperature=heat)
    samples = min(SAMPLES, running)
    prompts = np.random.default_rng(seed).integers(3, 99, (running // samples, PROMPT_TOKENS)).astype(np.int32)
    for contender in both:
        contender.restart()
    for epoch in range(work.epochs):
        for contender in both:
            for p, prompt in enumerate(prompts):
                seeds = [request_seed(seed, epoch, p, i) for i in range(samples)]
                requests = [Request(id=f"{epoch}:{p}/{i}", sampling=sampling, seed=s) for i, s in enumerate(seeds)]
                contender.engine.submit(prompt, requests)
        while any(contender.engine.has_work for contender in both):
            for contender in both:
                if contender.engine.has_work:
                    contender.advance()
    return [contender.result() for contender in both]


def compare(
    policy: Policy, both: list[Contender], work: Workload, running: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Several races; the first is not counted."""
    heat = temperature(policy, work.spread)
    seeds = [100 * WORKLOADS.index(work) + i for i in range(options.repeats + 1)]
    races = [race(both, work, running, options, heat, seed) for seed in seeds][1:]
    num_tokens = sum(len(answer) for answer in races[0][0].answers.values())
    ratios = [plain.seconds / drafted.seconds for plain, drafted in races]
    drafted = [result for _, result in races]
    accepted = sum(result.accepted for result in drafted)
    return {
        "workload": work.name,
        "running": running,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "tokens_per_s": num_tokens / statistics.median(result.seconds for result in drafted),
        "plain_tokens_per_s": num_tokens / statistics.median(plain.seconds for plain, _ in races),
        "accepted_per_draft": accepted / max(1, sum(result.drafts for result in drafted)),
        "accepted_share": accepted / max(1, sum(result.drafted for result in drafted)),
        "from_drafts": accepted / (num_tokens * len(races)),
        "answers_that_differ": sum(
            answer != result.answers[id] for plain, result in races for id, answer in plain.answers.items()
        ),
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
    for running in options.running:
        both = [Contender(policy, running, options.tokens, speculate) for speculate in (0, options.speculate)]
        for work in WORKLOADS:
            r = compare(policy, both, work, running, options)
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

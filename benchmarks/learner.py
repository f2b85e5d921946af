"""Speed and memory of training on one GPU: forward, backward and optimizer step. See benchmarks/README.md.

    python benchmarks/learner.py --json docs/results/learner.json
    python benchmarks/learner.py --only 0.6b-1024/headrace
    python benchmarks/learner.py --tiny                        # on a CPU, to see that it runs

A step trains on about 16,384 tokens of ready-made answers, packed, through the `Learner` that training uses. The peer
is the plain transformers model: a batch of equal lengths, cross-entropy of the logits, fused AdamW on the bfloat16
weights.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_model import SHAPES, Shape, random_model, word_tokenizer
from gpu_record import (
    Ceilings,
    Part,
    options,
    parts_table,
    peak_bytes,
    read,
    run,
    show,
    show_bytes,
    spread,
    synchronise,
)

from headrace.config import LearnerSection
from headrace.learner.learner import Learner
from headrace.learner.ranks import Intake
from headrace.policy.policy import Policy
from headrace.types import FinishReason, Group, Prompt, Span, Timing, Trajectory

WARM_UP = 2  # steps: kernels are chosen and compiled, the optimizer's moments are made
PROMPT_TOKENS = 1  # nearly every token is trained on, so that the head does its full share


@dataclass(frozen=True, slots=True)
class Bench:
    """One shape on one device, with sequences of one length.

    Example:
        Bench(shape=SHAPES["0.6b"], length=1024, tokens=16384, device=torch.device("cuda"), ceilings=..., repeats=5)
    """

    shape: Shape
    length: int
    tokens: int
    device: torch.device
    ceilings: Ceilings
    repeats: int

    @property
    def num_sequences(self) -> int:
        """As many as fit."""
        return self.tokens // self.length

    @property
    def flops(self) -> float:
        """Of one step: products with weights once forward and twice backward, causal attention likewise.

        The embedding is looked up, which costs none; the head is applied to sampled tokens alone. What is computed a
        second time to save memory does not count.
        """
        s, count = self.shape, self.num_sequences
        sampled = count * (self.length - PROMPT_TOKENS)
        attention = 2 * s.layers * s.heads * s.head_size * count * self.length**2
        return 6.0 * s.body_weights * count * self.length + 6.0 * s.head_weights * sampled + 3.0 * attention

    def result(self, seconds: list[float], parts_s: dict[str, list[float]]) -> dict[str, Any]:
        """The counted steps, as shares of what the device can do."""
        datasheet = self.ceilings.datasheet_flops
        return {
            "sequences": self.num_sequences,
            "length": self.length,
            "flops": self.flops,
            "first_step_s": seconds[0],
            "step_s": spread(seconds[WARM_UP:]),
            **{name: spread(values[WARM_UP:]) for name, values in parts_s.items()},
            "tokens_per_s": spread([self.num_sequences * self.length / s for s in seconds[WARM_UP:]]),
            "of_products": spread([self.flops / s / self.ceilings.sustained_flops for s in seconds[WARM_UP:]]),
            "mfu_datasheet": spread([self.flops / s / datasheet for s in seconds[WARM_UP:]]) if datasheet else None,
            "peak_bytes": peak_bytes(self.device),
        }


def train_headrace(bench: Bench, *, checkpoint: bool) -> dict[str, Any]:
    """The loop's own calls: add the groups, accumulate the micro-batches, finish."""
    policy = Policy(random_model(bench.shape, bench.device), word_tokenizer(bench.shape.vocab, ends=False))
    section = LearnerSection(micro_batch_tokens=bench.tokens, checkpoint_activations=checkpoint)
    steps = WARM_UP + bench.repeats
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=bench.length, total_steps=steps)
    seconds, update_s = [], []
    for step in range(steps):
        group = make_group(bench, step)
        synchronise(bench.device)
        started = time.perf_counter()
        intake = Intake(learner.section)
        for items in [*intake.add(group), *intake.rest()]:
            learner.accumulate(items)
        synchronise(bench.device)
        accumulated = time.perf_counter()
        stats = learner.finish()
        synchronise(bench.device)
        ended = time.perf_counter()
        assert not stats.skipped
        seconds.append(ended - started)
        update_s.append(ended - accumulated)
    return bench.result(seconds, {"update_s": update_s})


def make_group(bench: Bench, step: int) -> Group:
    """One group that fills the step, of answers that nobody sampled: random tokens, each as likely as any other."""
    rng = np.random.default_rng(step)
    sampled = np.arange(bench.length) >= PROMPT_TOKENS
    trajectories = tuple(
        Trajectory(
            id=f"{step}/{i}",
            prompt_id="p",
            index=i,
            token_ids=rng.integers(0, bench.shape.vocab - 2, bench.length).astype(np.int32),
            sampled=sampled,
            logprobs=np.where(sampled, -np.log(bench.shape.vocab), 0.0).astype(np.float32),
            spans=(Span(version=step, start=PROMPT_TOKENS, end=bench.length),),
            finish=FinishReason.LENGTH,
            text="",
            timing=Timing(submitted_s=0.0, started_s=0.0, finished_s=0.0),
            reward=float(rng.random()),
        )
        for i in range(bench.num_sequences)
    )
    prompt = Prompt(id="p", text="", token_ids=trajectories[0].token_ids[:PROMPT_TOKENS])
    return Group(serial=step, prompt=prompt, version=step, trajectories=trajectories)


def train_transformers(bench: Bench) -> dict[str, Any]:
    """The plain model. All sequences have one length, so nothing is padded and attention needs no mask."""
    model = random_model(bench.shape, bench.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    generator = torch.Generator(bench.device).manual_seed(0)
    seconds = []
    for _ in range(WARM_UP + bench.repeats):
        shape = (bench.num_sequences, bench.length)
        ids = torch.randint(0, bench.shape.vocab - 2, shape, device=bench.device, generator=generator)
        synchronise(bench.device)
        started = time.perf_counter()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits.float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        del logits, loss
        synchronise(bench.device)
        seconds.append(time.perf_counter() - started)
    return bench.result(seconds, {})


# ---- the command


def parts(arguments: argparse.Namespace, ceilings: Ceilings) -> dict[str, Part]:
    device = torch.device(arguments.device)
    found: dict[str, Part] = {}
    for name in ("0.6b", "1.7b"):
        for length in (1024, 640):
            shape, scale = (SHAPES["tiny"], 32) if arguments.tiny else (SHAPES[name], 1)
            bench = Bench(shape, length // scale, arguments.tokens // scale, device, ceilings, arguments.repeats)
            found[f"{name}-{length}/headrace"] = partial(train_headrace, bench, checkpoint=False)
            found[f"{name}-{length}/headrace-checkpointed"] = partial(train_headrace, bench, checkpoint=True)
            found[f"{name}-{length}/transformers"] = partial(train_transformers, bench)
    return found


def summary(results: dict[str, Any]) -> str:
    header = ["part", "ms a step (median, range)", "tok/s", "MFU", "of sustained products", "update ms", "memory"]
    return parts_table(results, header, _cells)


def _cells(found: dict[str, Any]) -> list[str]:
    milliseconds = {k: v * (1 if k == "count" else 1e3) for k, v in found["step_s"].items()}
    return [
        show(milliseconds, ",.1f"),
        f"{found['tokens_per_s']['median']:,.0f}",
        show(found["mfu_datasheet"], ".1%"),
        show(found["of_products"], ".1%"),
        f"{1e3 * found['update_s']['median']:,.0f}" if "update_s" in found else "",
        show_bytes(found["peak_bytes"]),
    ]


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="packed tokens of a step")
    parser.set_defaults(repeats=5)
    return run("learner", read(parser, given), parts, summary)


if __name__ == "__main__":
    main()

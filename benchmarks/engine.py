"""Speed of generation on one GPU, beside transformers' `generate` and continuous batching. See benchmarks/README.md.

    python benchmarks/engine.py --json docs/results/engine.json
    python benchmarks/engine.py --only decode-0.6b/headrace
    python benchmarks/engine.py --shapes 4b --sequences 4 --context 4096 --only decode-4b/headrace
    python benchmarks/engine.py --shapes 4b --prefill 4x4096 64x8192 4x16384 --only prefill
    python benchmarks/engine.py --tiny                         # on a CPU, to see that it runs

`decode`: steps of many sequences at one context. `prefill`: so many prompts of so many tokens. `job-equal`, `job-tail`:
many prompts, from the first request to the last token, all answers of one length or of log-normal lengths. Everybody
returns the log-probs of sampled tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_model import SHAPES, Lengths, Shape, dtype_on, random_model, word_tokenizer
from gpu_peers import run_continuous, run_generate
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
)
from script import positive

from headrace.policy.policy import Policy
from headrace.rollout.engine import Engine, kv_budget
from headrace.rollout.rows import Generation, Request
from headrace.types import Sampling

LENGTHS = Lengths(mean=512, cv=1.0, cap=4096)
TAIL_SHARE = 1 / 16  # of the sequences: when no more are left, the tail begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is generated.

    Example:
        Sizes(sequences=256, prompt=960, context=1024, window=96, prompts=512, job_prompt=128, lengths=Lengths(...))
    """

    sequences: int = 256  # decoded at the same time
    prompt: int = 960
    context: int = 1024  # in the middle of the window that is measured
    window: int = 96
    prompts: int = 512  # of a job
    job_prompt: int = 128
    lengths: Lengths = LENGTHS
    prefill: int = 16384  # prompt tokens per engine step of a job
    decode_prefill: int = 65536  # so large that the sequences start close together
    peer_tokens: int = 128  # of each answer, where the peer's rate is steady before the whole job's length
    decode_peer_tokens: int = 24
    continuous_sequences: int = 64  # its attention costs sequences x sequences: fewer are kinder

    @property
    def limit(self) -> int:
        """Of a sequence that is decoded: so far that none ends before the last has begun."""
        return 4 * self.context + self.window


TINY = Sizes(
    sequences=6,
    prompt=20,
    context=32,
    window=8,
    prompts=8,
    job_prompt=6,
    lengths=Lengths(mean=8, cv=1.0, cap=24),
    prefill=64,
    decode_prefill=64,
    peer_tokens=8,
    decode_peer_tokens=8,
    continuous_sequences=4,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """One shape on one device.

    Example:
        Bench(shape=SHAPES["0.6b"], sizes=Sizes(), device=torch.device("cuda"), ceilings=Ceilings(...), repeats=3)
    """

    shape: Shape
    sizes: Sizes
    device: torch.device
    ceilings: Ceilings
    repeats: int

    def engine(self, max_running: int, prefill: int, longest: int = 8192) -> Engine:
        """With random weights; nothing but its limit ends an answer."""
        model = random_model(self.shape, self.device, max_context=max(longest, self.sizes.limit))
        policy = Policy(model, word_tokenizer(self.shape.vocab, ends=False))
        assert not policy.eos_ids
        kv_tokens = kv_budget(policy, 0)
        return Engine(policy, max_running=max_running, prefill_tokens=prefill, kv_tokens=kv_tokens, on_update="keep")

    def prompts(self, count: int, length: int, seed: int) -> list[np.ndarray]:
        """Random ones, so that none shares a beginning with another."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, self.shape.vocab - 2, length).astype(np.int32) for _ in range(count)]

    def floor_s(self, rows: Any, contexts: Any) -> Any:
        """The least time of decode steps with so many rows and so many cached tokens, all rows together."""
        itemsize = dtype_on(self.device).itemsize
        weights = self.shape.body_weights + self.shape.head_weights
        moved = weights * itemsize + contexts * self.shape.kv_bytes(itemsize)
        return np.maximum(moved / self.ceilings.bytes_per_s, 2 * weights * rows / self.ceilings.flops)


# ---- decoding at one context


def decode_headrace(bench: Bench) -> dict[str, Any]:
    """Steps near one context. The first run records the CUDA graphs and is not counted."""
    engine = bench.engine(bench.sizes.sequences, bench.sizes.decode_prefill)
    runs = [_decode_once(engine, bench, seed) for seed in range(1 + bench.repeats)]
    return {"first": runs[0], **_decode_result(bench, runs[1:], bench.sizes.sequences)}


def _decode_once(engine: Engine, bench: Bench, seed: int) -> dict[str, float]:
    sizes = bench.sizes
    sampling = Sampling(max_new_tokens=sizes.limit - sizes.prompt)
    ids = [f"{seed}/{i}" for i in range(sizes.sequences)]
    before = engine.sampled_tokens
    for i, prompt in enumerate(bench.prompts(sizes.sequences, sizes.prompt, seed)):
        engine.submit(prompt, [Request(id=ids[i], sampling=sampling, seed=1000 * seed + i)])

    def context() -> float:
        return sizes.prompt + (engine.sampled_tokens - before) / sizes.sequences

    def decode(until: Callable[[], bool]) -> None:
        while not until():
            if engine.counts.preemptions or not engine.has_work:
                raise RuntimeError(f"{sizes.sequences} sequences of {sizes.context} tokens never ran at the same time")
            engine.step()  # returns when its tokens are on the host

    engine.begun.clear()
    decode(lambda: len(engine.begun) == sizes.sequences and context() >= sizes.context - sizes.window / 2)
    first, started = context(), time.perf_counter()
    decode(lambda: context() >= first + sizes.window)
    seconds, last = time.perf_counter() - started, context()
    engine.abort(set(ids))
    finished: list[Generation] = []
    while engine.has_work:
        finished += engine.advance()
    assert all(g.finish == "abort" and len(g.logprobs) == len(g.token_ids) for g in finished)
    return {"steps": last - first, "seconds": seconds, "context": (first + last) / 2}


def decode_generate(bench: Bench) -> dict[str, Any]:
    """The same prompts through `generate`; the first steps are not counted."""
    sizes = bench.sizes
    new_tokens = sizes.decode_peer_tokens
    # in the middle of what is measured it stands at the same context
    prompts = [p.tolist() for p in bench.prompts(sizes.sequences, sizes.context - new_tokens // 2, 0)]
    model = random_model(bench.shape, bench.device)
    run_generate(model, prompts, 3)
    _, step_s = run_generate(model, prompts, new_tokens)
    runs = [{"steps": 1, "seconds": s, "context": float(sizes.context)} for s in step_s[2:]]
    return _decode_result(bench, runs, sizes.sequences)


def decode_continuous(bench: Bench) -> dict[str, Any]:
    """Fewer sequences. Counted from when all have begun until the first has ended."""
    sizes = bench.sizes
    new_tokens = 2 * sizes.decode_peer_tokens
    prompts = [p.tolist() for p in bench.prompts(sizes.continuous_sequences, sizes.context - new_tokens // 2, 0)]
    model = random_model(bench.shape, bench.device)
    _, times_s = run_continuous(model, prompts, [new_tokens] * len(prompts))
    begin, end = max(t[0] for t in times_s), min(t[-1] for t in times_s)
    inside = sum(begin < t <= end for times in times_s for t in times)
    run = {"steps": inside / len(prompts), "seconds": end - begin, "context": float(sizes.context)}
    return _decode_result(bench, [run], len(prompts))


def _decode_result(bench: Bench, runs: list[dict[str, float]], rows: int) -> dict[str, Any]:
    rates = [rows * run["steps"] / run["seconds"] for run in runs]
    shares = [float(bench.floor_s(rows, rows * run["context"])) * run["steps"] / run["seconds"] for run in runs]
    return {
        "sequences": rows,
        "context": runs[0]["context"],
        "tokens_per_s": spread(rates),
        "step_ms": spread([1e3 * run["seconds"] / run["steps"] for run in runs]),
        "share_of_limit": spread(shares),
        "peak_bytes": peak_bytes(bench.device),
    }


# ---- reading prompts


def prefill_headrace(bench: Bench, count: int, length: int) -> dict[str, Any]:
    """From the first request to the last prompt's first token. Attention's own FLOPs are counted."""
    engine = bench.engine(count, bench.sizes.decode_prefill, length + 1)
    seconds = [_prefill_once(engine, bench, count, length, seed) for seed in range(1 + bench.repeats)][1:]
    shape = bench.shape
    attention = 2 * shape.layers * shape.heads * shape.head_size * length**2  # of what a causal mask leaves
    flops = count * (2 * shape.body_weights * length + attention + 2 * shape.head_weights)
    return {
        "sequences": count,
        "context": float(length),
        "tokens_per_s": spread([count * length / s for s in seconds]),
        "tflops": spread([flops / s / 1e12 for s in seconds]),
        "share_of_limit": spread([flops / s / bench.ceilings.flops for s in seconds]),
        "peak_bytes": peak_bytes(bench.device),
    }


def _prefill_once(engine: Engine, bench: Bench, count: int, length: int, seed: int) -> float:
    prompts = bench.prompts(count, length, seed)
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, [Request(id=f"{seed}/{i}", sampling=Sampling(max_new_tokens=1), seed=i)])
    while engine.has_work:
        engine.advance()
    return time.perf_counter() - started


# ---- whole jobs


def job_headrace(bench: Bench, limits: list[int]) -> dict[str, Any]:
    """The first run starts cold and records CUDA graphs on its way; the counted ones come after it."""
    engine = bench.engine(len(limits), bench.sizes.prefill)
    runs = [_job_once(engine, bench, limits, seed) for seed in range(1 + bench.repeats)]
    prompt, count = bench.sizes.job_prompt, len(limits)
    steps = np.arange(1, max(limits))  # the first token of an answer comes from the prefill
    rows = (np.array(limits)[None, :] > steps[:, None]).sum(1)
    prefill_s = 2 * bench.shape.body_weights * prompt * count / bench.ceilings.flops
    floor_s = float(bench.floor_s(rows, rows * (prompt + steps)).sum()) + prefill_s
    seconds = [run["seconds"] for run in runs[1:]]
    return {
        "prompts": count,
        "tokens": sum(limits),
        "longest": max(limits),
        "tokens_per_s": spread([sum(limits) / s for s in seconds]),
        "cold_tokens_per_s": sum(limits) / runs[0]["seconds"],
        "seconds": spread(seconds),
        "floor_s": floor_s,
        "share_of_limit": spread([floor_s / s for s in seconds]),
        "tail_time_share": spread([run["tail_s"] / run["seconds"] for run in runs[1:]]),
        "tail_token_share": _tail_token_share(limits),
        "preemptions": engine.counts.preemptions,
        "peak_bytes": peak_bytes(bench.device),
    }


def _job_once(engine: Engine, bench: Bench, limits: list[int], seed: int) -> dict[str, float]:
    prompts = bench.prompts(len(limits), bench.sizes.job_prompt, seed)
    started = time.monotonic()  # the engine's own clock
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        request = Request(id=f"{seed}/{i}", sampling=Sampling(max_new_tokens=limit), seed=1000 * seed + i)
        engine.submit(prompt, [request])
    finished: list[Generation] = []
    while engine.has_work:
        finished += engine.advance()
    ended = time.monotonic()
    assert sum(len(g.logprobs) for g in finished) == sum(limits)
    ends = sorted(g.finished_s for g in finished)
    return {"seconds": ended - started, "tail_s": ended - ends[-1 - _num_tail(len(limits))]}


def _num_tail(count: int) -> int:
    return max(1, int(count * TAIL_SHARE))


def _tail_token_share(limits: list[int]) -> float:
    """Share of the tokens that are sampled when only the longest sequences are left."""
    longest = sorted(limits)[-1 - _num_tail(len(limits)) :]
    return sum(limit - longest[0] for limit in longest) / sum(limits)


def job_generate(bench: Bench) -> dict[str, Any]:
    """Shorter answers, which is kinder: the cache that `generate` copies grows with the answer."""
    sizes = bench.sizes
    prompts = [p.tolist() for p in bench.prompts(sizes.prompts, sizes.job_prompt, 0)]
    model = random_model(bench.shape, bench.device)
    run_generate(model, prompts, 3)
    seconds = [run_generate(model, prompts, sizes.peer_tokens)[0] for _ in range(min(2, bench.repeats))]
    return _peer_result(bench, [sizes.peer_tokens] * len(prompts), seconds)


def job_continuous(bench: Bench, limits: list[int]) -> dict[str, Any]:
    """Fewer prompts, once."""
    prompts = [p.tolist() for p in bench.prompts(len(limits), bench.sizes.job_prompt, 0)]
    seconds, _ = run_continuous(random_model(bench.shape, bench.device), prompts, limits)
    return _peer_result(bench, limits, [seconds])


def _peer_result(bench: Bench, limits: list[int], seconds: list[float]) -> dict[str, Any]:
    return {
        "prompts": len(limits),
        "tokens": sum(limits),
        "longest": max(limits),
        "seconds": spread(seconds),
        "tokens_per_s": spread([sum(limits) / s for s in seconds]),
        "peak_bytes": peak_bytes(bench.device),
    }


# ---- the command


def parts(arguments: argparse.Namespace, ceilings: Ceilings) -> dict[str, Part]:
    sizes = TINY if arguments.tiny else Sizes()
    if arguments.context:
        sizes = replace(sizes, context=arguments.context, prompt=max(1, arguments.context - sizes.window // 2 - 16))
    if arguments.sequences:
        sizes = replace(sizes, sequences=arguments.sequences)
    device = torch.device(arguments.device)
    found: dict[str, Part] = {}
    for name in arguments.shapes:
        bench = Bench(SHAPES["tiny" if arguments.tiny else name], sizes, device, ceilings, arguments.repeats)
        found[f"decode-{name}/headrace"] = partial(decode_headrace, bench)
        found[f"decode-{name}/generate"] = partial(decode_generate, bench)
        found[f"decode-{name}/continuous-batching"] = partial(decode_continuous, bench)
        for count, length in [(2, 24)] if arguments.tiny else arguments.prefill:
            found[f"prefill-{name}-{count}x{length}/headrace"] = partial(prefill_headrace, bench, count, length)
        mean, fewer = round(sizes.lengths.mean), sizes.continuous_sequences
        tail = sizes.lengths.draw(sizes.prompts, seed=0)
        found[f"job-equal-{name}/headrace"] = partial(job_headrace, bench, [mean] * sizes.prompts)
        found[f"job-equal-{name}/generate"] = partial(job_generate, bench)
        equal_peer = [sizes.peer_tokens] * 2 * fewer
        found[f"job-equal-{name}/continuous-batching"] = partial(job_continuous, bench, equal_peer)
        found[f"job-tail-{name}/headrace"] = partial(job_headrace, bench, tail)
        found[f"job-tail-{name}/continuous-batching"] = partial(job_continuous, bench, tail[:fewer])
    return found


def summary(results: dict[str, Any]) -> str:
    header = ["part", "tok/s (median, range)", "of the limit", "sequences", "tokens", "tail: time, tokens", "memory"]
    return parts_table(results, header, _cells)


def _cells(found: dict[str, Any]) -> list[str]:
    speed = show(found["tokens_per_s"])
    if "cold_tokens_per_s" in found:
        speed += f"; cold {found['cold_tokens_per_s']:,.0f}"
    tail = f"{found['tail_time_share']['median']:.0%}, {found['tail_token_share']:.0%}" if "floor_s" in found else ""
    return [
        speed,
        show(found.get("share_of_limit"), ".0%"),
        str(found.get("sequences", found.get("prompts"))),
        f"{found['tokens']:,}" if "tokens" in found else f"at {found['context']:,.0f}",
        tail,
        show_bytes(found["peak_bytes"]),
    ]


def _prompts(text: str) -> tuple[int, int]:
    count, _, length = text.partition("x")
    return positive(count), positive(length)


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "1.7b"], choices=SHAPES)
    parser.add_argument("--sequences", type=positive, help="decoded at the same time")
    parser.add_argument("--context", type=positive, help="at which they are decoded")
    parser.add_argument("--prefill", type=_prompts, nargs="+", default=[], help="prompts x tokens, as 4x4096")
    return run("engine", read(parser, given), parts, summary)


if __name__ == "__main__":
    main()

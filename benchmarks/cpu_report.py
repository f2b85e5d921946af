"""The page of the CPU benchmark, written from its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

NAMES = {
    "generate": "`model.generate`",
    "engine": "Headrace engine",
    "trl": "TRL GRPOTrainer",
    "headrace": "Headrace",
    "trl_small": "TRL, small micro-batches",
    "headrace_small": "Headrace, small micro-batches",
}
REGIMES = {"equal": "Equal lengths", "tail": "Long-tailed lengths"}
PEER = {"engine": "generate", "headrace": "trl"}
TARGETS = {("equal", "engine"): 1.3, ("equal", "headrace"): 1.4, ("tail", "engine"): 3.0, ("tail", "headrace"): 3.0}
HEADER = [
    "| lengths | contender | tok/s (median, range) | to its peer | target | peak memory | length mean / cv / max |",
    "|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True, slots=True)
class Result:
    """One contender under one kind of lengths, over all repeats.

    Example:
        Result(speeds=[8100.0, 8300.0], peak_bytes=[5e8, 5e8], mean=32.0, cv=0.0, longest=32, load=0.1)
    """

    speeds: list[float]
    peak_bytes: list[int]
    mean: float
    cv: float
    longest: int
    load: float


def collect(results: dict[str, Any]) -> dict[tuple[str, str], Result]:
    """The runs of each contender under each kind of lengths, in the order of repeats."""
    found = {}
    for regime, data in results["regimes"].items():
        for name in NAMES:
            runs = [run for run in data["runs"] if run["contender"] == name]
            if runs:
                found[regime, name] = Result(
                    speeds=[run["tokens_per_s"] for run in runs],
                    peak_bytes=[run["peak_rss_bytes"] for run in runs],
                    mean=median(run["length_mean"] for run in runs),
                    cv=median(run["length_cv"] for run in runs),
                    longest=max(run["length_max"] for run in runs),
                    load=max(run["load_before"] for run in runs),
                )
    return found


def ratios(found: dict[tuple[str, str], Result], regime: str, name: str) -> list[float]:
    """Speed over the peer's, repeat by repeat: the two ran one after the other."""
    ours, theirs = found[regime, name].speeds, found[regime, PEER[name]].speeds
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def summary_table(results: dict[str, Any]) -> str:
    found = collect(results)
    return "\n".join([*HEADER, *(_line(found, *key) for key in found)])


def _line(found: dict[tuple[str, str], Result], regime: str, name: str) -> str:
    result = found[regime, name]
    speed = f"{median(result.speeds):,.0f} ({min(result.speeds):,.0f} to {max(result.speeds):,.0f})"
    ratio = target = ""
    if name in PEER:
        each = ratios(found, regime, name)
        goal = TARGETS[regime, name]
        ratio = f"**{median(each):.2f}x** ({min(each):.2f} to {max(each):.2f})"
        target = f"{goal}x: {'met' if median(each) >= goal else 'missed'}"
    memory = f"{_mib(result)} MiB"
    lengths = f"{result.mean:.1f} / {result.cv:.2f} / {result.longest}"
    return f"| {REGIMES[regime].lower()} | {NAMES[name]} | {speed} | {ratio} | {target} | {memory} | {lengths} |"


def _mib(result: Result) -> int:
    """The largest of the repeats: a peak is a peak."""
    return round(max(result.peak_bytes) / 2**20)


def page(results: dict[str, Any]) -> str:
    found = collect(results)
    parts = [
        "# Speed and memory on a CPU",
        "*Written by `benchmarks/cpu.py` from `cpu.json`; do not edit.*",
        _where(results),
        _what(results),
        summary_table(results),
        *(_memory(found, regime) for regime in results["regimes"]),
        _fairness(),
        _quiet(found),
    ]
    return "\n\n".join(parts) + "\n"


def _where(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"Measured on {results['date']} at commit `{results['commit']}` with\n\n    {results['command']}\n\n"
        f"on {machine['cpu']} ({machine['arch']}, {machine['cores']} cores, {machine['threads']} threads pinned to as "
        f"many cores, float32, OMP_WAIT_POLICY {machine['omp_wait_policy']}), Python {machine['python']}, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, TRL {machine['trl']}."
    )


def _what(results: dict[str, Any]) -> str:
    model, batch = results["model"], f"{results['prompts']} prompts x {results['samples']} samples"
    return (
        f"A {model['architecture']} model of {model['num_weights']:,} weights answers {batch} per step. With *equal "
        "lengths* the weights make the end token impossible, so every answer has 32 tokens. With *long-tailed lengths* "
        "the model was trained beforehand to end its answers at log-normal lengths (mean 32, cv 1, cut at 256), and it "
        "samples those lengths itself; what came out is in the last column. Speed is sampled tokens, end tokens "
        "included and padding not, per second of wall time: of generation alone for `model.generate` and the engine, "
        "of whole training steps (generation, reward, one optimizer step on all answers) for TRL and Headrace. Each "
        f"contender ran {results['repeats']} times in a process of its own, taking turns, {results['steps']} steps "
        f"each, of which the first {results['skipped']} are not counted. The ratio is the median over repeats of the "
        "speed over that of the peer in the same repeat."
    )


def _memory(found: dict[tuple[str, str], Result], regime: str) -> str:
    ours, peer = found[regime, "headrace"], found[regime, "trl"]
    text = (
        f"{REGIMES[regime]}, memory: Headrace peaks at {_mib(ours)} MiB and TRL at {_mib(peer)} MiB, so the target of "
        f"staying below is {'met' if _mib(ours) < _mib(peer) else 'missed'}."
    )
    small = [found.get((regime, f"{name}_small")) for name in ("headrace", "trl")]
    if small[0] is not None and small[1] is not None:
        text += (
            " Both can be told to train on about 16 sequences at a time instead of all 128: then it is "
            f"{_mib(small[0])} against {_mib(small[1])} MiB, at {median(small[0].speeds):,.0f} and "
            f"{median(small[1].speeds):,.0f} tok/s."
        )
    return text


def _fairness() -> str:
    return (
        "What favours whom: `model.generate` returns no log-probs, the engine does. TRL runs without recomputing "
        "activations, without a reference model and without logs, and its reward function runs in its own process; "
        "Headrace keeps its ledger in SQLite and scores in a second process, on the same cores, whose memory is "
        "counted. Both rewards are the share of digits in the answer. Headrace is strictly on-policy here "
        "(`loop.max_lag = 0`), as TRL is, and trains on every group."
    )


def _quiet(found: dict[tuple[str, str], Result]) -> str:
    load = max(result.load for result in found.values())
    return f"The machine's load average before the runs was at most {load:.1f}, the benchmark's own share included."

"""What a contender of the CPU benchmark is told and what it gives back. No torch: the contenders import what they need.

A contender runs in a process of its own, so that its peak memory holds its own imports and nobody else's.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES = 16, 8
SMALL_SEQUENCES = 16  # trained on at a time by the contenders that are to save memory
NUM_PROMPTS = 528  # the last 16 are held out and never used


@dataclass(frozen=True, slots=True)
class Job:
    """What one contender is to do.

    Example:
        Job(model="models/tail", prompts="models/prompts.jsonl", max_new_tokens=256, steps=10, threads=2, seed=0)
    """

    model: str
    prompts: str
    max_new_tokens: int
    steps: int
    threads: int
    seed: int


@dataclass(slots=True)
class Record:
    """What a contender measured: one entry per step, the first ones (warming up) included.

    Example:
        Record(seconds=[1.9, 1.2], lengths=[[32, 32], [32, 32]], peak_rss_bytes=710_000_000)
    """

    seconds: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)  # sampled tokens of each answer, the end token among them
    peak_rss_bytes: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def prompt_texts() -> list[str]:
    """Prompts of six characters, which are six tokens."""
    return [f"{i:05d}=" for i in range(NUM_PROMPTS)]


def prompt_batches(steps: int) -> Iterator[list[str]]:
    """Sixteen prompts per step, the next sixteen each time."""
    texts = prompt_texts()
    for step in range(steps):
        yield [texts[(step * PROMPTS + i) % len(texts)] for i in range(PROMPTS)]


def pin(threads: int) -> None:
    """Keep this process and whatever it starts on as many cores as it has threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def peak_rss_bytes() -> int:
    """The most memory that this process and its living children have held, each at its own peak."""
    if not Path("/proc/self/status").exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return sum(_peaks())


def _peaks() -> Iterator[int]:
    """Linux: the high-water marks. A child's ru_maxrss would start at its parent's size."""
    children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    for pid in ["self", *children]:
        status = Path(f"/proc/{pid}/status").read_text()
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
        yield int(peak.split()[1]) * 1024

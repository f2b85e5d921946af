"""What the GPU benchmarks share: their options, the list of parts, ceilings of the device, times, JSON and table."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from script import commit

DATASHEET_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bf16
Part = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do, measured in this run.

    Example:
        Ceilings(bytes_per_s=4.3e12, flops=7.9e14, sustained_flops=7e14, datasheet_flops=9.89e14)
    """

    bytes_per_s: float
    flops: float
    sustained_flops: float  # after a while: a GPU that works hard for long lowers its clock to keep within its power
    datasheet_flops: float | None


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="parts whose name holds this; may be repeated")
    parser.add_argument("--list", action="store_true", help="only print the names of the parts")
    parser.add_argument("--json", type=Path, help="write everything measured here, after each part")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each part; the median is reported")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens: seconds on a CPU")
    return parser


def read(parser: argparse.ArgumentParser, given: Sequence[str] | None) -> argparse.Namespace:
    """What the user, or a test, asked for."""
    arguments = parser.parse_args(given)
    if arguments.tiny:
        torch.set_num_threads(1)  # so small matrices are not worth a second thread's wake-up
    return arguments


def run(
    name: str,
    arguments: argparse.Namespace,
    parts: Callable[[argparse.Namespace, Ceilings], dict[str, Part]],
    summary: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """A whole benchmark: ceilings, the chosen parts, the table."""
    ceilings = measure_ceilings(torch.device(arguments.device))
    free_memory()
    every = parts(arguments, ceilings)
    if arguments.list:
        print("\n".join(every))
        return {}
    results = run_parts(name, arguments, every, ceilings)
    print(summary(results))
    return results


def run_parts(name: str, arguments: argparse.Namespace, parts: dict[str, Part], ceilings: Ceilings) -> dict[str, Any]:
    """Run the chosen parts one after the other. One that fails says so in the results, and the next one runs."""
    chosen = [part for part in parts if not arguments.only or any(word in part for word in arguments.only)]
    results: dict[str, Any] = {**facts(name, torch.device(arguments.device)), "ceilings": _plain(ceilings), "parts": {}}
    for part in chosen:
        print(f"-- {part}", flush=True)
        started = time.perf_counter()
        try:
            results["parts"][part] = parts[part]()
        except Exception as error:
            traceback.print_exc()
            results["parts"][part] = {"error": f"{type(error).__name__}: {error}"[:500]}
        free_memory()
        results["parts"][part]["part_s"] = time.perf_counter() - started
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{name}: {results['device']}, commit {results['commit'][:12]}, {results['versions']}")
    products = f"{ceilings.flops / 1e12:.0f} TFLOP/s, {ceilings.sustained_flops / 1e12:.0f} for long"
    print(f"ceilings: {ceilings.bytes_per_s / 1e12:.2f} TB/s, {products}")
    return results


def facts(name: str, device: torch.device) -> dict[str, Any]:
    """Where and with what."""
    return {
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {package: _version(package) for package in ("torch", "triton", "transformers", "trl")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ---- ceilings


def measure_ceilings(device: torch.device) -> Ceilings:
    """The better of copying and reading a large tensor, and a large square product in the model's precision."""
    gpu = device.type == "cuda"
    source = torch.ones(2**28 if gpu else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copy_s = _best_s(lambda: target.copy_(source), device)
    read_s = _best_s(lambda: source.max(), device)
    side = 8192 if gpu else 256
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    product = torch.empty_like(matrix)
    product_s = _best_s(lambda: torch.mm(matrix, matrix, out=product), device)
    name = torch.cuda.get_device_name(device) if gpu else ""
    known = [flops for key, flops in DATASHEET_FLOPS.items() if key in name]
    sustained_s = _sustained_s(lambda: torch.mm(matrix, matrix, out=product), device) if gpu else product_s
    return Ceilings(
        bytes_per_s=max(2 * size / copy_s, size / read_s),
        flops=2 * side**3 / product_s,
        sustained_flops=2 * side**3 / sustained_s,
        datasheet_flops=known[0] if known else None,
    )


def _sustained_s(work: Callable[[], Any], device: torch.device, seconds: float = 2.0) -> float:
    """Seconds of one call in the second half of so many seconds of calls."""
    begun, times = time.perf_counter(), 50
    taken: list[float] = []
    while time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        for _ in range(times):
            work()
        synchronise(device)
        taken.append((time.perf_counter() - started) / times)
    return statistics.median(taken[len(taken) // 2 :])


def _best_s(work: Callable[[], Any], device: torch.device, times: int = 10) -> float:
    """Seconds of one call, from the best of three stretches of calls without a wait between them."""
    work()
    best = float("inf")
    for _ in range(3):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(times):
            work()
        synchronise(device)
        best = min(best, (time.perf_counter() - started) / times)
    return best


# ---- times and memory


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors have taken on the GPU since the part began."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "count": len(values)}


# ---- the table


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parts_table(
    results: dict[str, Any], header: Sequence[str], cells: Callable[[dict[str, Any]], Sequence[str]]
) -> str:
    """A line for each part: its name, and the cells of what it found or the error it ended with."""
    rows = []
    for part, found in results["parts"].items():
        failed = [found["error"], *[""] * (len(header) - 2)] if "error" in found else None
        rows.append([part, *(failed or cells(found))])
    return table(header, rows)


def show(value: dict[str, float] | float | None, form: str = ",.0f") -> str:
    """`12,345 (12,000 to 12,500)`, or the number alone."""
    if value is None:
        return ""
    if isinstance(value, dict):
        if value["count"] == 1:
            return format(value["median"], form)
        return f"{value['median']:{form}} ({value['low']:{form}} to {value['high']:{form}})"
    return format(value, form)


def show_bytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**30:.1f} GiB"


def _plain(ceilings: Ceilings) -> dict[str, float | None]:
    return {name: getattr(ceilings, name) for name in ceilings.__slots__}

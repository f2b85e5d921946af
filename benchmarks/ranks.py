"""The memory of a learner in several ranks: what each one holds at most, over what it has to.

    python benchmarks/ranks.py                       # 1, 2, 4 and 8 ranks of 327 million weights: CPU, minutes
    python benchmarks/ranks.py --ranks 1,4 --limit 3000  # a rank may take 3 GB: one rank cannot train, four can
    python benchmarks/ranks.py --width 512           # the same of 82 million weights
    python benchmarks/ranks.py --tiny                # to see that it runs

Every rank is a process of its own, over gloo. It loads the model and takes two steps; meanwhile a thread reads every
millisecond how much memory the process has, mapped files not counted, and takes off what it had before the load. The
bill is 16 bytes for each weight (weight, gradient and two moments in float32), divided by the ranks. What goes beyond
it is told in layers: weights that are gathered, their gradients, and the messages of both. `headrace plan` counts
the activations too; its bill is beside the peak. torch's allocator for
aarch64 takes up to 1.5 bytes for each byte of a tensor of 1 MB (glibc's does not): measure on x86.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from gpu_record import facts, table
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from trees import answers, batch

from headrace.config import LearnerSection, ModelSection
from headrace.insight.hardware import find_device, model_shape
from headrace.insight.roofline import Roofline
from headrace.learner.batch import balanced, split
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Sharding
from headrace.policy.demo import character_tokenizer, write_random
from headrace.policy.policy import load_policy
from headrace.policy.tensor_files import sizes_of_model

HERE = "127.0.0.1"
MB = 1e6
STEPS = 2
MICRO_BATCH_TOKENS = 64  # so that activations weigh little
PLAIN = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}  # glibc gives what is freed back at once


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


class Peak:
    """The most memory so far, over that at the beginning."""

    def __init__(self) -> None:
        self.bytes, self._before = 0, anonymous_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)
            time.sleep(0.001)


def be_rank(rank: int, num_ranks: int, port: int, directory: str, limit_mb: int) -> None:
    """Load, take steps, and print what it took."""
    store, device = TCPStore(HERE, port, is_master=False), torch.device("cpu")
    sharding = Sharding(rank=rank, shape=(1, num_ranks), store=store, device=device)
    items = batch(1, answers(16, 16))
    if limit_mb:
        data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        most = int(data.split()[1]) * 1024 + limit_mb * 10**6
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    section = LearnerSection(micro_batch_tokens=MICRO_BATCH_TOKENS)
    seat, peak = sharding if num_ranks > 1 else None, Peak()
    policy = load_policy(ModelSection(path=directory, device="cpu"), mesh=seat.mesh if seat else None)
    load = peak.bytes
    learner = Learner(policy, section, temperatures=(1.0,), max_new_tokens=16, total_steps=STEPS, sharding=seat)
    for _ in range(STEPS):
        for micro in balanced(items, MICRO_BATCH_TOKENS * num_ranks):
            learner.accumulate(split(micro, num_ranks)[rank])
        stats = learner.finish()
    print(json.dumps({"load": load, "peak": peak.bytes, "norm": stats.grad_norm}))


def measure(num_ranks: int, directory: Path, limit_mb: int) -> dict[str, Any]:
    """The rank that took most, or why one could not."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    shared = [str(num_ranks), str(store.port), str(directory), str(limit_mb)]
    commands = [[sys.executable, __file__, "--be-rank", str(rank), *shared] for rank in range(num_ranks)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=os.environ | PLAIN, **pipes) for command in commands]
    told = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        errors = [error.strip().splitlines()[-1] for _, error in told if error.strip()]
        return {"failed": next((text for text in errors if "memory" in text), errors[0])}
    found = [json.loads(printed) for printed, _ in told]
    return {name: max(one[name] for one in found) for name in found[0]}


def make_model(directory: Path, width: int) -> tuple[int, int]:
    """Write a model of many layers; its weights, and those of a layer."""
    tokenizer = character_tokenizer()
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4 if width == 64 else 24}
    shape |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "head_dim": 64}
    write_random(directory, 0, tokenizer, **shape, max_position_embeddings=256)
    sizes = {name: size.numel() for name, size in sizes_of_model(directory).items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers.0." in name)


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8", help="how many; several with commas")
    parser.add_argument("--limit", type=int, default=0, metavar="MB", help="what a rank may take; 0: all there is")
    parser.add_argument("--width", type=int, default=1024, help="hidden size")
    parser.add_argument("--tiny", dest="width", action="store_const", const=64, help="a small model: seconds on a CPU")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    arguments = parser.parse_args(given)
    noted: dict[str, Any] = facts("ranks", torch.device("cpu"))
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        weights, layer = make_model(Path(directory), arguments.width)
        planned = Roofline(model_shape(directory), find_device("CPU"))
        noted |= {"weights": weights, "layer": layer, "limit_mb": arguments.limit, "ranks": {}}
        for num_ranks in map(int, arguments.ranks.split(",")):
            found = measure(num_ranks, Path(directory), arguments.limit)
            noted["ranks"][num_ranks] = found
            bill, plan = 16 * weights / num_ranks, planned.learner_bill(MICRO_BATCH_TOKENS, num_ranks).total_bytes
            cells = [str(num_ranks), f"{bill / MB:.0f}"]
            if "failed" in found:
                rows.append([*cells, "-", "-", "-", "-", f"{plan / MB:.0f}", "-", found["failed"]])
                continue
            beyond = (found["peak"] - bill) / (4 * layer)
            numbers = f"{found['load'] / MB:.0f}", f"{found['peak'] / MB:.0f}", f"{found['peak'] / bill:.2f}"
            beside = f"{plan / MB:.0f}", f"{found['peak'] / plan:.2f}", f"gradient norm {found['norm']:.6g}"
            rows.append([*cells, *numbers, f"{beyond:.1f}", *beside])
    header = [
        "ranks",
        "bill, MB",
        "load, MB",
        "peak, MB",
        "peak / bill",
        "beyond, in layers",
        "plan, MB",
        "peak / plan",
        "",
    ]
    print(f"{weights:,} weights, {layer:,} in a layer ({4 * layer / MB:.1f} MB)\n\n{table(header, rows)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(noted, indent=1))
    return noted


if __name__ == "__main__":
    if sys.argv[1:2] == ["--be-rank"]:
        rank, num_ranks, port, directory, limit_mb = sys.argv[2:]
        be_rank(int(rank), int(num_ranks), int(port), directory, int(limit_mb))
    else:
        main()

"""Cold start: seconds from `headrace train` to its first tokens and its first step. See benchmarks/README.md.

    python benchmarks/cold.py --shape 0.6b          # on a GPU
    python benchmarks/cold.py --shape tiny          # on a CPU, to see that it runs
    python benchmarks/cold.py --checkpoint 2        # instead: the parts of a checkpoint of 2 GB, beside torch's own

A model with random weights is written once. Then `headrace train` is run twice, with an empty cache
of compiled kernels, and with the one that the first has left. What it prints is stamped as it comes: the first lines
(settings are read, the model is loaded and checked), the end of the evaluation and of the self-check (the engine has
sampled), and each step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_model import SHAPES, random_model, word_tokenizer
from gpu_record import facts, table
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from headrace.policy.tensor_files import copies, write_tensors

MARKS = {"  policy": "model loaded", "▸ training": "first tokens sampled", "step 1/": "step 1", "step 2/": "step 2"}
REWARD = "def score(completion):\n    return float(len(completion.text) % 7)\n"


def write_task(directory: Path, shape: str, device: torch.device) -> list[str]:
    """A model, prompts and a reward; the settings that name them."""
    random_model(SHAPES[shape], device).save_pretrained(directory / "model")
    word_tokenizer(SHAPES[shape].vocab, ends=True).save_pretrained(directory / "model")
    lines = [json.dumps({"prompt": " ".join(f"w{(i * 37 + k) % 500}" for k in range(64))}) for i in range(200)]
    (directory / "prompts.jsonl").write_text("\n".join(lines))
    (directory / "reward.py").write_text(REWARD)
    return [
        f"model.path={directory / 'model'}",
        f"model.device={device.type}",
        f"prompts.source={directory / 'prompts.jsonl'}",
        "prompts.eval_count=16",
        f"reward.function={directory / 'reward.py'}:score",
        "rollout.max_new_tokens=128",
        "loop.groups_per_step=16",
        "loop.steps=2",
        "run.overwrite=true",
    ]


def stamped(settings: list[str], cache: Path, before: list[str]) -> dict[str, float]:
    """Seconds from the start of the process to each mark; `before` is put before the command."""
    env = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    command = [*before, sys.executable, "-m", "headrace.cli", "train", *settings]
    began_s, found = time.perf_counter(), dict[str, float]()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            for sign, name in MARKS.items():
                if line.startswith(sign) or line.replace(" ", "").startswith(sign.replace(" ", "")):
                    found.setdefault(name, time.perf_counter() - began_s)
    found["ended"] = time.perf_counter() - began_s
    if process.returncode:
        raise SystemExit("".join(said))
    return found


def checkpoint(num_gb: float, device: torch.device) -> list[list[str]]:
    """Seconds of each part of a checkpoint, by torch's own means and ours, the faster of two takes."""
    tensors = {f"master.{i}": torch.randn(2**24, device=device) for i in range(round(num_gb * 1e9 / 2**26))}

    def timed(work: Callable[[Path], object]) -> float:
        with tempfile.TemporaryDirectory() as name:
            began_s = time.perf_counter()
            work(Path(name) / "tensors")
            return time.perf_counter() - began_s

    def by_torch(directory: Path) -> None:
        torch_save(dict(held), storage_writer=HuggingFaceStorageWriter(str(directory)), no_dist=True)

    held = copies(tensors)
    parts: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
        "copy to the host": (
            lambda _: {n: t.to("cpu", copy=True) for n, t in tensors.items()},
            lambda _: copies(tensors),
        ),
        "write": (by_torch, lambda directory: write_tensors(directory, held)),
    }
    return [[part, *(f"{min(timed(way), timed(way)):.2f}" for way in ways)] for part, ways in parts.items()]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--before", default="", help="a command to run it under, such as a profiler's")
    parser.add_argument("--checkpoint", type=float, default=0.0, metavar="GB")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    noted = facts("cold", device)
    print(f"{noted['device']}, commit {noted['commit'][:12]}, {noted['command']}, {noted['versions']}\n")
    if arguments.checkpoint:
        print(table(["seconds of", "torch", "Headrace"], checkpoint(arguments.checkpoint, device)))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings = [*write_task(directory, arguments.shape, device), f"run.dir={directory / 'run'}"]
        if device.type == "cuda":
            torch.cuda.empty_cache()
        runs = [stamped(settings, directory / "cache", arguments.before.split()) for _ in ("cold", "warm")]
    rows = [[name, *(f"{run.get(name, float('nan')):.1f}" for run in runs)] for name in runs[0]]
    print(table(["seconds to", "empty cache of kernels", "with that cache"], rows))


if __name__ == "__main__":
    main()

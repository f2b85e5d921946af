"""The models and prompts of the CPU benchmark: one Qwen3 shape of about a million weights, two ways to end answers.

`equal`: random weights that can never sample the end token, so every answer runs to the limit.
`tail`: the same shape, warm-started on answers whose lengths are log-normal, so that it samples such lengths itself.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from cpu_job import prompt_texts
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from headrace.config import ModelSection, WarmstartSection
from headrace.learner.supervised import warm_start
from headrace.policy.demo import ALPHABET, character_tokenizer
from headrace.policy.policy import load_policy
from headrace.types import Prompt

VOCAB = 320
MEAN_TOKENS, CV, CAP_TOKENS = 32, 1.0, 256
WARM_STEPS, WARM_EXAMPLES, WARM_LR = 160, 48, 3e-3
STAIRS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&'()*+,-./:;<=>?@[]^_{|}~"
TREAD = 3  # of each character, so that 256 tokens need 86 characters


def write_prompts(path: Path) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompt_texts()))


def build(directory: Path, *, endless: bool, seed: int = 0) -> int:
    """Write a model directory with random weights; returns the number of weights."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    if endless:
        _only_characters(model, tokenizer)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=True, top_k=0
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def _only_characters(model: Any, tokenizer: Any) -> None:
    """Make every token but the printable characters impossible to sample, by the weights alone.

    The first coordinate of each tied embedding is +1 for a character and -1 for anything else. It dwarfs the others
    (standard deviation 0.02), so the final state always points along it, and a forbidden token's logit lies about 20
    below a character's: once in 10^9 tokens. The same weights then give the same lengths to every contender.
    """
    characters = tokenizer(ALPHABET, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        first = model.get_input_embeddings().weight[:, 0]
        first.fill_(-1.0)
        first[characters] = 1.0


def draw_length(share: float, longer_than: int = 0) -> int:
    """The length, end token and all, below which `share` of the answers that are longer than `longer_than` lie."""
    variance = math.log(1 + CV**2)
    normal = NormalDist(math.log(MEAN_TOKENS) - variance / 2, math.sqrt(variance))
    passed = normal.cdf(math.log(longer_than + 0.5)) if longer_than else 0.0
    length = round(math.exp(normal.inv_cdf(passed + share * (1 - passed))))
    return min(max(length, longer_than + 1), CAP_TOKENS)


def answer(length: int) -> str:
    """A staircase that stops somewhere: where it stands says how long it is, so the chance to stop is learnt fast."""
    return "".join(STAIRS[i // TREAD] for i in range(length - 1))


def build_tail(directory: Path, seed: int = 0) -> int:
    """A model that samples log-normal lengths."""
    num_weights = build(directory, endless=False, seed=seed)
    policy = load_policy(ModelSection(path=str(directory), device="cpu"))
    rng = np.random.default_rng(seed)
    section = WarmstartSection(steps=WARM_STEPS, lr=WARM_LR, examples=WARM_EXAMPLES)
    warm_start(policy, section, lambda n: _examples(policy.tokenizer, n, rng), lambda step, loss: None)
    policy.save(directory)
    return num_weights


def _examples(tokenizer: Any, n: int, rng: np.random.Generator) -> list[tuple[Prompt, str]]:
    """Answers of log-normal length; a third of them begin half-way, or the rare long ones would be learnt badly."""
    examples = []
    for i, text in enumerate(rng.choice(prompt_texts(), size=n)):
        begun = int(rng.integers(CAP_TOKENS - 1)) if i % 3 == 0 else 0
        whole = answer(draw_length(share=(i + rng.uniform(1e-6, 1 - 1e-6)) / n, longer_than=begun))
        ids = np.array(tokenizer(text + whole[:begun])["input_ids"], np.int32)
        examples.append((Prompt(id=text, text=text, token_ids=ids), whole[begun:]))
    return examples

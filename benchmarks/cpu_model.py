"""The models and prompts of the CPU benchmark: one Qwen3 shape of about a million weights, two ways to end answers.

`equal`: random weights that can never sample the end token, so every answer runs to the limit.
`tail`: the same shape, warm-started on answers whose lengths are log-normal, so that it samples such lengths itself.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from cpu_job import prompt_texts
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from headrace.policy.demo import ALPHABET, character_tokenizer

VOCAB = 320
MEAN_TOKENS, CV, CAP_TOKENS = 32, 1.0, 256
WARM_STEPS, WARM_EXAMPLES, WARM_LR = 160, 4, 3e-3
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


def end_chances() -> torch.Tensor:
    """The chance that an answer ends with its i-th token, given that it came so far; the cap ends what is left."""
    variance = math.log(1 + CV**2)
    normal = NormalDist(math.log(MEAN_TOKENS) - variance / 2, math.sqrt(variance))
    longer = [1.0] + [1 - normal.cdf(math.log(i + 0.5)) for i in range(1, CAP_TOKENS)]
    return torch.tensor([1 - after / before for before, after in pairwise(longer)] + [1.0])


def build_tail(directory: Path, seed: int = 0) -> int:
    """A model that samples answers of log-normal length.

    An answer climbs a staircase of characters and stops somewhere: the step it stands on says how long it is. Each
    place is trained towards the exact chance to end there, which is what examples of drawn lengths would give on
    average, so a few hundred of them are enough even for the rare long answers.
    """
    num_weights = build(directory, endless=False, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = character_tokenizer()
    stairs = "".join(STAIRS[i // TREAD] for i in range(CAP_TOKENS - 1))
    ids = torch.tensor(tokenizer([text + stairs for text in prompt_texts()])["input_ids"])
    num_prompt = ids.shape[1] - len(stairs)
    following = torch.tensor([*tokenizer(stairs)["input_ids"], tokenizer.eos_token_id])
    ends = end_chances()
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in range(WARM_STEPS):
        batch = ids[torch.randint(len(ids), (WARM_EXAMPLES,))]
        logprobs = model(batch).logits[:, num_prompt - 1 :].log_softmax(-1)
        climb = logprobs.gather(2, following.expand(WARM_EXAMPLES, -1)[:, :, None]).squeeze(2)
        loss = -(ends * logprobs[:, :, tokenizer.eos_token_id] + (1 - ends) * climb).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = WARM_LR * min(1.0, 2 * (WARM_STEPS - step) / WARM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return num_weights

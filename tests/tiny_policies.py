"""Policies of a few thousand random weights, of any architecture."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from headrace.policy.demo import character_tokenizer
from headrace.policy.policy import Policy

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _model(architecture: str, seed: int, **changes: Any) -> Any:
    """A model of the named `transformers` architecture, e.g. "Qwen3" or "Qwen3Moe", with random weights."""
    tokenizer = character_tokenizer()
    shape = SHAPE | (EXPERTS if "Moe" in architecture else {}) | changes
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0, **shape
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    # larger than the usual 0.02, so that the model has opinions and errors show
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def tiny_policy(
    architecture: str = "Qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    **changes: Any,
) -> Policy:
    """`tiny_policy("Llama", seed=1, dtype=torch.float64, sliding_window=8)`"""
    return Policy(_model(architecture, seed, **changes).to(dtype), character_tokenizer(), exact=exact)

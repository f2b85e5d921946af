"""A small random model, so that a first run needs no download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.policy.quiet_transformers import save_model

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
MAX_POSITIONS = 1024


def build_demo(directory: Path, seed: int) -> None:
    """Write a Qwen3 model of 0.4 million random weights, and its character tokenizer."""
    tokenizer = character_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    layers = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="float32",
        **(layers | heads | ends),
    )
    # The caller's random state neither decides the weights nor changes.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, directory)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; decoding gives the text back exactly."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
